"""Bytes of a step by phase, from static shapes."""

from typing import NamedTuple

from jgc.checks.misuse import check_compressor, check_nodes
from jgc.layout.pack import make_packing
from jgc.types import Compressor, Nodes, Phase, PyTree
from jgc.wire.account import step_total


class StepBytes(NamedTuple):
    """Bytes of one step of a phase.

    Attributes:
      device: bytes that one device sends to other nodes in the compiled exchange, flag included; 0
        if all nodes are on one device. Excludes traffic between devices of one node, and the
        metrics of `jgc.make_step`.
      node: bytes that one node sends up in the topology of the method's paper; with a leader, the
        mean over nodes.
      uncompressed: bytes of the gradient in f32, a node's uplink without compression.
    """

    device: float
    node: float
    uncompressed: float


def bytes_per_step(
    compressor: Compressor, params: PyTree, nodes: Nodes, phase: Phase | None = None
) -> dict[str, StepBytes]:
    """The bytes that a step of each phase sends, by the phase's name. Computes nothing.

    `jgc.Wire` has the details.

    Args:
      compressor: any of `jgc.compress`; phases found during the run have their planned sizes.
      params: the parameters, or their shapes and dtypes.
      nodes: the layout. One of an `AbstractMesh` counts for this machine's backend: on CPU, XLA
        sends bfloat16 as float32.
      phase: only this one, a loop's `state.phase`; by default each of the schedule. With
        `per_layer`, methods that find their phases have pairs that no schedule lists.

    Raises:
      TypeError: not a Compressor, not a `Nodes`, or a leaf that is not an array.

    Example:
      >>> import jax, jgc
      >>> params = {"w": jax.ShapeDtypeStruct((100, 100), "float32")}
      >>> nodes = jgc.make_nodes(8, jax.devices()[:1])
      >>> bytes_per_step(jgc.compress.topk(alpha=0.01), params, nodes)["top-k"]
      StepBytes(device=0.0, node=508.0, uncompressed=40000.0)
    """
    check_compressor(compressor)
    check_nodes(nodes)
    uncompressed = 4.0 * make_packing(params).size
    by_phase = {}
    for each in compressor.schedule if phase is None else [phase]:
        wire = compressor.wire(each.value, params, nodes)
        device = float(sum(sent.bytes for sent in wire.physical))
        node = step_total(wire.logical, nodes.count, "up") / nodes.count
        by_phase[each.name] = StepBytes(device, node, uncompressed)
    return by_phase
