"""Runs of several processes for a fault to disturb, and verdicts from comparisons with undisturbed runs."""

import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from jgc.compress import METHODS
from jgc.lab.chaos.child import child
from jgc.lab.chaos.processes import Ended, Running, free_port, newest_step, place, start, wait_for_step
from jgc.lab.chaos.verdict import GOOD, SAID, SILENT, SURVIVED, Outcome, judge
from jgc.training.errors import FAILED, UserError
from jgc.training.run.folder import CONFIG

NODES, STEPS, EVERY = 4, 20, 3  # steps between checkpoints
CONFIG_FILE = """from jgc import compress
from jgc.training.settings.config import Config


def get_config():
    settings = compress.METHODS[{method!r}].settings()
    short = {{name: value for name, value in {short!r}.items() if hasattr(settings, name)}}
    return Config(compressor=type(settings)(**short))
"""
SHORT = {"warmup_steps": 6, "autoencoder_steps": 6, "alpha": 0.05, "sampling_steps": 3, "compressed_steps": 4,
         "refresh": 4, "measure_every": 3}  # fmt: skip


class Recipe(NamedTuple):
    """Which run.

    Attributes:
      method: a name of the registry.
      processes: of the run.
      copies: devices of each node; with 1 each process has one device, with 2 all state has a copy.
    """

    method: str
    processes: int
    copies: int = 1

    @property
    def devices(self) -> int:
        """Of each process."""
        return 1 if self.copies == 1 else self.copies * NODES // self.processes


class Whole(NamedTuple):
    """A run that nobody has disturbed: its folder, and the seconds to its first step and to its end."""

    recipe: Recipe
    run_dir: Path
    first: float
    seconds: float


class Group(NamedTuple):
    """The processes of a run that has been started."""

    run_dir: Path
    port: int
    running: list[Running]


