"""What each phase of a run costs on the wire, before a single step is taken."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

from jgc.nodes import as_one_per_device
from jgc.types import Compressor, Nodes, Phase, PyTree, Wire
from jgc.wire.account import compression_ratio, logical_bytes, physical_bytes, sent_by, step_total


class PhaseCost(NamedTuple):
    """Bytes of one phase.

    Attributes:
      phase: which.
      wire: as the nodes are laid out in this run; no physical bytes where one device holds all nodes.
      apart: the same with every node on a device of its own, for its physical bytes.
      dense: size of the uncompressed gradient, one node's.
      leader: what the leader sends up in a step; a worker's where there is no leader.
      worker: what each other node sends up in a step.
      up: what all nodes send up in a step.
      down: what all nodes receive in a step.
      once: what is sent a single time, on entering the phase, to all nodes together.
    """

    phase: Phase
    wire: Wire
    apart: Wire
    dense: float
    leader: float
    worker: float
    up: float
    down: float
    once: float

    @property
    def compresses(self) -> bool:
        """Whether any node sends less than the uncompressed gradient."""
        return self.worker < self.dense


Costs = dict[Hashable, PhaseCost]  # by the phase's value


def gradient_bytes(params: PyTree) -> float:
    """Size of one node's uncompressed gradient."""
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)))


def phase_costs(compressor: Compressor, params: PyTree, nodes: Nodes) -> tuple[PhaseCost, ...]:
    """The cost of every phase of the schedule."""
    return tuple(phase_cost(compressor, phase, params, nodes) for phase in compressor.schedule)


def phase_cost(compressor: Compressor, phase: Phase, params: PyTree, nodes: Nodes) -> PhaseCost:
    """The cost of a phase, from shapes alone."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    apart = compressor.wire(phase.value, shapes, as_one_per_device(nodes))
    if nodes.mesh is None:  # tracing a step takes a while: once is enough where the other answer is known
        wire = apart._replace(physical=())
    elif nodes.per_device == 1 and not nodes.fast:
        wire = apart
    else:
        wire = compressor.wire(phase.value, shapes, nodes)
    return PhaseCost(
        phase,
        wire,
        apart,
        gradient_bytes(shapes),
        sent_by("leader", wire),
        sent_by("worker", wire),
        step_total(wire.logical, nodes.count, "up"),
        step_total(wire.logical, nodes.count, "down"),
        step_total(wire.once, nodes.count),  # trained weights: they come down, and count as sent all the same
    )


def as_json(cost: PhaseCost, nodes: Nodes) -> dict[str, Any]:
    """The cost as plain data: bytes of one step by role, direction and kind, and physical bytes of a device."""
    return {
        "logical": logical_bytes(cost.wire.logical, nodes.count),
        "once": logical_bytes(cost.wire.once, nodes.count),
        "physical": physical_bytes(cost.wire.physical),
        "physical_one_node_per_device": physical_bytes(cost.apart.physical),
    }


def ratios(cost: PhaseCost) -> dict[str, float | None]:
    """Compression ratio of leader and worker; None where a node sends nothing."""
    both = {role: compression_ratio(role, cost.wire, cost.dense) for role in ("leader", "worker")}
    return {role: ratio if ratio != float("inf") else None for role, ratio in both.items()}
