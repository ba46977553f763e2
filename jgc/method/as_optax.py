"""Any compressor as an optax transform, for `optax.chain` inside the node axis."""

import itertools
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jgc.checks.misuse import check_arrays, check_compressor, check_nodes, check_optimizer
from jgc.checks.optax_states import OwnsMomentum, is_accumulator
from jgc.method.plan import check_phase
from jgc.nodes.placement import placements_of
from jgc.nodes.placing import per_node, place
from jgc.types import Array, Compressor, Key, Nodes, Phase, PyTree, State

if TYPE_CHECKING:
    import optax


class OptaxState(NamedTuple):
    """State of the transform. `jgc.placements_of` tells `jgc.on_nodes` its placements."""

    step: Array  # i32[], updates so far
    key: Key  # the same on all nodes
    compressor: State
    owns_momentum: OwnsMomentum  # whether the method owns the momentum; static, without arrays


def as_optax(
    compressor: Compressor,
    nodes: Nodes,
    phase: Hashable = None,
    switched: bool = False,
    seed: int = 0,
    nan_if_skipped: bool = False,
) -> "optax.GradientTransformation":
    """The compressor as a transform from node-local gradients to their mean over nodes.

    Its `update` must run inside the node axis (`jgc.on_nodes`); `init` runs outside. A method with
    several phases has two forms:

      `phase=`         one transform per phase over one state; the caller chooses the transform
                       (`jgc.phase_after`) and calls `compressor.transition` between phases
      `switched=True`  one transform that chooses the phase by the number of updates
                       (`lax.switch`, for users of `lax.scan`); the program holds the collectives
                       of all phases and executes one

    Args:
      compressor: any of `jgc.compress`.
      nodes: the layout.
      phase: the phase, or its value; not needed if there is only one. If the method finds its
        phases during the run (`next_phase`, as GradiVeQ), any phase that `jgc.phase_after` returns;
        phases of the schedule have upper bounds of their sizes.
      switched: choose the phase by the step.
      seed: seed of the compressor's random key.
      nan_if_skipped: whether the rest of the chain gets NaN in a step that all nodes skip because a
        gradient is not finite or too large; `optax.apply_if_finite(optimizer, n)` behind this
        transform then leaves optimiser and parameters as they are. If not, it gets zeros, and
        momentum and weight decay go on.

    Raises:
      TypeError: `compressor` is not a Compressor, but e.g. settings; at `init`, a leaf that is
        not an array.
      ValueError: several phases and neither `phase` nor `switched`, or both; a `phase` that the
        schedule does not have; `switched` with a method that finds its phases during the run; at
        `init`, with one whose transition changes the state.
      RuntimeError: `update` was called outside the node axis.

    Example:
      >>> import jgc, optax
      >>> nodes = jgc.make_nodes(4, devices=jax.devices()[:1])
      >>> tx = optax.chain(as_optax(jgc.compress.topk(alpha=0.5), nodes), optax.sgd(0.1))
      >>> state = init_optax(tx, {"w": jnp.zeros(4)}, nodes)
      >>> placements = jgc.placements_of(state)
      >>> update = jgc.on_nodes(tx.update, nodes, ins=("local", placements), outs=("shared",
      ...     placements))
      >>> update({"w": jnp.ones((4, 4))}, state)[0]["w"][:2]
      Array([-0.1, -0.1], dtype=float32)
    """
    import optax  # here: `import jgc` must not wait for it

    check_compressor(compressor)
    check_nodes(nodes)
    phase = phase.value if isinstance(phase, Phase) else phase
    values = [p.value for p in compressor.schedule]
    if phase is None and not switched and len(values) > 1:
        raise ValueError(
            f"the method has the phases {values}: give phase=, or switched=True to choose by the "
            "step")
    if phase is not None and phase not in values and compressor.next_phase is None:
        raise ValueError(f"phase must be one of {values}, got {phase!r}")
    if phase is not None:
        check_phase(compressor.method, phase)
    if switched and phase is not None:
        raise ValueError(f"give phase= or switched=True, not both (phase={phase!r})")
    if switched and compressor.next_phase is not None:
        raise ValueError(
            "the method finds its phases during the run: give phase=, not switched=True")

    def init(params):
        check_arrays(params)
        state = compressor.init(jax.random.key(seed), params, nodes)
        # a program cannot call them
        for old, new in itertools.pairwise(values if switched else ()):
            after = jax.tree.leaves(compressor.transition(old, new, state, nodes))
            if not all(x is y for x, y in zip(after, jax.tree.leaves(state), strict=True)):
                raise ValueError(
                    f"the transition from {old!r} to {new!r} changes the state: give phase=, not "
                    "switched=True")
        whole = OptaxState(
            jnp.int32(0), jax.random.key(seed + 1), state, OwnsMomentum(compressor.owns_momentum)
        )
        return place(whole, placements_of(whole), nodes)

    def run(value, key, updates, state):
        mean, state, info = compressor.aggregate(value, key, updates, state, nodes)
        if nan_if_skipped:
            mean = jax.tree.map(
                lambda x: jnp.where(info.finite, x, jnp.nan).astype(x.dtype)
                if jnp.issubdtype(x.dtype, jnp.inexact) else x,
                mean,
            )  # fmt: skip
        return mean, state

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
        return mean, state._replace(step=state.step + 1, compressor=inner)

    return optax.GradientTransformation(init, update)


def init_optax(
    tx: "optax.GradientTransformation | optax.MultiSteps", params: PyTree, nodes: Nodes
) -> PyTree:
    """The first state of an optax optimiser that holds `as_optax`, placed for `jgc.on_nodes`.

    Unlike `tx.init(params)` it also serves `optax.MultiSteps` around `as_optax`: every node adds up
    different gradients, so `acc_grads` has a leading axis [K], and `jgc.placements_of` calls it
    LOCAL.

    Args:
      tx: the optimiser, e.g. `optax.chain(as_optax(...), optax.adam(1e-3))`.
      params: the parameters.
      nodes: the layout.

    Raises:
      TypeError: no optimiser, no nodes, or a leaf of the parameters that is not an array.
      ValueError: a wrapper around `as_optax` that cannot work (docs/composing.md).

    Warns:
      jgc.MomentumWarning: the method owns the momentum, and the optimiser has one, too.

    Example:
      >>> import jgc, optax
      >>> nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
      >>> tx = optax.MultiSteps(optax.chain(as_optax(jgc.compress.dense(), nodes),
      ...     optax.sgd(0.1)), 2)
      >>> init_optax(tx, {"w": jnp.zeros(3)}, nodes).acc_grads["w"].shape
      (2, 3)
    """
    check_optimizer(tx, "tx")
    check_nodes(nodes)
    check_arrays(params)

    def with_node_axis(x):
        if not is_accumulator(x):
            return x
        return x._replace(acc_grads=jax.tree.map(lambda g: per_node(g, nodes), x.acc_grads))

    state = jax.tree.map(with_node_axis, tx.init(params), is_leaf=is_accumulator)
    return place(state, placements_of(state), nodes)
