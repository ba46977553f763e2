"""Bytes of a whole run by phase: how many steps each phase has, and what leader, worker and all nodes send in it."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from jgc.lab.plan.needs import PhaseBytes, Plan
from jgc.lab.shared.tables import ratio
from jgc.training.output.table import size

HEAD = ["method", "phase", "steps", "leader\nup", "worker\nup", "leader\ndown", "worker\ndown", "all nodes\nup",
        "all nodes\ndown", "once", "up and once,\nless than\nuncompressed"]  # fmt: skip
WHOLE = "whole run"
NOTE = (
    "Leader and worker are one node each, the leader the same throughout. Once: on entering the phase, to all nodes "
    "together; what all nodes send up, and once, is a run's `total_bytes` (but for fragments of local steps that are "
    "exchanged after the last whole round). Methods that choose their phases in the run have no row."
)


def whole_run(plans: Sequence[Plan], shown: Callable[[float | None], str] = size) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: each phase of each method, and their sum."""
    rows = []
    for plan in plans:
        if plan.starts is None:
            continue
        every = plan.config.local.every or 1
        counts = steps_of(plan.starts, plan.config.steps // every)
        cells = [[count, *figures(phase, count)] for phase, count in zip(plan.phases, counts, strict=True)]
        names = [phase.name for phase in plan.phases]
        if len(cells) > 1:
            cells.append([sum(column) for column in zip(*cells, strict=True)])
            names.append(WHOLE)
        for i, (name, (count, *sent)) in enumerate(zip(names, cells, strict=True)):
            up = sent[4] + sent[6]
            whole = name == WHOLE or len(cells) == 1  # with the steps after the last exchange
            dense = (plan.config.steps if whole else count * every) * plan.config.nodes * plan.dense
            rows.append(["" if i else plan.method, name, f"{count:,}", *map(shown, sent),
                         ratio(dense / up) if up else "-"])  # fmt: skip
    local = any(plan.config.local.every for plan in plans)
    return ["rounds" if local and name == "steps" else name for name in HEAD], rows


def steps_of(starts: Sequence[int], total: int) -> tuple[int, ...]:
    """The number of `total` steps in each phase, from the first steps of the phases.

    Example:
      >>> steps_of([0, 200, 500], 450)
      (200, 250, 0)
    """
    bounds = [min(start, total) for start in starts] + [total]
    return tuple(b - a for a, b in pairwise(bounds))


def figures(phase: PhaseBytes, steps: int) -> list[float]:
    """Bytes of `steps` steps of a phase: up and down of leader, worker and all nodes, and once."""
    ways = [phase.logical.get(role, phase.logical.get("worker", {})) for role in ("leader", "worker", "server")]
    leader, worker, everyone = ([steps * sum(way.get(d, {}).values()) for d in ("up", "down")] for way in ways)
    once = sum(sum(kinds.values()) for kinds in phase.once.get("server", {}).values()) if steps else 0.0
    return [leader[0], worker[0], leader[1], worker[1], *everyone, once]
