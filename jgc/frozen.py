"""Parameters that a step does not train: on the devices, and in the names of compiled programs."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jgc.buffers import put_arrays
from jgc.misuse import check_arrays, leaves_by_path
from jgc.placement import check_divided, placements_of
from jgc.types import Nodes, PyTree


class Frozen(NamedTuple):
    """Parameters that a step does not train, on its devices; their placements; a name of these for compiled programs.

    All three are None where a step got none.
    """

    arrays: PyTree = None
    placements: PyTree = None
    name: Hashable = None


def frozen_for(nodes: Nodes) -> Callable[[PyTree, SingleDeviceSharding], Frozen]:
    """A function that puts parameters which are not trained on the devices; the same arrays only once."""
    last: list[Any] = [jax.tree.structure(None), [], Frozen()]

    def put(frozen: PyTree, device: SingleDeviceSharding) -> Frozen:
        if frozen is None:
            return Frozen()
        leaves, structure = jax.tree.flatten(frozen)
        known = structure == last[0] and all(x is y for x, y in zip(leaves, last[1], strict=True))
        if not known or not all(isinstance(x, jax.Array) for x in leaves):  # NumPy's may have other values now
            check_arrays(frozen, or_numbers=True)
            for name, x in leaves_by_path(frozen).items():
                if isinstance(x, jax.Array) and x.is_deleted():
                    raise ValueError(
                        f"the leaf {name!r} of frozen was donated to an earlier step: give a copy, e.g. "
                        "frozen = jax.tree.map(jnp.copy, state.params)"
                    )
            if nodes.mesh is not None:
                check_divided(frozen, nodes)
            placements = placements_of(frozen)
            placed = put_arrays(frozen, nodes, device, placements)
            last[:] = structure, leaves, Frozen(placed, placements, (structure, tuple(jax.tree.leaves(placements))))
        return last[2]

    return put
