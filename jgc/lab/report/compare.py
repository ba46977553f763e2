"""Train every method for every seed, and write the report on them: `python -m jgc compare`."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jgc.compress import METHODS
from jgc.lab.launch import train_all
from jgc.lab.report.page import write
from jgc.lab.report.runs import CONFIGS
from jgc.training.config import GROUPS
from jgc.training.errors import FAILED, UserError, did_you_mean
from jgc.training.workloads import workload_named

FIXED = ("workload", "seed", "run_dir", "resume", "compressor", "distributed")


def known_methods() -> dict[str, type]:
    """Settings classes by every name that `--methods` takes."""
    return CONFIGS | {name: method.settings for name, method in METHODS.items()}


def words(values: Sequence[str]) -> list[str]:
    """The entries of a list that is separated by commas, by spaces or by both, each once.

    Example:
      >>> words(["a,b", "c,", "a"])
      ['a', 'b', 'c']
    """
    return list(dict.fromkeys(word.strip() for value in values for word in value.split(",") if word.strip()))


def variants_of(methods: Sequence[str]) -> dict[str, Any]:
    """Each method's default settings by its name.

    Raises:
      UserError: an unknown method, none, or one under two names.
    """
    known = known_methods()
    variants: dict[str, Any] = {}
    for name in methods:
        if name not in known:
            raise UserError(f"unknown method {name!r}{did_you_mean(name, list(known))} (one of {', '.join(known)})")
        twin = next((other for other in variants if type(variants[other]) is known[name]), None)
        if twin:
            raise UserError(f"{twin} and {name} are the same method: give one of them")
        variants[name] = known[name]()
    if not variants:
        raise UserError(f"--methods names none (one or more of {', '.join(known)})")
    return variants


def seeds_of(values: Sequence[str]) -> list[int]:
    """Seeds as whole numbers.

    Raises:
      UserError: one of them is none, or there are none.
    """
    found = words(values)
    bad = next((word for word in found if not word.isdecimal()), None)
    if bad is not None or not found:
        raise UserError(f"--seeds must be whole numbers such as 0,1,2, got {bad or 'none'}")
    return [int(word) for word in found]


def options_of(settings: Sequence[str], methods: Collection[str]) -> dict[str, list[str]]:
    """Command lines of the methods' runs from entries of `--set`.

    Args:
      settings: FIELD=VALUE for all methods (data.FIELD and the like too), METHOD.FIELD=VALUE for one method alone:
        its own setting, or where it has none of that name an option of its run.
      methods: names of the methods that run.

    Raises:
      UserError: an entry that is neither, or for a method that does not run.

    Example:
      >>> options_of(["learning_rate=0.1", "dgc.clip_norm=1"], ["baseline", "dgc"])
      {'baseline': ['--learning-rate=0.1'], 'dgc': ['--learning-rate=0.1', '--compressor.clip-norm=1']}
    """
    out: dict[str, list[str]] = {name: [] for name in methods}
    for entry in settings:
        field, equals, value = entry.partition("=")
        method, dot, own = field.partition(".") if field.split(".")[0] not in GROUPS else (field, "", "")
        if not equals or not field:
            raise UserError(f"--set takes FIELD=VALUE or METHOD.FIELD=VALUE, got {entry!r}")
        fixed = next((part for part in (field, own) if part.split(".")[0].replace("-", "_") in FIXED), None)
        if fixed:
            has = "--workload, --seeds and --run-dir, and is one process"
            raise UserError(f"--set {entry}: {fixed} is not to be set; compare has {has}")
        if dot and method not in out:
            raise UserError(f"--set {entry}: {method} is none of --methods{did_you_mean(method, list(out))}")
        is_own = dot and own.replace("-", "_") in {f.name for f in dataclasses.fields(known_methods()[method])}
        for name in [method] if dot else out:
            out[name].append(option_word("compressor." if is_own else "", own if dot else field, value))
    return out


def option_word(prefix: str, field: str, value: str) -> str:
    """One word of `train.py`'s command line; what is true or false is a flag there."""
    name = field.replace("_", "-")
    flags = {"true": f"--{prefix}{name}", "false": f"--{prefix}no-{name}"}
    return flags.get(value.lower(), f"--{prefix}{name}={value}")


def compare(
    methods: Sequence[str],
    seeds: Sequence[str],
    workload: str,
    run_dir: Path,
    data_dir: str | None = None,
    changes: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> Path:
    """Train what has not been trained yet, one line for each run, and write the report into the runs' folder.

    Args:
      methods: names, as `--methods` takes them.
      seeds: numbers, as `--seeds` takes them.
      workload: a name in `jgc.training.workloads`.
      run_dir: folder of the runs and of the report.
      data_dir: folder of prepared data sets.
      changes: settings of the runs, or of the methods that have them, in place of the workload's.
      settings: entries, as `--set` takes them.

    Returns:
      The report's path.

    Raises:
      UserError: a name, a number or a setting that is none, a folder with other settings, or runs that diverged: the
        others are trained and reported all the same.
    """
    workload_named(workload)
    variants, numbers = variants_of(words(methods)), seeds_of(seeds)
    options, failed = options_of(settings, variants), dict[str, str]()
    train_all(variants, run_dir, workload, numbers, data_dir, None, changes, options, say, failed)
    wanted = [run_dir / f"{name}-seed{seed}" for name in variants for seed in numbers]
    finished = finished_of(wanted, failed)
    page = write(finished, run_dir, remarks=remarks_on(failed))
    tell_unfinished(wanted, failed, page)
    return page


def finished_of(wanted: Sequence[Path], failed: Mapping[str, str]) -> list[Path]:
    """Folders of the runs that finished.

    Args:
      wanted: folders of all runs.
      failed: by its folder, why a run did not finish.

    Raises:
      UserError: none did.
    """
    finished = [folder for folder in wanted if str(folder) not in failed]
    if not finished:
        raise UserError(f"no run finished: {next(iter(failed.values()))}", FAILED)
    return finished


def remarks_on(failed: Mapping[str, str]) -> list[str]:
    """What a page says of the runs that did not finish."""
    return [f"Did not finish: `{Path(folder).name}`, {error}." for folder, error in failed.items()]


def tell_unfinished(wanted: Sequence[Path], failed: Mapping[str, str], page: Path) -> None:
    """Once the page is written.

    Raises:
      UserError: some runs did not finish.
    """
    if failed:
        raise UserError(f"{len(failed)} of {len(wanted)} runs did not finish; {page} is on the others", FAILED)


def say(line: str) -> None:
    """Progress, one line at a time."""
    print(line, flush=True)
