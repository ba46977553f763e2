"""Scan-stacked parameters: a leaf [L, ...] as L layers. A combinator: no method needs settings for
it.

`jax.lax.scan` and `flax.linen.scan` over equal layers hold each parameter of all L layers in one
leaf [L, ...]. Taken as one layer, its values share one selection, and PowerSGD makes one matrix [L
rows, cols] of it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jgc.checks.misuse import check_compressor
from jgc.method.compressor import compressor_of
from jgc.method.per_layer import Matcher, Rule, check_on_shards, matcher
from jgc.method.plan import Combination, Part, Parts
from jgc.nodes.placement import sharding_spec
from jgc.types import Compressor


def stacked(rule: Rule, compressor: Compressor) -> Compressor:
    """Treat every leaf [L, ...] that matches as L layers, in any method or combination.

    The result is bit for bit that of the same tree with a tuple of L leaves [...] for the leaf. The
    layers' paths are "blocks/kernel/0", "blocks/kernel/1" and so on; a `per_layer` inside `stacked`
    sees these, one around it sees the path of the whole leaf. Layers of at most one dimension, from
    stacked biases and norm parameters [L, d], join the one layer of biases and norms, as in a model
    without a scan. Gradients, aggregate and `jgc.residual` keep the parameters' shapes.

    Args:
      rule: a regular expression that is searched for in leaf paths and must match one, or a
        function `(path, leaf) -> bool`.
      compressor: a method, or a combination of methods.

    Raises:
      TypeError: the argument is not a Compressor, but e.g. settings.
      ValueError: the rule is not a regular expression; or, at `init`, it matches no leaf, or one of
        fewer than two dimensions.

    Example:
      >>> import jgc
      >>> params = {"blocks": {"kernel": jnp.zeros((12, 64, 32)), "bias": jnp.zeros((12, 32))}}
      >>> nodes = jgc.make_nodes(4, devices=jax.devices()[:1])
      >>> state = stacked("^blocks/", jgc.compress.powersgd(rank=2)).init(jax.random.key(0),
      ...     params, nodes)
      >>> [q.shape for q in state.shared] == 12 * [(32, 2)]
      True
    """
    check_compressor(compressor)
    member, matches = compressor.method, matcher(rule)
    return compressor_of(
        Combination(
            (member,),
            split=partial(split_layers, matches),
            check=partial(check_stacked, rule, matches, about_layers=member.check is not None),
            nested=False,
            schedule=member.schedule,
            owns_momentum=member.owns_momentum,
            next_phase=member.next_phase,
            clip_norm=member.clip_norm,
        )
    )


def split_layers(matches: Matcher, parts: Parts) -> list[Parts]:
    """The parts with L layers for every stacked leaf, as a list for the one member."""
    layers: Parts = {}
    for path, (leaf, index, array) in parts.items():
        # Integers stay whole: no method sends them, and their gradients may be of float0, which no
        # stack takes.
        if not jnp.issubdtype(array.dtype, jnp.inexact) or not matches(path, array):
            layers[path] = parts[path]
            continue
        sharding = array.sharding
        if sharding is not None:
            sharding = jax.NamedSharding(sharding.mesh, jax.P(*sharding.spec[1:]))
        layer = jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding)
        layers |= {f"{path}/{i}": Part(leaf, (*index, i), layer) for i in range(array.shape[0])}
    return [layers]


def check_stacked(rule: Rule, matches: Matcher, params: dict[str, Any], about_layers: bool) -> None:
    """Raise ValueError if a pattern matches no leaf, or one that cannot be stacked."""
    if callable(rule):
        check_on_shards(matches, params)
    stacked = {path: x for path, x in params.items() if matches(path, x)}
    if not stacked and not callable(rule):
        raise ValueError(
            f"the pattern {rule!r} matches no parameter to stack; there are {', '.join(params)}")
    for path, x in stacked.items():
        if len(x.shape) < 2:
            raise ValueError(
                f"a stacked parameter has the dimensions [L, ...], at least two, got {path} "
                f"{list(x.shape)}: give a pattern that leaves it out")
        if about_layers and next(iter(sharding_spec(x)), None) is not None:
            raise ValueError(
                f"{path!r} is sharded over its layers, dimension 0, and every device numbers its "
                "layers from 0, so rules about layers would find others: shard a different "
                "dimension")
