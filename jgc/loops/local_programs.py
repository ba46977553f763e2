"""The programs of local steps: every node's inner step, a fragment's exchange, its outer step."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jgc.layout.devices import LARGEST_NORM, unusable
from jgc.loops.fragments import put_back, take
from jgc.loops.loop import shardings_of
from jgc.loops.losses import in_one_form
from jgc.loops.norms import norms_of_nodes
from jgc.loops.optimizers import updated
from jgc.loops.outer import Arrays, Parts, Waiting, difference, replaced
from jgc.loops.spikes import fresh, largest_after, limits_of
from jgc.method.shards import info_of_node
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import LOCAL, SHARED, any_divided, is_placement
from jgc.types import Array, Info, Key, PyTree


def inner_program(
    parts: Parts, arrays: Arrays, model_state: PyTree, frozen: PyTree, loss: Callable[..., Any],
    has_aux: bool,
    unroll: bool | None,
) -> Callable[..., tuple[tuple, tuple]]:  # fmt: skip
    """A step of every node,
    `(own, inner, model_state, batch, largest_norm, frozen) -> (new, of_step)`.

    `new` is `(own, inner, model_state, largest_norm)`, `of_step` is `(loss, finite, aux, norms)`.
    Compiled at the first call; donates what `new` replaces.

    Args:
      parts: the settings.
      arrays: of the state, as all steps get them.
      model_state: leaves [K, ...].
      frozen: placements of the parameters that are not trained; None if there are none.
      loss: as in `jgc.LocalSteps.make_step`, with its options.
      has_aux: one of these.
      unroll: one of these.
    """
    placements, has_frozen = parts.placements(arrays), frozen is not None
    gradients = node_grads(
        in_one_form(loss, has_aux, bool(jax.tree.leaves(model_state)), has_frozen), parts.nodes,
        has_aux=True,
        unroll=unroll, local=True, placements=placements.own, frozen=frozen,
    )  # fmt: skip
    inner_step = make_inner(parts, placements)

    def inner_update(own, inner, model_state, batch, largest_norm, fixed):
        args = own, batch, model_state, *([fixed] if has_frozen else [])
        (losses, (after, aux)), grads = gradients(*args)  # all with an axis [K]
        own, inner, finite, norms = inner_step(own, inner, grads, losses, limits_of(largest_norm))
        largest_norm = largest_after(largest_norm, norms, finite)
        model_state = jax.tree.map(
            lambda a, b: jnp.where(finite.reshape(-1, *[1] * (a.ndim - 1)), a, b),
            after,
            model_state,
        )
        return (own, inner, model_state, largest_norm), (losses, finite, aux, norms)

    shardings = shardings_of((arrays.own, arrays.inner, model_state, arrays.largest_norm))
    return jax.jit(inner_update, donate_argnums=(0, 1, 2, 4), out_shardings=(shardings, None))


def exchange_program(
    parts: Parts, arrays: Arrays, fragment: int, phase: Hashable
) -> Callable[..., Any]:
    """A fragment's exchange, `(arrays, key, step) -> (arrays, info, reset)`. Compiled at the first
    call."""
    leaves = parts.leaves(arrays.params)[fragment]
    exchange = make_exchange(parts, parts.placements(arrays), leaves, fragment, phase)

    def exchange_update(arrays, key, step):
        return exchange(jax.random.fold_in(key, step), arrays)

    return jax.jit(
        exchange_update, donate_argnums=0, out_shardings=(shardings_of(arrays), None, None)
    )


def apply_program(parts: Parts, arrays: Arrays, fragment: int) -> Callable[[Arrays], Arrays]:
    """A fragment's outer step with the aggregate that waits, `arrays -> arrays`. Compiled at the
    first call."""
    apply = make_apply(
        parts, parts.placements(arrays), parts.leaves(arrays.params)[fragment], fragment
    )

    def outer_update(arrays):
        return apply(arrays, arrays.waiting[fragment])

    return jax.jit(outer_update, donate_argnums=0, out_shardings=shardings_of(arrays))


# --- as functions of whole arrays -----------------------------------------------------------------


def make_inner(
    parts: Parts, placements: Arrays
) -> Callable[..., tuple[PyTree, PyTree, Array, Array]]:
    """`(own, inner, grads, loss, limit) -> (own, inner, usable bool[K], norms f32[K])`: each
    node's step.

    All arguments are [K, ...]. A node whose gradient is not finite, or has a norm of `limit` and
    more, leaves its parameters and its inner state as they are. `limit`, f32[K] or a number, is by
    default `LARGEST_NORM`.
    """
    import optax  # here: `import jgc` must not wait for it

    def one(own, inner, grads, loss, usable):
        updates, after = updated(
            parts.inner, grads, inner, own, "the inner optimiser", value=loss, grad=grads
        )
        new = optax.apply_updates(own, updates), after
        return jax.tree.map(lambda a, b: jnp.where(usable, a, b), new, (own, inner))

    own, inner = placements.own, placements.inner
    on_all = on_nodes(
        one, parts.nodes, (own, inner, own, LOCAL, LOCAL), (own, inner),
        partitioned=any_divided(own),
        communicates=False,
    )  # fmt: skip

    def inner_step(own, inner, grads, loss, limit=LARGEST_NORM):
        # of whole gradients, where the devices of a node divide them, too
        norms = norms_of_nodes(grads)
        usable = norms < limit  # false for NaN
        return *on_all(own, inner, grads, loss, usable), usable, norms

    return inner_step


def make_exchange(
    parts: Parts, placements: Arrays, leaves: tuple[int, ...], fragment: int, phase: Hashable
) -> Callable[[Key, Arrays], tuple[Arrays, Info, Array]]:
    """`(key, arrays) -> (arrays, info [K], reset bool[K])`: aggregate a fragment, and without
    overlap apply it.

    If a node's pseudo-gradient is not finite or has a norm of 1e15 and more, nothing changes,
    except that this node begins anew (`make_reset`).
    """
    method = parts.method()

    def one(key, shared, own, state):
        mean, state, info = method.aggregate(
            phase, key, difference(shared, own), state, parts.nodes
        )
        info = info_of_node(info, parts.nodes)
        return Waiting(mean, info.finite), state, info

    shared, own = (_take_placements(tree, leaves) for tree in (placements.params, placements.own))
    state = placements.compressor[fragment]
    aggregate = on_nodes(
        one, parts.nodes, (SHARED, shared, own, state), (Waiting(shared, SHARED), state, LOCAL)
    )
    apply = make_apply(parts, placements, leaves, fragment)
    reset_nodes = make_reset(parts, placements, leaves)

    def exchange(key, arrays):
        part, own = take(arrays.params, leaves), take(arrays.own, leaves)
        result, after, info = aggregate(key, part, own, arrays.compressor[fragment])
        states = replaced(arrays.compressor, fragment, after)
        own, inner, reset = reset_nodes(arrays.params, arrays.own, arrays.inner, info.finite)
        arrays = arrays._replace(compressor=states, own=own, inner=inner)
        if parts.overlap:
            return (
                arrays._replace(waiting=replaced(arrays.waiting, fragment, result)),
                info,
                reset,
            )
        return apply(arrays, result), info, reset

    return exchange


def make_reset(
    parts: Parts, placements: Arrays, leaves: tuple[int, ...]
) -> Callable[..., tuple[PyTree, PyTree, Array]]:
    """`(params, own, inner, finite bool[K]) -> (own, inner, reset bool[K])`, after a fragment's
    exchange.

    If it was refused (`finite` false), a node whose difference could not be used goes on from
    all shared parameters with a fresh inner state. Otherwise that node would make later
    exchanges fail, too.
    """

    def one(theta, own, inner, finite):
        reset = ~finite & unusable(
            jax.tree.leaves(difference(take(theta, leaves), take(own, leaves)))
        )
        new = theta, fresh(parts.inner, theta, inner)
        return *jax.tree.map(lambda a, b: jnp.where(reset, a, b), new, (own, inner)), reset

    own, inner = placements.own, placements.inner
    ins = (placements.params, own, inner, LOCAL)
    return on_nodes(one, parts.nodes, ins, (own, inner, LOCAL), partitioned=any_divided(own))


def make_apply(
    parts: Parts, placements: Arrays, leaves: tuple[int, ...], fragment: int
) -> Callable[[Arrays, Waiting], Arrays]:
    """`(arrays, aggregate) -> arrays`: a fragment's outer step, and its result in every node's
    own parameters."""
    import optax

    def settle(theta, own, finite):
        def mixed(a, b):
            mix = parts.merge * b + (1 - parts.merge) * a if parts.merge else a
            return jnp.where(finite, mix, b)

        return jax.tree.map(mixed, theta, own)

    shared, own = (_take_placements(tree, leaves) for tree in (placements.params, placements.own))
    on_all = on_nodes(settle, parts.nodes, (shared, own, SHARED), own)

    def apply(arrays, result):
        old = take(arrays.params, leaves), arrays.outer[fragment]
        updates, state = updated(parts.outer, result.mean, old[1], old[0], "the outer optimiser")
        new = optax.apply_updates(old[0], updates), state
        theta, state = jax.tree.map(lambda a, b: jnp.where(result.finite, a, b), new, old)
        return arrays._replace(
            params=put_back(arrays.params, theta, leaves),
            outer=replaced(arrays.outer, fragment, state),
            own=put_back(
                arrays.own, on_all(theta, take(arrays.own, leaves), result.finite), leaves
            ),
        )

    return apply


def _take_placements(placements: PyTree, leaves: tuple[int, ...]) -> PyTree:
    flat, treedef = jax.tree.flatten(placements, is_leaf=is_placement)
    return jax.tree.unflatten(treedef, [x if i in leaves else None for i, x in enumerate(flat)])
