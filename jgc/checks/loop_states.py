"""Check that a loop's state fits its step: phases, number of nodes, live buffers."""

from typing import Any

import jax
import jax.numpy as jnp

from jgc.types import Nodes, Phase, PyTree, State


def first_leaf(tree: PyTree) -> list[Any]:
    """The first leaf in a list; [] if there is none. Cheap enough for every step: visits no other.

    Example:
      >>> first_leaf({"a": (), "b": [3, 4]}), first_leaf(None)
      ([3], [])
    """
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None:
        return [tree]
    return next((first for first in map(first_leaf, level[0]) if first), [])


def check_phases(state: Any) -> None:
    """Raise TypeError unless the phases of a loop's state are `Phase`s, as `init` returns them."""
    for phase in state.phases if hasattr(state, "phases") else [state.phase]:
        if not isinstance(phase, Phase):
            raise TypeError(f"the state's phase must be a jgc.Phase, got {phase!r}: restore it by "
                            "jgc.from_arrays")  # fmt: skip


def check_count(state: Any, nodes: Nodes) -> None:
    """Raise ValueError if a per-node field of a loop's state has a different number of nodes."""
    states = jax.tree.leaves(state.compressor, is_leaf=lambda x: isinstance(x, State))
    of_nodes: dict[str, PyTree] = {"compressor": [x.local for x in states if isinstance(x, State)]}
    of_nodes |= {name: getattr(state, name, ()) for name in ("own", "inner", "model_state")}
    for name, tree in of_nodes.items():
        for x in first_leaf(tree):
            if jnp.ndim(x) and x.shape[0] != nodes.count:
                raise ValueError(
                    f"this state is of {x.shape[0]} nodes (field {name!r}), and step is of "
                    f"{nodes.count}: give step jgc.with_nodes(state, fresh), with fresh = "
                    "init(key, state.params) of this step's init (docs/your_loop.md, Checkpoints)")


def check_not_donated(tree: PyTree, cure: str = "give the state that it returned") -> None:
    """Raise ValueError, with the cure, if an earlier step has donated an array."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if any(x.is_deleted() for x in arrays if not isinstance(x, jax.core.Tracer)):
        raise ValueError(f"an earlier step took this state's arrays (it donates them): {cure}")