@dataclass
class Lab:
    """A try: its folder, and how its runs are started and judged.

    Attributes:
      folder: of the try.
      whole: the run that nobody has disturbed.
      limit: seconds after which what should have ended counts as hanging.
      timeout: --distributed.timeout.
      deadline: of the campaign, by time.monotonic().
      number: of the try of this fault, from 0.
      of: gives the undisturbed run of a different recipe.
    """

    folder: Path
    whole: Whole
    limit: float
    timeout: float
    deadline: float
    number: int
    of: Callable[[Recipe], Whole]
    started: list[Running] = field(default_factory=list)

    @property
    def processes(self) -> int:
        """Of a run."""
        return self.whole.recipe.processes

    def another(self, dice: Random) -> int:
        """A process that is not process 0, if there is one."""
        return dice.randrange(1, self.processes) if self.processes > 1 else 0

    def start(
        self,
        run_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        own: Mapping[int, Mapping[str, str]] | None = None,
        port: int = 0,
        only: Collection[int] | None = None,
        options: Collection[str] = (),
        target: Callable[..., None] = child,
    ) -> Group:
        """Start processes of a run, with --resume where its folder holds one.

        Args:
          run_dir: the folder; one in this try's if not given.
          environment: of all processes: see `child`.
          own: the same of some.
          port: of the coordinator, 0 for a free one.
          only: which processes; all if not given.
          options: further ones.
          target: the function that a process runs.
        """
        run_dir, port = run_dir or self.folder / "run", port or free_port()
        name = f"{len(self.started)}"
        group = Group(run_dir, port, [])
        for i in range(self.processes) if only is None else only:
            line = [*arguments(self.whole.recipe, self.folder.parent, run_dir, port, i, self.timeout), *options]
            more = environment_of(self.whole.recipe, {**(environment or {}), **(own or {}).get(i, {})})
            group.running.append(start(self.folder / f"{name}-{i}.txt", line, more, target))
        self.started += group.running
        return group

    def wait(self, group: Group, dice: Random) -> str:
        """Wait for a random moment of a run; says which. Half of them are before the first step."""
        step, share = dice.randrange(-STEPS // 2, STEPS), dice.random()
        if step <= 0:
            time.sleep(share * self.whole.first)
            return "before the first step"
        self.at_step(group, step)
        time.sleep(share * (self.whole.seconds - self.whole.first) / STEPS)
        return f"after step {newest_step(group.run_dir)}"

    def at_step(self, group: Group, step: int) -> None:
        """Wait until a run has written a step, or a process has ended."""
        wait_for_step(group.run_dir, step, group.running, self.patience)

    @property
    def patience(self) -> float:
        """Seconds in which an undisturbed run must end, on a machine that is busy now."""
        return self.limit + 5 * self.whole.seconds

    def ends(self, group: Group, seconds: float | None = None) -> list[Ended]:
        """The ends of all processes."""
        deadline = time.monotonic() + (self.patience if seconds is None else seconds)
        return [r.end(deadline - time.monotonic()) for r in group.running]

    def verdict(
        self, group: Group, killed: Collection[int] = (), mute: Collection[int] = (), seconds: float | None = None
    ) -> Outcome:
        """Wait for the run's end, and judge it."""
        return judge(self.ends(group, seconds), group.run_dir, self.whole.run_dir, killed, mute)

    def resumed(self, group: Group, before: Outcome, outcome: str = SAID) -> Outcome:
        """Resume a run that has ended well. It must end bit-equal: `outcome` is then the verdict.

        Args:
          group: the run.
          before: how it ended.
          outcome: SAID, or SURVIVED where the fault is of a kind that ends every run.
        """
        if before.kind != SAID:
            return before
        after = self.verdict(self.start(group.run_dir))
        if after.kind == SURVIVED:
            return Outcome(outcome, f"{before.what}; resumed: bit-equal")
        return Outcome(after.kind if after.kind not in GOOD else SILENT, f"{before.what}; resumed: {after.what}")

    def half(self, keep: bool = False) -> Path:
        """A copy of a run that was stopped in the middle, with two checkpoints, or all of them where `keep`."""
        halves = self.whole.run_dir.parent / ("kept" if keep else "half")
        if not halves.exists():
            environment = {"JGC_CHAOS_KEEP": "1"} if keep else {}
            made = halves.with_name(f"{halves.name}-made")
            shutil.rmtree(made, ignore_errors=True)
            group = self.start(made, environment, options=["--steps", str(STEPS if keep else STEPS // 2 + 1)])
            bad = [end.output for end in self.ends(group) if end.code != 0]
            if bad:
                raise UserError(f"a run that nobody disturbs does not end: {bad[0]}", FAILED)
            (made / "summary.json").unlink()
            made.rename(halves)
        shutil.copytree(halves, self.folder / "run")
        return self.folder / "run"

    def remove(self, path: Path) -> None:
        """Remove a folder of this try."""
        shutil.rmtree(path)

    def kill(self) -> None:
        """End what still runs."""
        for running in self.started:
            if running.alive:
                running.process.kill()
                running.process.join()


def environment_of(recipe: Recipe, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a recipe's processes."""
    flags = f"--xla_force_host_platform_device_count={recipe.devices}"
    return {"XLA_FLAGS": flags, "JGC_CHAOS_MODEL": "conv" if recipe.method == "gradiveq" else "", **more}


def arguments(recipe: Recipe, folder: Path, run_dir: Path, port: int, process: int, timeout: float) -> list[str]:
    """The options of train.py for one process. The config file is written into `folder`."""
    if recipe.method not in METHODS:
        raise UserError(f"unknown method {recipe.method!r}; there are {', '.join(METHODS)}")
    config = folder / f"{recipe.method}.py"
    if not config.exists():
        config.write_text(CONFIG_FILE.format(method=recipe.method, short=SHORT))
    options = ["--config", str(config), "--run-dir", str(run_dir), "--nodes", str(NODES), "--batch-size", "16"]
    options += ["--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--check-replicas-every", "2"]
    options += ["--evaluate-every", "0", "--diagnose-every", "0", "--log-every", "5"]
    options += ["--devices-per-node", str(recipe.copies)] if recipe.copies > 1 else []
    options += ["--resume"] if (run_dir / CONFIG).exists() else []
    if recipe.processes == 1:
        return options
    options += ["--distributed.timeout", f"{timeout:g}", "--distributed.connect-timeout", "60"]
    return [*options, *place(port, recipe.processes, process)]


def undisturbed(recipe: Recipe, folder: Path, limit: float, timeout: float) -> Whole:
    """Train a run that nobody disturbs.

    Raises:
      UserError: it does not end with exit code 0.
    """
    home = folder / f"{recipe.method}-{recipe.processes}-{recipe.copies}"
    home.mkdir(parents=True)
    whole = Whole(recipe, home / "run", 0.0, 0.0)
    more = environment_of(recipe, {})
    begun, port = time.monotonic(), free_port()
    running = [
        start(home / f"{i}.txt", arguments(recipe, folder, whole.run_dir, port, i, timeout), more)
        for i in range(recipe.processes)
    ]
    wait_for_step(whole.run_dir, 1, running, 10 * limit)
    first = time.monotonic() - begun
    for r in running:
        ended = r.end(10 * limit)
        if ended.code != 0:
            raise UserError(f"a run that nobody disturbs ends with {ended.code}: {ended.output[-600:]}", FAILED)
    return whole._replace(first=first, seconds=time.monotonic() - begun)
