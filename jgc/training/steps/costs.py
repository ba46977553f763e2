"""Bytes of each phase of a run, computed from shapes before the first step."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

from jgc.nodes.layouts import as_one_per_device
from jgc.nodes.placement import sharding_spec
from jgc.types import Compressor, Nodes, Phase, PyTree, Wire
from jgc.wire.account import compression_ratio, logical_bytes, physical_bytes, sent_by, step_total


class PhaseCost(NamedTuple):
    """Bytes of one phase."""

    phase: Phase  # the phase
    wire: Wire  # in this run's layout; without physical bytes if one device holds all nodes
    apart: Wire  # with one node per device, for the physical bytes
    dense: float  # one node's uncompressed gradient
    leader: float  # uplink of the leader in a step; a worker's if the method has no leader
    worker: float  # uplink of each other node in a step
    up: float  # uplink of all nodes in a step
    once: float  # sent once to all nodes on entering the phase, such as trained weights

    @property
    def compresses(self) -> bool:
        """Whether any node sends less than the uncompressed gradient."""
        return self.worker < self.dense


Costs = dict[Hashable, PhaseCost]  # by the phase's value


def gradient_bytes(params: PyTree) -> float:
    """Size of one node's uncompressed gradient."""
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)))


def phase_cost(compressor: Compressor, phase: Phase, params: PyTree, nodes: Nodes) -> PhaseCost:
    """The cost of a phase, from shapes."""
    if any(tuple(sharding_spec(x)) for x in jax.tree.leaves(params)):
        wire = compressor.wire(phase.value, params, nodes)
        return _cost(phase, wire, wire, params, nodes)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    apart = compressor.wire(phase.value, shapes, as_one_per_device(nodes))
    # tracing a step is slow: reuse `apart` where this run's layout gives the same answer
    if nodes.mesh is None:
        wire = apart._replace(physical=())
    elif nodes.per_device == 1 and not nodes.fast:
        wire = apart
    else:
        wire = compressor.wire(phase.value, shapes, nodes)
    return _cost(phase, wire, apart, shapes, nodes)


def _cost(phase: Phase, wire: Wire, apart: Wire, shapes: PyTree, nodes: Nodes) -> PhaseCost:
    return PhaseCost(
        phase,
        wire,
        apart,
        gradient_bytes(shapes),
        sent_by("leader", wire),
        sent_by("worker", wire),
        step_total(wire.logical, nodes.count, "up"),
        step_total(wire.once, nodes.count),  # trained weights travel down, and count as sent
    )


def as_json(cost: PhaseCost, nodes: Nodes) -> dict[str, Any]:
    """The cost as plain data: logical bytes of a step by role, direction and payload; physical bytes of a device."""
    return {
        "logical": logical_bytes(cost.wire.logical, nodes.count),
        "once": logical_bytes(cost.wire.once, nodes.count),
        "physical": physical_bytes(cost.wire.physical),
        "physical_one_node_per_device": physical_bytes(cost.apart.physical),
    }


def ratios(cost: PhaseCost) -> dict[str, float | None]:
    """Compression ratio of leader and worker; None for a node that sends nothing."""
    both = {role: compression_ratio(role, cost.wire, cost.dense) for role in ("leader", "worker")}
    return {role: ratio if ratio != float("inf") else None for role, ratio in both.items()}
