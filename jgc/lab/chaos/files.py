"""Checkpoint files with flipped bits, under another step's name, with another key in their JSON; two runs at once."""

import json
import os
import signal
from pathlib import Path
from random import Random

from jgc.lab.chaos.lab import EVERY, STEPS, Lab
from jgc.lab.chaos.verdict import SILENT, SURVIVED, Outcome


def flipped_file(lab: Lab, dice: Random) -> Outcome:
    """One to eight bits flipped in a file of the newest checkpoint; the resumed run falls back, or says so."""
    folder = _newest(lab.half())
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    file = dice.choices(files, [path.stat().st_size ** 0.5 for path in files])[0]
    data = bytearray(file.read_bytes())
    for _ in range(dice.randint(1, 8)):
        bit = dice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return _resumed(lab, f"{file.relative_to(folder)} of checkpoint {folder.name}")


def cut_file(lab: Lab, dice: Random) -> Outcome:
    """A file of the newest checkpoint is cut short, or missing."""
    folder = _newest(lab.half())
    file = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    size = dice.randint(-1, file.stat().st_size)
    if size < 0:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:size])
    return _resumed(lab, f"{file.relative_to(folder)} of checkpoint {folder.name} {'cut' if size >= 0 else 'gone'}")


def renamed(lab: Lab, dice: Random) -> Outcome:
    """The newest checkpoint's folder has the name of a different step."""
    folder = _newest(lab.half())
    step = dice.choice([step for step in range(1, STEPS) if not (folder.parent / f"{step}").exists()])
    folder.rename(folder.parent / f"{step}")
    return _resumed(lab, f"checkpoint {folder.name} renamed {step}")


def changed_key(lab: Lab, dice: Random) -> Outcome:
    """A key or a value of the newest checkpoint's JSON is changed, or the key is gone."""
    folder = _newest(lab.half())
    file = next(path for path in sorted((folder / "host").rglob("*")) if path.is_file() and _is_ours(path))
    data = json.loads(file.read_text())
    place, way = data, list[str]()
    while isinstance(place, dict) and place and (not way or dice.random() < 0.7):
        key = dice.choice(sorted(place))
        before, place, way = place, place[key], [*way, key]
    value = before.pop(way[-1])
    how = dice.choice(("renamed", "changed", "gone"))
    if how != "gone":
        name = f"{way[-1]}x" if how == "renamed" else way[-1]
        before[name] = value if how == "renamed" else dice.choice((None, 10**6, "x", [], {}))
    file.write_text(json.dumps(data))
    return _resumed(lab, f"{'.'.join(way)} {how}")


def _is_ours(path: Path) -> bool:
    return b'"arrays"' in path.read_bytes()


def _newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name))


def _resumed(lab: Lab, what: str) -> Outcome:
    outcome = lab.verdict(lab.start(lab.folder / "run"))
    return outcome._replace(what=f"{what}: {outcome.what}")


def two_at_once(lab: Lab, dice: Random) -> Outcome:
    """A second run in the folder of one that runs: it is refused, and the first is bit-equal."""
    first = lab.start()
    lab.at_step(first, dice.randrange(1, STEPS - 2 * EVERY))
    for running in first.running:  # so that the second comes before the first ends: who stands still is not dead
        os.kill(running.process.pid, signal.SIGSTOP)
    refused = lab.ends(lab.start(first.run_dir))
    for running in first.running:
        os.kill(running.process.pid, signal.SIGCONT)
    outcome = lab.verdict(first)
    if outcome.kind != SURVIVED:
        return outcome
    late = all(end.code == 0 for end in refused)  # the first had ended before the second looked
    named = all("in use by process" in "".join(end.errors) for end in refused)
    if not (late or (named and all(end.code == 1 for end in refused))):
        return Outcome(SILENT, f"the second ended with {[end.code for end in refused]}: {refused[0].output[-200:]}")
    return Outcome(SURVIVED, f"the second {'came too late' if late else 'was refused'}; the first: bit-equal")
