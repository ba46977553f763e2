"""The parts of training with local steps, as pure functions of whole arrays. `jgc.local_steps`
makes a loop of them.

With theta the parameters that all nodes share, theta_k those of node k, in every step and then
after every H steps:

    theta_k = inner step on node k
    Delta = aggregate of the pseudo-gradients theta - theta_k     the compressor, over all nodes
    theta = outer step with the gradient Delta
    theta_k = merge * theta_k + (1 - merge) * theta

With P fragments each range of leaves has a compressor's state, an outer state and H steps of its
own, staggered by H / P steps. With `overlap` the last two lines come that many steps after the
exchange.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc.checks.optax_states import holds_state
from jgc.checks.states import RESTORE, check_fits as check_field
from jgc.loops.buffers import check_params, copied, device_of, put_arrays
from jgc.loops.fragments import cut, take
from jgc.loops.optimizers import check_supported
from jgc.method.bytes_per_step import StepBytes, bytes_per_step
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
    """The arrays of a run with local steps. Tuples have an entry for each fragment.

    Attributes:
      params: the parameters that all nodes share, as the last outer steps left them.
      outer: the outer optimiser's states, equal on all nodes.
      waiting: with an overlap, the aggregates that wait; else ().
      compressor: the compressor's states.
      own: each node's own parameters, [K, ...].
      inner: each node's own state of the inner optimiser, [K, ...].
      largest_norm: f32[K], see `jgc.LocalState`; () in a loop without that guard.
    """

    params: PyTree
    outer: tuple[PyTree, ...]
    waiting: tuple[Waiting, ...]
    compressor: tuple[State, ...]
    own: PyTree
    inner: PyTree
    largest_norm: PyTree = ()


class Due(NamedTuple):
    """The fragment to exchange after a step, and the one whose outer step is due; None if there is
    none."""

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
        """What comes after `done` inner steps. At most one fragment is exchanged after a step.

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
            return next(
                (i for i, end in enumerate(ends) if at >= end and (at - end) % self.every == 0),
                None,
            )

        return Due(fragment(done), fragment(done - self.overlap))

    def round_of(self, fragment: int, done: int) -> int:
        """How often a fragment had been exchanged before the exchange that comes after `done` inner
        steps."""
        return (done - self._first_end(fragment)) // self.every

    def _first_end(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments

    def leaves(self, params: PyTree) -> tuple[tuple[int, ...], ...]:
        """The leaves of each fragment, by index.

        Raises:
          ValueError: more fragments than leaves, or no leaves.
        """
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
        """The compressor of one fragment: its patterns of layers need not match in every
        fragment."""
        method = self.compressor.method
        return compressor_of(unchecked(method)) if self.fragments > 1 else self.compressor

    def first(self, key: Key, params: PyTree) -> Arrays:
        """The arrays before the first step, placed on the devices. See
        `jgc.LocalSteps.make_step`."""
        check_params(params)
        leaves = self.leaves(params)
        if self.compressor.method is not None:
            check_fits(self.compressor.method, parts_of(params, divided=True))
        put = partial(put_arrays, nodes=self.nodes, device=device_of(params))
        params = put(copied(params))
        inner = put(copied(self.inner.init(params)))
        parts = [take(params, own) for own in leaves]
        outer = tuple(put(copied(self.outer.init(part))) for part in parts)
        for name, state in (("inner", inner), ("outer", outer)):
            if holds_state(state):
                raise ValueError(
                    f"the {name} optimiser holds as_optax, and local_steps compresses by itself: "
                    "give it without as_optax")  # fmt: skip
            check_supported(state, f"the {name} optimiser")
        keys = (
            [key]
            if self.fragments == 1
            else [jax.random.fold_in(key, i) for i in range(self.fragments)]
        )
        states = tuple(
            put(copied(self.method().init(own, part, self.nodes)))
            for own, part in zip(keys, parts, strict=True)
        )
        waiting = tuple(
            put(copied(Waiting(jax.tree.map(jnp.zeros_like, part), jnp.bool_(True))))
            for part in parts
        )
        copies = _for_every_node((params, inner), self.nodes)
        norms = jnp.zeros(self.nodes.count, jnp.float32)
        arrays = Arrays(
            params, outer, waiting if self.overlap else (), states, copies[0], copies[1], norms
        )
        return put(arrays, placements=self.placements(arrays))

    def placements(self, arrays: Arrays) -> Arrays:
        """The placement of every array."""
        shared = placements_of(arrays.params)
        return Arrays(
            shared,
            placements_of(arrays.outer),
            placements_of(arrays.waiting),
            placements_of(arrays.compressor),
            locally(shared),
            jax.tree.map(of_node, arrays.inner),
            LOCAL,
        )

    def bytes_per_round(self, params: PyTree) -> dict[str, StepBytes]:
        """The bytes of H steps, in which every fragment is exchanged once, by the name of the
        compressor's phase.

        `uncompressed` is what a node sends up in H steps that each send the whole gradient in f32.
        Computes nothing.

        Args:
          params: the parameters, or their shapes and dtypes.

        Raises:
          ValueError: more fragments than leaves, or no leaves.
        """
        parts = [
            bytes_per_step(self.method(), take(params, own), self.nodes)
            for own in self.leaves(params)
        ]
        total = {
            name: StepBytes(*map(sum, zip(*(part[name] for part in parts), strict=True)))
            for name in parts[0]
        }
        return {
            name: sent._replace(uncompressed=self.every * sent.uncompressed)
            for name, sent in total.items()
        }


def difference(shared: PyTree, own: PyTree) -> PyTree:
    """The pseudo-gradient theta - theta_k: the outer optimiser moves against it, towards the node's
    parameters."""
    return jax.tree.map(lambda a, b: a - b, shared, own)


def _for_every_node(tree: PyTree, nodes: Nodes) -> PyTree:
    """A copy of every array for each node, [K, ...], placed as LOCAL."""
    shared = placements_of(tree)
    copy = on_nodes(lambda x: x, nodes, ins=(shared,), outs=locally(shared))
    return jax.jit(copy)(tree)


def replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    """The tuple with another item at an index."""
    return (*items[:index], item, *items[index + 1 :])


def check_local(parts: Parts, arrays: Arrays) -> None:
    """Raise ValueError, naming the field and the leaf, unless all fields of a state belong to these
    local steps."""
    params = arrays.params
    inner = jax.eval_shape(parts.inner.init, params)
    own, inner = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((parts.nodes.count, *x.shape), x.dtype), (params, inner)
    )
    check_field("own", arrays.own, own, "of other parameters than params")
    check_field("inner", arrays.inner, inner, "of another inner optimiser, or of other parameters")
    fragments = [take(params, leaves) for leaves in parts.leaves(params)]
    outer = tuple(jax.eval_shape(parts.outer.init, part) for part in fragments)
    check_field("outer", arrays.outer, outer, "of another outer optimiser, or of other parameters")
    waiting = tuple(
        Waiting(part, jax.ShapeDtypeStruct((), bool)) for part in fragments if parts.overlap
    )
    check_field(
        "waiting",
        arrays.waiting,
        waiting,
        "of local steps with another overlap, or of other parameters",
    )
    states = arrays.compressor
    if not isinstance(states, tuple) or len(states) != len(fragments):
        form = f"a {type(states).__name__} of {len(states)}"
        raise ValueError(
            f"compressor must be a tuple of {len(fragments)} states, one a fragment, and is "
            f"{form}: {RESTORE}"
        )
    for i, (state, part) in enumerate(zip(states, fragments, strict=True)):
        check_state(parts.method().init, part, state, parts.nodes, f"compressor/{i}")
