"""Frozen parameters, which a step gives the loss and does not train."""

import operator
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jgc.checks.misuse import check_arrays, leaves_by_path
from jgc.loops.buffers import put_arrays
from jgc.nodes.placement import check_divided, placements_of
from jgc.types import Nodes, PyTree


class Frozen(NamedTuple):
    """Parameters that a step does not train. All fields are None where the step got none."""

    arrays: PyTree = None  # on the devices of the step
    placements: PyTree = None  # of the arrays
    name: Hashable = None  # of structure and placements, by which compiled programs differ


def frozen_for(nodes: Nodes) -> Callable[[PyTree, SingleDeviceSharding], Frozen]:
    """Make a function that puts frozen parameters on the devices, the same JAX arrays only once."""
    last: list[Any] = [jax.tree.structure(None), [], Frozen()]  # structure, leaves, result

    def put(frozen: PyTree, device: SingleDeviceSharding) -> Frozen:
        if frozen is None:
            return Frozen()
        leaves, structure = jax.tree.flatten(frozen)
        known = structure == last[0] and all(map(operator.is_, leaves, last[1]))
        # NumPy's may change
        if not known or not all(issubclass(kind, jax.Array) for kind in set(map(type, leaves))):
            check_arrays(frozen, or_numbers=True)
            for path, x in leaves_by_path(frozen).items():
                if isinstance(x, jax.Array) and x.is_deleted():
                    raise ValueError(
                        f"the leaf {path!r} of frozen was donated to an earlier step: give a "
                        "copy, e.g. frozen = jax.tree.map(jnp.copy, state.params)"
                    )
            if nodes.mesh is not None:
                check_divided(frozen, nodes)
            placements = placements_of(frozen)
            placed = put_arrays(frozen, nodes, device, placements)
            name = structure, tuple(jax.tree.leaves(placements))
            last[:] = structure, leaves, Frozen(placed, placements, name)
        return last[2]

    return put
