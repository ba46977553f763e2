"""Means of codes in two collectives: all-to-all of codes, f32 sums, all-gather of coded means.

Every node reduces one share of the values, so a value is rounded twice and a step waits for two
collectives, where a ring of codes rounds K times and waits for 2 (K - 1) transfers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jgc.comm.axis import node_index, node_key
from jgc.comm.collectives import all_gather_at_once, all_to_all, from_words, to_words
from jgc.types import Array, Key, Nodes


def two_shot_quantized_mean(
    key: Key,
    x: Array,
    encode: Callable[[Key, Array], dict[str, Array]],
    decode: Callable[[dict[str, Array]], Array],
    nodes: Nodes,
) -> tuple[Array, Array]:
    """Mean by two shots of codes: each node reduces its share in f32 and encodes the result.

        codes of share i       to node i                  an all-to-all
        m = mean over nodes    on node i, in f32; its share of its vector is not coded
        codes of m             to all nodes               an all-gather

    Args:
      key: the same on all nodes; each node derives its keys from it.
      x: f32[K, m], this node's values, cut into a share for each node.
      encode: `(key, f32[m]) -> payload`, arrays of static shapes.
      decode: `payload -> f32[m]`.
      nodes: the layout.

    Returns:
      The means, f32[K, m], equal on every node, and this node's quantisation errors, f32[K, m]; of
      the second rounding the reducing node's, times K: mean of x = means + mean of errors.

    Raises:
      ValueError: x has more or fewer rows than there are nodes.

    Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent", where each node adds up and
      codes a part of the gradient; Tang et al. 2019, "DoubleSqueeze", on residuals of both
      roundings.

    Differs from the papers
      1. A node adds its share of its vector in f32, because that part does not travel.
      2. The residual of the second rounding is part of the node's residual. It lies in the share
         that the node adds in f32, so it is not rounded again, as in DoubleSqueeze's server.
    """
    index, key = node_index(nodes), node_key(key, nodes)
    if len(x) != nodes.count:
        raise ValueError(f"x must have a row for each of the {nodes.count} nodes, got {len(x)}")
    names = jax.eval_shape(encode, key, jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
    field = "+".join(sorted(names))
    local = jnp.arange(nodes.count)[:, None] == index  # bool[K, 1]: the share reduced here

    payloads = jax.vmap(encode)(jax.random.split(key, nodes.count), x)
    sent = jnp.where(local, x, jax.vmap(decode)(payloads))
    received = all_to_all(jax.vmap(to_words)(payloads), nodes, field)  # u32[K, words], of each node

    def add(total, row):
        i, words = row
        # the barrier prevents fusion with the sum: all layouts then give the same bits, except
        # where a scale is a sum (onebit, l2)
        value = lax.optimization_barrier(decode(from_words(words, names)))
        return total + jnp.where(i == index, x[index], value), None

    # node by node: [K, m] decoded at once would not fit for a large model
    total, _ = lax.scan(add, jnp.zeros_like(x[0]), (jnp.arange(nodes.count), received))
    payload = encode(jax.random.fold_in(key, nodes.count), total / nodes.count)
    words = all_gather_at_once(to_words(payload), nodes, field)
    # every node decodes its share too, so that all nodes hold the same values
    means = jax.vmap(lambda words: decode(from_words(words, names)))(words)
    means = lax.optimization_barrier(means)  # likewise
    lost = jnp.where(local, total - nodes.count * means[index], x - sent)
    return means, lost
