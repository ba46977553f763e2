"""summary.json of a run, from its metrics and byte counts."""

import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from jgc.training.data import Score, further_of, score_of
from jgc.training.data.score import FURTHER, KEY
from jgc.training.errors import UserError
from jgc.training.output.metrics import Line
from jgc.training.run.folder import SUMMARY, read_object
from jgc.training.run.setup import Setup
from jgc.training.settings.config import Config, method_name
from jgc.training.settings.local_config import LocalConfig
from jgc.training.steps.costs import PhaseCost, as_json, ratios
from jgc.types import Nodes

DIAGNOSTICS = ("reconstruction_cosine", "relative_error", "ceiling_cosine", "without_code_cosine",
               "signs_means_cosine", "true_cosine")  # fmt: skip
SLOTS = ("slots_used", "overflow")  # of a buffer of fixed size: the share in use, and values that did not fit
NEEDED = ("method", "workload", "seed", "nodes", "steps", "layout", "parameters", "phases", "total_bytes",
          "dense_total_bytes", "compression_ratio")  # fmt: skip  # of a summary
CORRECTED = ("validation_loss", "learning_rate")
POSITIONS = ("position_bytes", "entropy_position_bytes", "deflate_position_bytes")  # a step and sending node


def summarise(
    setup: Setup, steps: int, lines: Sequence[Line], costs: Sequence[PhaseCost], other: dict[str, Any],
    scores: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """The summary of a run of `steps` steps. `scores`: its last ones, if the last line does not have them."""
    config, nodes, values = setup.parts.config, setup.parts.nodes, setup.values
    score, further = setup.source.score, setup.source.further
    reached = [cost for cost in costs if any(line["phase"] == cost.phase.name for line in lines)] or list(costs[:1])
    last = reached[-1]
    final = [line for line in lines if line["phase"] == last.phase.name]
    exchanges = _exchanges(config, lines)
    elements, cosines = exchanges * (_mean(final, "elements_sent") or 0.0), _values(final, "reconstruction_cosine")
    return {
        "method": method_name(config.compressor),
        "workload": config.workload,
        "nodes": config.nodes,
        "layout": nodes.layout,
        "seed": config.seed,
        "steps": steps,
        "steps_without_metrics": steps - len(lines),
        "parameters": values,
        KEY: score.name,
        **({FURTHER: [figure.name for figure in further]} if further else {}),
        **_newest(lines[-1:], (score, *further)),
        **{figure.name: scores[figure.name] for figure in (score, *further) if figure.name in scores},
        "phases": [_phase(cost, lines, nodes, (score, *further), config.local, exchanges) for cost in reached],
        "compression_ratio": _ratios(last, final, exchanges),
        "element_ratio": values / elements if elements else None,
        **{name: _mean(final, name) for name in (*POSITIONS, *SLOTS)},
        **{name: _last(lines, name) for name in CORRECTED},
        "total_bytes": sum(line["bytes"] for line in lines),
        "dense_total_bytes": sum(line["bytes_uncompressed"] for line in lines),
        "sent": sent_by_a_node(setup, lines),
        **{name: _mean(final, name) for name in DIAGNOSTICS},
        "reconstruction_cosine_p5": float(np.percentile(cosines, 5)) if cosines else None,
        "other": other,
        "versions": versions(),
    }


def sent_by_a_node(setup: Setup, lines: Sequence[Line]) -> dict[str, Any]:
    """Bytes that a node sends up in a step and for each of its labels, the mean over steps and nodes.

    `every` is the number of steps in a round, None without local steps; `unit` is "token" or "image", for a label.
    """
    config, source = setup.parts.config, setup.source
    count, dense, text = max(len(lines), 1), setup.costs[0].dense, source.kind == "text"
    step = sum(line["bytes"] / line["bytes_uncompressed"] for line in lines) / count * dense  # nodes may have changed
    labels = config.batch_size * (source.inputs(1).words.shape[1] if text else 1)
    label = sum(line["bytes"] for line in lines) / count / labels
    return {"every": config.local.every, "step": step, "label": label, "unit": "token" if text else "image"}


def _phase(
    cost: PhaseCost, lines: Sequence[Line], nodes: Nodes, scores: Sequence[Score], local: LocalConfig, exchanges: float
) -> dict[str, Any]:
    """A phase's figures; its scores are those after its last exchange, which H - 1 further steps may follow."""
    every = local.every or 1
    of_phase = [line for line in lines if line["phase"] == cost.phase.name]
    seconds = [line["seconds"] for line in of_phase if line.get("seconds") is not None]
    return {
        "name": cost.phase.name,
        "start": cost.phase.start,
        "steps": len(of_phase),
        **_newest(of_phase[-every:], scores),
        "seconds_per_step": statistics.median(seconds) if seconds else None,
        "compression_ratio": _ratios(cost, of_phase, exchanges),
        "wire": as_json(cost, nodes),
        **{name: _mean(of_phase, name) for name in DIAGNOSTICS},
    }


def _exchanges(config: Config, lines: Sequence[Line]) -> float:
    """Exchanges in a step. In rounds through a bucket nodes may take different numbers of steps."""
    if config.rounds.bucket:
        return sum("round" in line for line in lines) / max(1, len(lines))
    return config.local.fragments / (config.local.every or 1)


def _newest(lines: Sequence[Line], scores: Sequence[Score]) -> dict[str, float | None]:
    """The newest scores, by name; None where there are none."""
    return {score.name: _last(lines, score.name) for score in scores}


def _ratios(cost: PhaseCost, lines: Sequence[Line], exchanges: float) -> dict[str, float | None]:
    """Compression ratio of leader and worker, from the mean bytes of a phase's lines; None if one sends nothing.

    `exchanges`: in a step. With local steps the lines before a phase's first exchange belong to the phase before.
    """
    exchanged = [line for line in lines if line.get("elements_sent") is not None or "round" in line]
    means = {role: _mean(exchanged, f"bytes_up_{role}") for role in ("leader", "worker")}
    sent = {role: exchanges * (mean or 0.0) for role, mean in means.items()}
    if lines:
        return {role: cost.dense / size if size else None for role, size in sent.items()}
    return {role: ratio / exchanges if ratio and exchanges else None for role, ratio in ratios(cost).items()}


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    summary = read_object(folder / SUMMARY)
    try:
        names = [*NEEDED, score_of(summary).name, *(figure.name for figure in further_of(summary))]
    except ValueError as error:
        raise UserError(f"cannot read the run in {folder}: {error}") from error
    if missing := [name for name in names if name not in summary]:
        raise UserError(f"cannot read the run in {folder}: its {SUMMARY} has no {missing[0]!r}")
    if not summary["phases"]:
        raise UserError(f"cannot read the run in {folder}: its {SUMMARY} has no phase")
    return summary


def uplink(parameters: int, ratio: float | None) -> float:
    """Bytes that a node sends up in a step, from its compression ratio. A phase's `wire` is that of its first cycle.

    Example:
      >>> uplink(1000, 8.0), uplink(1000, None)
      (500.0, 0.0)
    """
    return 4.0 * parameters / ratio if ratio else 0.0


def _values(lines: Sequence[Line], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _last(lines: Sequence[Line], name: str) -> float | None:
    return next(reversed(_values(lines, name)), None)


def _mean(lines: Sequence[Line], name: str) -> float | None:
    values = _values(lines, name)
    return statistics.fmean(values) if values else None


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a run's numbers depend on."""
    packages = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "jgc"):
        try:
            packages[name] = version("orbax-checkpoint" if name == "orbax" else name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return packages
