"""The programs of local steps: every node's inner step, a fragment's exchange, its outer step."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jgc.layout.devices import unusable
from jgc.loops.fragments import put_back, take
from jgc.loops.loop import shardings_of
from jgc.loops.losses import in_one_form
from jgc.loops.model_state import is_given
from jgc.loops.norms import norms_of_nodes
from jgc.loops.optimizers import updated
from jgc.loops.outer import Arrays, Parts, Waiting, difference, replaced
from jgc.loops.spikes import fresh, largest_after, limits_of
from jgc.method.shards import info_of_node
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import LOCAL, SHARED, any_divided
from jgc.types import Array, Info, PyTree


def inner_program(
    parts: Parts, arrays: Arrays, model_state: PyTree, frozen: PyTree, loss: Callable[..., Any],
    has_aux: bool, unroll: bool | None,
) -> Callable[..., tuple[tuple, tuple]]:  # fmt: skip
    """`(own, inner, model_state, batch, largest_norm, frozen) -> (new, of_step)`, a step.

    `new` is `(own, inner, model_state, largest_norm)`, which it donates, `of_step` is
    `(loss, finite, aux, norms)`. `frozen` are placements; None without frozen parameters.
    """
    placements, has_frozen = parts.placements(arrays), frozen is not None
    loss = in_one_form(loss, has_aux, is_given(model_state), has_frozen)
    gradients = node_grads(
        loss, parts.nodes, True, unroll, local=True, placements=placements.own, frozen=frozen
    )
    inner_step = make_inner(parts, placements)

    def inner_update(own, inner, model_state, batch, largest_norm, fixed):
        args = own, batch, model_state, *([fixed] if has_frozen else [])
        (losses, (after, aux)), grads = gradients(*args)  # all with an axis [K]
        norms = norms_of_nodes(grads)  # of whole gradients, also where they are sharded
        finite = norms < limits_of(largest_norm)  # false for NaN
        own, inner = inner_step(own, inner, grads, losses, finite)
        largest_norm = largest_after(largest_norm, norms, finite)

        def chosen(a, b):
            return jnp.where(finite.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        model_state = jax.tree.map(chosen, after, model_state)
        of_step = losses.astype(jnp.float32), finite, aux, norms
        return (own, inner, model_state, largest_norm), of_step

    shardings = shardings_of((arrays.own, arrays.inner, model_state, arrays.largest_norm))
    return jax.jit(inner_update, donate_argnums=(0, 1, 2, 4), out_shardings=(shardings, None))


def make_inner(parts: Parts, placements: Arrays) -> Callable[..., tuple[PyTree, PyTree]]:
    """`(own, inner, grads, loss, usable bool[K]) -> (own, inner)`, all [K, ...].

    A node whose gradient is not usable does not change its parameters and inner state.
    """
    import optax  # here: `import jgc` must not wait for it

    def one(own, inner, grads, loss, usable):
        extras, name = {"value": loss, "grad": grads}, "the inner optimiser"
        updates, after = updated(parts.inner, grads, inner, own, name, **extras)
        new = optax.apply_updates(own, updates), after
        return jax.tree.map(lambda a, b: jnp.where(usable, a, b), new, (own, inner))

    own, inner = placements.own, placements.inner
    ins, partitioned = (own, inner, own, LOCAL, LOCAL), any_divided(own)
    return on_nodes(one, parts.nodes, ins, (own, inner), False, partitioned, communicates=False)


def exchange_program(
    parts: Parts, arrays: Arrays, fragment: int, phase: Hashable
) -> Callable[..., tuple[Arrays, Info, Array]]:
    """A fragment's exchange, `(arrays, key, step) -> (arrays, info [K], reset bool[K])`.

    Without overlap its aggregate is applied at once. If a node's pseudo-gradient is not finite or
    has a norm of 1e15 or more, nothing changes, except that this node restarts (`_reset`).
    """
    method, placements = parts.method(), parts.placements(arrays)
    leaves = parts.leaves(arrays.params)[fragment]

    def one(key, shared, own, state):
        grads = difference(shared, own)
        mean, state, info = method.aggregate(phase, key, grads, state, parts.nodes)
        info = info_of_node(info, parts.nodes)
        return Waiting(mean, info.finite), state, info

    shared, own = (take(tree, leaves) for tree in (placements.params, placements.own))
    state = placements.compressor[fragment]
    outs = Waiting(shared, SHARED), state, LOCAL
    aggregate = on_nodes(one, parts.nodes, (SHARED, shared, own, state), outs)
    apply = _outer_step(parts, placements, leaves, fragment)
    reset_nodes = _reset(parts, placements, leaves)

    def exchange_update(arrays, key, step):  # the name that profiles show
        key = jax.random.fold_in(key, step)
        part, own = take(arrays.params, leaves), take(arrays.own, leaves)
        result, after, info = aggregate(key, part, own, arrays.compressor[fragment])
        states = replaced(arrays.compressor, fragment, after)
        own, inner, reset = reset_nodes(arrays.params, arrays.own, arrays.inner, info.finite)
        arrays = arrays._replace(compressor=states, own=own, inner=inner)
        if not parts.overlap:
            return apply(arrays, result), info, reset
        return arrays._replace(waiting=replaced(arrays.waiting, fragment, result)), info, reset

    shardings = shardings_of(arrays), None, None
    return jax.jit(exchange_update, donate_argnums=0, out_shardings=shardings)


def apply_program(parts: Parts, arrays: Arrays, fragment: int) -> Callable[[Arrays], Arrays]:
    """A fragment's outer step with the aggregate that waits, `arrays -> arrays`."""
    leaves = parts.leaves(arrays.params)[fragment]
    apply = _outer_step(parts, parts.placements(arrays), leaves, fragment)

    def outer_update(arrays):
        return apply(arrays, arrays.waiting[fragment])

    return jax.jit(outer_update, donate_argnums=0, out_shardings=shardings_of(arrays))


