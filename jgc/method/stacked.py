"""Scan-stacked parameters: a leaf [L, ...] as L layers. A combinator: no method needs settings for it.

`jax.lax.scan` and `flax.linen.scan` over equal layers hold each parameter of all L layers in one leaf [L, ...]. Taken
as one layer, its values share one selection, and PowerSGD makes one matrix [L rows, cols] of it.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc.checks.misuse import check_compressor
from jgc.layout.pack import Packing, leaf_paths
from jgc.method.from_step import Step
from jgc.method.guard import Core, guarded
from jgc.method.per_layer import Rule, check_on_shards, matcher
from jgc.nodes.placement import sharding_spec
from jgc.types import Array, Compressor, Info, Key, Message, Nodes, PyTree, State


def stacked(rule: Rule, compressor: Compressor) -> Compressor:
    """Treat every leaf [L, ...] that matches as L layers, in any method and any combination of methods.

    The result is that of the same tree with a tuple of L leaves [...] in place of the leaf, bit for bit. The layers'
    paths are then "blocks/kernel/0", "blocks/kernel/1" and so on; a `per_layer` inside `stacked` sees these, one around
    it sees the path of the whole leaf. Layers of at most one dimension, from stacked biases and norm parameters [L, d],
    join the one layer of biases and norms, as in a model without a scan. Gradients, aggregate and `jgc.residual` keep
    the parameters' shapes.

    Args:
      rule: a regular expression that is searched for in leaf paths, or a function `(path, leaf) -> bool`. An expression
        must match a leaf; a function need not.
      compressor: a method, or a combination of methods.

    Raises:
      TypeError: something else in place of a compressor, such as settings.
      ValueError: the rule is not a regular expression; or, at `init`, it matches no leaf, or one of fewer than two
        dimensions.

    Example:
      >>> import jgc
      >>> params = {"blocks": {"kernel": jnp.zeros((12, 64, 32)), "bias": jnp.zeros((12, 32))}}
      >>> nodes = jgc.make_nodes(4, devices=jax.devices()[:1])
      >>> state = stacked("^blocks/", jgc.compress.powersgd(rank=2)).init(jax.random.key(0), params, nodes)
      >>> [q.shape for q in state.shared] == 12 * [(32, 2)]
      True
    """
    check_compressor(compressor)
    core: Core = compressor.core
    of_leaves = _Stacked(rule, matcher(rule), core)
    return guarded(
        core._replace(
            init=of_leaves.first_state,
            aggregate=of_leaves.aggregate,
            messages=of_leaves.messages,
            diagnose=of_leaves.diagnose,
            residual=of_leaves.residual,
            begin=of_leaves.begin,
            finish=of_leaves.finish,
            check=of_leaves.check,
        )
    )


class _Begun(NamedTuple):
    """A node's step before anything is sent: `filled` and `packing` as `jgc.method.compensate.Begun` has them."""

    filled: Array
    packing: Packing
    layers: Any  # what the core's own `begin` returned
    whole: PyTree  # the shapes of the whole leaves


