"""A run's config.json: completed if it is from an older version, and compared on --resume."""

import dataclasses
from typing import Any

from jgc import compress
from jgc.training.settings.config import GROUPS, OPEN, Config, open_fields
from jgc.training.settings.workloads import WORKLOADS

# Settings that may change on --resume. Recording may not: the recording would have gaps that its reader cannot see.
FREE = frozenset(
    "steps run_dir resume compile_cache nodes distributed data.dir data.threads log_every evaluate_every "
    "diagnose_every checkpoint_every check_replicas_every record.max_megabytes "
    "rounds.start rounds.grace rounds.timeout rounds.end rounds.checkpoint_every rounds.retained rounds.seconds "
    "rounds.overlap rounds.merge".split()
)

# Deleted settings, with the defaults that they had: a run that had these may go on.
GONE: dict[str, dict[str, Any]] = {
    "compressor": {
        "positions": "own", "candidates": 64, "rows": 0,  # of sparse methods
        "control_limit": 0.0, "control_every": 10, "feedback_steps": 1, "slice_size": 0, "others": "dense",  # gradiveq
        "innovation_dtype": "float32", "autoencoder_updates": 1, "lambda_reconstruction": 1.0,  # LGC
    },
    "layers": {"embeddings": "", "rows": 0},
}  # fmt: skip


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A run's config.json with settings added since, from the workload or the defaults, and without deleted ones.

    Example:
      >>> completed({"method": "topk", "compressor": {"alpha": 0.1}})["compressor"]["strategy"]
      'warmup'
      >>> [completed({"method": "topk", "compressor": {"positions": x}})["compressor"].get("positions")
      ...  for x in ("own", "learned")]
      [None, 'learned']
    """
    method = compress.METHODS.get(config.get("method", ""))
    parts = GROUPS | ({} if method is None else {"compressor": method.settings})
    inner = {name: _defaults(kind) | _without_gone(name, kind, config.get(name, {})) for name, kind in parts.items()}
    workload = WORKLOADS.get(config.get("workload", ""))
    if config.get("unroll_nodes") in (True, False):  # of runs from before "auto", whose default was True
        config = config | {"unroll_nodes": "auto" if config["unroll_nodes"] else "no"}
    filled_in = {} if workload is None else {name: getattr(workload, name) for name in open_fields()}
    return _defaults(Config) | filled_in | config | inner


def _without_gone(name: str, kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without deleted ones that had their defaults."""
    fields, gone = {f.name for f in dataclasses.fields(kind)}, GONE.get(name, {})
    return {key: x for key, x in settings.items() if key in fields or key not in gone or x != gone[key]}


def _defaults(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass's fields, without those that a workload fills in."""
    missing = dataclasses.MISSING
    return {f.name: f.default for f in dataclasses.fields(kind) if f.default not in (missing, OPEN, "workload")}


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Differences between two resolved configs in settings that --resume must not change."""
    lines = []
    for name in [*new, *(name for name in old if name not in new)]:
        path = f"{prefix}{name}"
        if path in FREE:
            continue
        was, now = old.get(name, "absent"), new.get(name, "absent")
        if isinstance(was, dict) and isinstance(now, dict):
            lines += differences(was, now, f"{path}.")
        elif was != now:
            lines.append(f"{path} was {was!r}, is {now!r}")
    return lines