def _reset(
    parts: Parts, placements: Arrays, leaves: tuple[int, ...]
) -> Callable[..., tuple[PyTree, PyTree, Array]]:
    """`(params, own, inner, finite bool[K]) -> (own, inner, reset bool[K])`, after an exchange.

    If it was refused (`finite` false), a node whose difference could not be used restarts from all
    shared parameters with a fresh inner state. Otherwise it would make later exchanges fail, too.
    """

    def one(theta, own, inner, finite):
        moved = difference(take(theta, leaves), take(own, leaves))
        reset = ~finite & unusable(jax.tree.leaves(moved))
        new = theta, fresh(parts.inner, theta, inner)
        return *jax.tree.map(lambda a, b: jnp.where(reset, a, b), new, (own, inner)), reset

    own, inner = placements.own, placements.inner
    ins = (placements.params, own, inner, LOCAL)
    return on_nodes(one, parts.nodes, ins, (own, inner, LOCAL), partitioned=any_divided(own))


def _outer_step(
    parts: Parts, placements: Arrays, leaves: tuple[int, ...], fragment: int
) -> Callable[[Arrays, Waiting], Arrays]:
    """`(arrays, aggregate) -> arrays`: a fragment's outer step, also in every node's parameters."""
    import optax

    def settle(theta, own, finite):
        def mixed(a, b):
            mix = parts.merge * b + (1 - parts.merge) * a if parts.merge else a
            return jnp.where(finite, mix, b)

        return jax.tree.map(mixed, theta, own)

    shared, own = (take(tree, leaves) for tree in (placements.params, placements.own))
    on_all = on_nodes(settle, parts.nodes, (shared, own, SHARED), own)

    def apply(arrays, result):
        old = take(arrays.params, leaves), arrays.outer[fragment]
        updates, state = updated(parts.outer, result.mean, old[1], old[0], "the outer optimiser")
        new = optax.apply_updates(old[0], updates), state
        theta, state = jax.tree.map(lambda a, b: jnp.where(result.finite, a, b), new, old)
        own = on_all(theta, take(arrays.own, leaves), result.finite)
        return arrays._replace(
            params=put_back(arrays.params, theta, leaves), own=put_back(arrays.own, own, leaves),
            outer=replaced(arrays.outer, fragment, state),
        )  # fmt: skip

    return apply
