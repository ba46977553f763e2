"""Any compressor as an optax transform, for `optax.chain` inside the node axis."""

import itertools
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jgc.placement import LOCAL, SHARED, place
from jgc.types import Array, Compressor, Key, Nodes, State

if TYPE_CHECKING:
    import optax


class OptaxState(NamedTuple):
    """State of the transform. `jgc.placements_of` tells `jgc.on_nodes` which of its leaves are each node's own.

    Attributes:
      step: i32[], updates so far.
      key: random key, the same on all nodes.
      compressor: the compressor's state.
    """

    step: Array
    key: Key
    compressor: State


def as_optax(
    compressor: Compressor, nodes: Nodes, phase: Hashable = None, switched: bool = False, seed: int = 0
) -> "optax.GradientTransformation":
    """The compressor as a transform from node-local gradients to their mean over nodes.

    Its `update` must run inside the node axis (`jgc.on_nodes`); `init` runs outside. A method with several phases has
    two forms:

      `phase=`         one transform per phase over one state; the caller chooses the transform and calls
                       `compressor.transition` between phases
      `switched=True`  one transform that chooses the phase by the number of updates (`lax.switch`, for users of
                       `lax.scan`); the program holds the collectives of all phases and executes those of one

    Args:
      compressor: any of `jgc.compress`.
      nodes: the layout.
      phase: value of the phase; not needed if there is only one.
      switched: choose the phase by the step.
      seed: seed of the compressor's random key.

    Raises:
      ValueError: several phases and neither `phase` nor `switched`, or both; a `phase` that the schedule does not have;
        at `init`, `switched` with a method whose transition changes the state.
      RuntimeError: `update` was called outside the node axis.

    Example:
      >>> import jgc, optax
      >>> nodes = jgc.make_nodes(4, devices=jax.devices()[:1])
      >>> tx = optax.chain(as_optax(jgc.compress.topk(alpha=0.5), nodes), optax.sgd(0.1))
      >>> state = tx.init({"w": jnp.zeros(4)})
      >>> placements = jgc.placements_of(state)
      >>> update = jgc.on_nodes(tx.update, nodes, ins=("local", placements), outs=("shared", placements))
      >>> update({"w": jnp.ones((4, 4))}, state)[0]["w"][:2]
      Array([-0.1, -0.1], dtype=float32)
    """
    import optax  # here: `import jgc` must not wait for it

    values = [p.value for p in compressor.schedule]
    if phase is None and not switched and len(values) > 1:
        raise ValueError(f"the method has the phases {values}: give phase=, or switched=True to choose by the step")
    if phase is not None and phase not in values:
        raise ValueError(f"phase must be one of {values}, got {phase!r}")
    if switched and phase is not None:
        raise ValueError(f"give phase= or switched=True, not both (phase={phase!r})")

    def init(params):
        state = compressor.init(jax.random.key(seed), params, nodes)
        for old, new in itertools.pairwise(values if switched else ()):  # a program cannot call them
            after = jax.tree.leaves(compressor.transition(old, new, state, nodes))
            if not all(x is y for x, y in zip(after, jax.tree.leaves(state), strict=True)):
                raise ValueError(
                    f"the transition from {old!r} to {new!r} changes the state: give phase=, not switched=True"
                )
        whole = OptaxState(jnp.int32(0), jax.random.key(seed + 1), state)
        return place(whole, OptaxState(SHARED, SHARED, State(SHARED, LOCAL)), nodes)

    def run(value, key, updates, state):
        return compressor.aggregate(value, key, updates, state, nodes)[:2]

    def update(updates, state, params=None):
        del params
        key = jax.random.fold_in(state.key, state.step)
        if switched:
            starts = jnp.array([p.start for p in compressor.schedule])
            index = jnp.sum(state.step >= starts) - 1
            branches = [lambda *args, value=value: run(value, *args) for value in values]
            mean, inner = jax.lax.switch(index, branches, key, updates, state.compressor)
        else:
            mean, inner = run(values[0] if phase is None else phase, key, updates, state.compressor)
        return mean, OptaxState(state.step + 1, state.key, inner)

    return optax.GradientTransformation(init, update)