class _Stacked(NamedTuple):
    rule: Rule
    matches: Callable[[str, Any], bool]
    core: Core  # of the compressor that sees layers

    def layers_in(self, path: str, leaf: Any) -> int:
        """L of a stacked leaf, 0 of other leaves."""
        # Integers stay whole: no method sends them, and their gradients may be of float0, which no stack takes.
        return leaf.shape[0] if jnp.issubdtype(leaf.dtype, jnp.inexact) and self.matches(path, leaf) else 0

    def split(self, tree: PyTree) -> PyTree:
        """The tree with a tuple of its layers in place of every stacked leaf."""

        def layers(path, x):
            count = self.layers_in(path, x)
            if isinstance(x, jax.ShapeDtypeStruct):
                of_layer = jax.NamedSharding(x.sharding.mesh, jax.P(*x.sharding.spec[1:])) if x.sharding else None
                return (jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=of_layer),) * count or x
            return tuple(x[i] for i in range(count)) or x

        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, [layers(*one) for one in zip(leaf_paths(tree), leaves, strict=True)])

    def joined(self, tree: PyTree, whole: PyTree) -> PyTree:
        """The inverse of `split`; `whole` has the structure and shapes of the result."""
        leaves, treedef = jax.tree.flatten(whole)
        counts = [self.layers_in(*one) for one in zip(leaf_paths(whole), leaves, strict=True)]
        parts = iter(jax.tree.leaves(tree))
        out = [jnp.stack([next(parts) for _ in range(n)]) if n else next(parts) for n in counts]
        return jax.tree.unflatten(treedef, out)

    def check(self, params: PyTree) -> None:
        """Raise ValueError if a pattern matches no leaf, or one that cannot be stacked; see also `check_on_shards`."""
        if callable(self.rule):
            check_on_shards(self.matches, params)
        paths = leaf_paths(params)
        found = [one for one in zip(paths, jax.tree.leaves(params), strict=True) if self.matches(*one)]
        if not found and not callable(self.rule):
            raise ValueError(f"the pattern {self.rule!r} matches no parameter to stack; there are {', '.join(paths)}")
        for path, x in found:
            if len(x.shape) < 2:
                raise ValueError(
                    f"a stacked parameter has the dimensions [L, ...], at least two, got {path} {list(x.shape)}: "
                    "give a pattern that leaves it out"
                )
        if self.core.check is None:
            return
        for path, x in found:
            if next(iter(sharding_spec(x)), None) is not None:
                raise ValueError(
                    f"{path!r} is divided over its layers, dimension 0, and every device numbers its own from 0, so "
                    "rules about layers would find others: divide another dimension"
                )
        self.core.check(self.split(_shapes(params, divided=True)))

    def first_state(self, key: Key, params: PyTree, nodes: Nodes) -> State:
        return self.core.init(key, self.split(_shapes(params)), nodes)

    def aggregate(
        self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes, skip: Array | bool
    ) -> tuple[PyTree, State, Info]:
        mean, state, info = self.core.aggregate(phase, key, self.split(grads), state, nodes, skip)
        return self.joined(mean, grads), state, info

    def begin(self, phase: Hashable, grads: PyTree, state: State, skip: Array | bool) -> _Begun:
        layers = self.core.begin(phase, self.split(grads), state, skip)
        return _Begun(layers.filled, layers.packing, layers, _shapes(grads))

    def finish(
        self, phase: Hashable, key: Key, begun: _Begun, result: Step, state: State, nodes: Nodes, skip: Array | bool
    ) -> tuple[PyTree, State, Info]:
        mean, state, info = self.core.finish(phase, key, begun.layers, result, state, nodes, skip)
        return self.joined(mean, begun.whole), state, info

    def messages(
        self, phase: Hashable, shapes: PyTree, nodes: Nodes
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        return self.core.messages(phase, self.split(_shapes(shapes)), nodes)

    def diagnose(self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes) -> dict[str, Array]:
        return self.core.diagnose(phase, key, self.split(grads), state, nodes)

    def residual(self, local: PyTree, shapes: PyTree) -> dict[str, Array]:
        """By paths of whole leaves. A layer without a residual gets zeros where other layers of its leaf have one."""
        split = self.split(_shapes(shapes))
        found, names = self.core.residual(local, split), iter(leaf_paths(split))
        out = {}
        for path, leaf in zip(leaf_paths(shapes), jax.tree.leaves(shapes), strict=True):
            count = self.layers_in(path, leaf)
            own = [next(names) for _ in range(count or 1)]
            if any(name in found for name in own):
                layers = [found.get(name, jnp.zeros(leaf.shape[1:], leaf.dtype)) for name in own]
                out[path] = jnp.stack(layers) if count else layers[0]
        return out


def _shapes(tree: PyTree, divided: bool = False) -> PyTree:
    """Shapes and dtypes; with `divided` also how the leaves are divided among devices."""

    def one(x):
        sharding = x.sharding if divided and tuple(sharding_spec(x)) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, tree)
