"""`python -m jgc rounds demo`: processes on a folder, one of which is killed and comes back."""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from jgc.lab.rounds import demo_node
from jgc.training.errors import FAILED, UserError
from jgc.training.run.folder import write_whole

KILL_AFTER = 4  # rounds; the node that is killed is the last one
AWAY, MORE = 2, 4  # rounds without it, and rounds after it has come back
MOST = 9  # nodes
LONGEST = 1e6  # seconds


@dataclass(frozen=True)
class Demo:
    """Train in processes that share a folder; one is killed and comes back.

    A minute, without a network, a server or downloads. Prints what happens, and ends with exit code 0 only if all
    nodes had the same parameters after every round.

        python -m jgc rounds demo --nodes 3

        [  9 s] round 4: members a b; a waited 3.1 s
    """

    nodes: int = 3
    """processes, 3 to 9, two of which close a round"""
    limit: float = 300.0
    """seconds after which it gives up; raise it on a busy machine"""
    run_dir: Path | None = None
    """folder for bucket and disks, which stays; a temporary one if not given"""

    def run(self, line: str) -> None:
        """Run the demonstration."""
        if not 3 <= self.nodes <= MOST:
            raise UserError(f"--nodes must be from 3 to {MOST}, got {self.nodes}")
        if not 0 < self.limit <= LONGEST:
            raise UserError(f"--limit must be above 0 and at most {LONGEST:g}, got {self.limit:g}")
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if any(self.run_dir.iterdir()):
                raise UserError(f"--run-dir {self.run_dir} must be empty")
        folder = self.run_dir or Path(tempfile.mkdtemp(prefix="jgc-rounds-"))
        stage = Stage(folder, self.nodes, time.monotonic() + self.limit)
        try:
            play(stage)
        finally:
            stage.end()
            if self.run_dir is None:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Stage:
    """The processes and their output.

    Attributes:
      folder: of the bucket and the disks.
      nodes: how many.
      deadline: of `time.monotonic`.
      digests: by rounds closed, then by node.
      running: the newest process of each node.
    """

    folder: Path
    nodes: int
    deadline: float
    began: float = field(default_factory=time.monotonic)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    running: dict[str, subprocess.Popen] = field(default_factory=dict)
    lines: "queue.Queue[tuple[str, dict[str, Any]]]" = field(default_factory=queue.Queue)

    def start(self, node: str) -> None:
        """Start a process of a node, and a thread that reads its output."""
        flags = " ".join(x for x in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in x)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        environment.pop("JGC_ROUNDS_SECRET", None)
        words = [sys.executable, "-m", demo_node.__name__, str(self.folder), node, str(self.nodes)]
        with open(self.folder / f"{node}.txt", "a") as errors:
            process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.running[node] = process
        threading.Thread(target=self._read, args=(node, process), daemon=True).start()

    def _read(self, node: str, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            if text.endswith("\n"):  # else the process was killed while it printed
                self.lines.put((node, json.loads(text)))
        self.lines.put((node, {"ended": process.wait()}))

    def said(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The nodes' output, line by line.

        Raises:
          UserError: the time is over, or a process has failed.
        """
        while True:
            try:
                node, line = self.lines.get(timeout=max(0.0, self.deadline - time.monotonic()))
            except queue.Empty:
                seconds = self.deadline - self.began
                raise UserError(
                    f"not done after {seconds:.0f} s; raise --limit on a busy machine; the nodes' errors: "
                    f"{self.errors()}", FAILED,
                ) from None  # fmt: skip
            if line.get("ended", 0) > 0:  # below 0: killed by this program
                raise UserError(f"node {node} ended with exit code {line['ended']}: {self.errors()}", FAILED)
            if "digest" in line:
                self.digests.setdefault(line["number"], {})[node] = line["digest"]
            yield node, line

    def errors(self) -> str:
        """The last line that each node has printed on standard error."""
        texts = {path.stem: path.read_text().strip().splitlines() for path in sorted(self.folder.glob("*.txt"))}
        return "; ".join(f"{node}: {lines[-1][:200]}" for node, lines in texts.items() if lines) or "none"

    def tell(self, text: str) -> None:
        """Print a line with the seconds so far."""
        print(f"[{time.monotonic() - self.began:3.0f} s] {text}", flush=True)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.running.values():
            process.kill()
            process.wait()


def play(stage: Stage) -> None:
    """Start all, kill the last node, start it again, wait until it counts, and compare all digests.

    Raises:
      UserError: nodes disagree, or the node that was killed does not count again.
    """
    names = list(ascii_lowercase[: stage.nodes])
    victim, bucket = names[-1], stage.folder / "bucket"
    print(f"{len(names)} processes meet in the folder {bucket}; s3://bucket/run would do as well.\n"
          f"Each takes {demo_node.STEPS} steps of AdamW a round; {demo_node.QUORUM} messages close a round, after "
          f"{demo_node.GRACE:g} s for the others.")  # fmt: skip
    for node in names:
        stage.start(node)
    shown, killed, back, counted = -1, None, None, None
    for node, line in stage.said():
        if "joined" in line:
            back = back if node != victim or killed is None else line["joined"]
            stage.tell(_joined(node, line))
        if "digest" not in line:
            if "ended" in line and all(process.poll() == 0 for process in stage.running.values()):
                break
            continue
        number = line["round"]
        if number > shown and node != victim:
            shown = number
            stage.tell(_round(node, line))
        if killed is None and number >= KILL_AFTER and node != victim:
            killed = number
            stage.running[victim].kill()
            stage.tell(f"kill -9 of {victim}, in its local steps")
        elif killed is not None and stage.running[victim].poll() is not None and number > killed + AWAY - 1:
            stage.start(victim)
            stage.tell(f"{victim} is started again, by the same line")
        if back is not None and counted is None and victim in line["members"] and number >= back:
            counted = number
            write_whole(stage.folder / "last", str(line["number"] + MORE).encode())
            stage.tell(f"{victim} counts again, in round {number}; it had joined after {back} rounds")
    compare(stage, victim)


def _joined(node: str, line: dict[str, Any]) -> str:
    residual = ", with the residual of its disk" if line["resumed"] else ""
    return (f"{node} joined after {line['joined']} rounds{residual}; {line['requests']} requests, {line['down']:,} "
            "bytes read")  # fmt: skip


def _round(node: str, line: dict[str, Any]) -> str:
    waited = f"; {node} waited {line['waited']:.1f} s" if line["waited"] >= demo_node.GRACE else ""
    return f"round {line['round']}: members {' '.join(line['members'])}; loss of {node} {line['loss']:.3f}{waited}"


def compare(stage: Stage, victim: str) -> None:
    """Print whether all nodes had the same parameters. Raises UserError if not."""
    different = {number: found for number, found in stage.digests.items() if len(set(found.values())) > 1}
    if different:
        number, found = min(different.items())
        raise UserError(f"after {number} rounds the digests differ: {found}", FAILED)
    of_victim = sum(victim in found for found in stage.digests.values())
    stage.tell(
        f"all digests of {len(stage.digests)} rounds agree; {victim} took part in {of_victim} of them"
    )
