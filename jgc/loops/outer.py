"""The parts of training with local steps, as pure functions of whole arrays.

With theta the shared parameters and theta_k node k's, in every step, then every H steps:

    theta_k = inner step on node k
    Delta = aggregate of the pseudo-gradients theta - theta_k     the compressor, over all nodes
    theta = outer step with the gradient Delta
    theta_k = merge * theta_k + (1 - merge) * theta

With P fragments each range of leaves has a compressor's state, an outer state and H steps,
staggered by H / P steps. With `overlap` the last two lines come that many steps later.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc.checks.misuse import is_key
from jgc.checks.optax_states import holds_state
from jgc.checks.states import RESTORE, check_fits as check_field
from jgc.loops.buffers import check_params, copied, device_of, put_arrays
from jgc.loops.fragments import cut, take
from jgc.loops.model_state import key_of
from jgc.loops.optimizers import check_supported
from jgc.method.compressor import compressor_of
from jgc.method.plan import check_fits, parts_of, unchecked
from jgc.method.signature import check_state
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL, locally, of_node, placements_of
from jgc.types import Compressor, Key, Nodes, PyTree, State

if TYPE_CHECKING:
    import optax


class Waiting(NamedTuple):
    """An aggregate that the outer optimiser has not had yet, and whether it is finite, bool[]."""

    mean: PyTree
    finite: Any


class Arrays(NamedTuple):
    """The arrays of a run with local steps. Tuples have an entry for each fragment."""

    params: PyTree  # the parameters that all nodes share, as the last outer steps left them
    outer: tuple[PyTree, ...]  # the outer optimiser's states, equal on all nodes
    waiting: tuple[Waiting, ...]  # with an overlap, the aggregates that wait; else ()
    compressor: tuple[State, ...]  # the compressor's states
    own: PyTree  # the parameters of each node, [K, ...]
    inner: PyTree  # the state of each node's inner optimiser, [K, ...]
    largest_norm: PyTree = ()  # f32[K], see `jgc.LocalState`; () in a loop without that guard


class Due(NamedTuple):
    """The fragments whose exchange and outer step come after a step; or None."""

    exchange: int | None
    apply: int | None


class Parts(NamedTuple):
    """The settings of `jgc.local_steps`, checked, and the functions that follow from them."""

    inner: "optax.GradientTransformation"
    outer: "optax.GradientTransformation"
    compressor: Compressor
    every: int
    nodes: Nodes
    fragments: int
    overlap: int
    merge: float

    def due(self, done: int) -> Due:
        """The fragments due after `done` inner steps; at most one exchange comes after a step.

        Example:
          >>> import jgc, optax
          >>> parts = jgc.local_steps(optax.sgd(1), optax.sgd(1), jgc.compress.dense(), 6,
          ...     jgc.make_nodes(1), 2, 1)
          >>> [parts.due(done).exchange for done in range(1, 7)]
          [None, None, 0, None, None, 1]
          >>> [parts.due(done).apply for done in range(1, 8)]
          [None, None, None, 0, None, None, 1]
        """
        ends = [self._first_end(i) for i in range(self.fragments)]

        def fragment(at: int) -> int | None:
            due = (i for i, x in enumerate(ends) if at >= x and (at - x) % self.every == 0)
            return next(due, None)

        return Due(fragment(done), fragment(done - self.overlap))

    def round_of(self, fragment: int, done: int) -> int:
        """The number of exchanges of a fragment before the one that comes after `done` steps."""
        return (done - self._first_end(fragment)) // self.every

    def _first_end(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments

    def leaves(self, params: PyTree) -> tuple[tuple[int, ...], ...]:
        """The leaves of each fragment, by index."""
        sizes = [x.size for x in jax.tree.leaves(params)]
        if not sizes:
            raise ValueError("params has no arrays: give the model's parameters")
        if self.fragments > len(sizes):
            raise ValueError(
                f"fragments={self.fragments} exceeds the {len(sizes)} arrays of the parameters: "
                f"give at most {len(sizes)} (jax.lax.scan keeps all layers in one array)"
            )
        return cut(sizes, self.fragments)

    def method(self) -> Compressor:
        """The compressor of a fragment, in which its patterns of layers need not match."""
        if self.fragments == 1:
            return self.compressor
        return compressor_of(unchecked(self.compressor.method))

    def first(self, key: Key, params: PyTree) -> Arrays:
        """The arrays before the first step, placed on the devices."""
        check_params(params)
        leaves = self.leaves(params)
        if self.compressor.method is not None:
            check_fits(self.compressor.method, parts_of(params, divided=True))
        put = partial(put_arrays, nodes=self.nodes, device=device_of(params))
        params = put(copied(params))
        inner = put(copied(self.inner.init(params)))
        parts = [take(params, part) for part in leaves]
        outer = tuple(put(copied(self.outer.init(part))) for part in parts)
        for name, state in (("inner", inner), ("outer", outer)):
            if holds_state(state):
                raise ValueError(
                    f"the {name} optimiser holds as_optax, and local_steps compresses by itself: "
                    "give it without as_optax"
                )
            check_supported(state, f"the {name} optimiser")
        keys, method = [key], self.method()
        if self.fragments > 1:
            keys = [jax.random.fold_in(key, i) for i in range(self.fragments)]
        states = [method.init(k, part, self.nodes) for k, part in zip(keys, parts, strict=True)]
        waiting = [
            Waiting(jax.tree.map(jnp.zeros_like, x), jnp.bool_(True)) for x in parts if self.overlap
        ]
        waits, memory = (tuple(put(copied(x)) for x in xs) for xs in (waiting, states))
        own, inner = _for_every_node((params, inner), self.nodes)
        norms = jnp.zeros(self.nodes.count, jnp.float32)
        arrays = Arrays(params, outer, waits, memory, own, inner, norms)
        return put(arrays, placements=self.placements(arrays))

    def placements(self, arrays: Arrays) -> Arrays:
        """The placement of every array."""
        shared, outer, waiting, compressor = (placements_of(x) for x in arrays[:4])
        inner = jax.tree.map(of_node, arrays.inner)
        return Arrays(shared, outer, waiting, compressor, locally(shared), inner, LOCAL)


def difference(shared: PyTree, own: PyTree) -> PyTree:
    """The pseudo-gradient theta - theta_k: an outer step moves against it, towards theta_k."""
    return jax.tree.map(lambda a, b: a - b, shared, own)


def _for_every_node(tree: PyTree, nodes: Nodes) -> PyTree:
    """A copy of every array for each node, [K, ...], placed as LOCAL; of a random key a new one."""

    def copy(tree, k):
        return jax.tree.map(lambda x: key_of(x, k) if is_key(x) else x, tree)

    shared = placements_of(tree)
    copies = on_nodes(copy, nodes, ins=(shared, LOCAL), outs=locally(shared))
    return jax.jit(copies)(tree, np.arange(nodes.count))


def replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    """The tuple with a different item at an index."""
    return (*items[:index], item, *items[index + 1 :])


def _of_nodes(parts: Parts, tree: PyTree) -> PyTree:
    """The shapes of a copy for each node."""
    count = parts.nodes.count
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)


def first_optimisers(parts: Parts, params: PyTree) -> tuple[tuple[PyTree, ...], PyTree]:
    """The shapes of the optimisers' first states: outer ones by fragment, and all nodes' inner."""
    fragments = [take(params, leaves) for leaves in parts.leaves(params)]
    outer = tuple(jax.eval_shape(parts.outer.init, part) for part in fragments)
    return outer, _of_nodes(parts, jax.eval_shape(parts.inner.init, params))


def check_local(parts: Parts, state: Any) -> None:
    """Raise ValueError, naming field and leaf, unless a state belongs to these local steps."""
    params = state.params
    own, (outer, inner) = _of_nodes(parts, params), first_optimisers(parts, params)
    fragments = [take(params, leaves) for leaves in parts.leaves(params)]
    finite = jax.ShapeDtypeStruct((), bool)
    waiting = tuple(Waiting(part, finite) for part in fragments if parts.overlap)
    other = "or of other parameters"
    check_field("own", state.own, own, "of other parameters than params")
    check_field("inner", state.inner, inner, f"of a different inner optimiser, {other}")
    check_field("outer", state.outer, outer, f"of a different outer optimiser, {other}")
    of = f"of local steps with a different overlap, {other}"
    check_field("waiting", state.waiting, waiting, of)
    states = state.compressor
    if not isinstance(states, tuple) or len(states) != len(fragments):
        raise ValueError(
            f"compressor must be a tuple of {len(fragments)} states, one a fragment, and is a "
            f"{type(states).__name__} of {len(states)}: {RESTORE}"
        )
    for i, (memory, part) in enumerate(zip(states, fragments, strict=True)):
        check_state(parts.method().init, part, memory, parts.nodes, f"compressor/{i}")
