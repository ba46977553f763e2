"""Codes of every value, computed part by part of a vector, so that temporary arrays have a part's size."""

import math
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jgc.backend import backend
from jgc.layout.pack import values_of, whole
from jgc.method.compose import Codec, Payload
from jgc.method.from_step import Layers
from jgc.types import Array, Key

COLUMNS = 512  # values of a row
UNROLLED = 4  # nodes whose payloads are decoded in one fused loop


class Parts(NamedTuple):
    """A code of every value that can be computed part by part of a vector.

    Attributes:
      name: name of the codec and of the phase.
      encode: `(key, x f32[m], layers) -> payload`.
      decode: `(payload, layers) -> f32[m]`; the payload of one part.
      bucket: number of values that share a scale. 0 for one scale per layer: there is then one part.
    """

    name: str
    encode: Callable[[Key, Array, Layers], Payload]
    decode: Callable[[Payload, Layers], Array]
    bucket: int


def in_parts(parts: Parts) -> Codec:
    """A codec that encodes and decodes one part of the vector after the other.

    Temporary arrays then have a part's size, not the vector's, and stay in the processor's cache.
    """

    def cut(n: int) -> tuple[int, int]:
        """The size of a part, and the number of whole parts."""
        size = part_size(n, parts.bucket)
        return size, n // size if size else 0

    def encode(key, v, layers):
        size, count = cut(v.size)
        if count < 1 or size == v.size:
            return parts.encode(key, v, layers)

        def one(i, of):
            return parts.encode(jax.random.fold_in(key, i), lax.dynamic_slice_in_dim(v, i * size, of), (whole(of),))

        in_rows = lax.map(lambda i: jax.tree.map(rows, one(i, size)), jnp.arange(count))
        payload = {field: x.reshape(-1) for field, x in in_rows.items()}
        if v.size == count * size:
            return payload
        last = one(count, v.size - count * size)
        return {field: jnp.concatenate([x, last[field]]) for field, x in payload.items()}

    def mean_of(payloads, layers):
        """The mean over nodes of the decoded payloads [K, m], part by part, f32[n]."""
        n, nodes = values_of(layers), jax.tree.leaves(payloads)[0].shape[0]
        size, count = cut(n)
        if count < 1 or size == n:
            return over_nodes(lambda payload: parts.decode(payload, layers), payloads, n)
        lengths = {of: _lengths(parts, of) for of in (size, n - count * size) if of}
        columns = math.gcd(size, COLUMNS)

        def write(i, out, of):
            def node(k):
                cuts = {field: (i * lengths[size][field], lengths[of][field]) for field in payloads}
                part = {field: lax.dynamic_slice(payloads[field], (k, start), (1, length))[0]
                        for field, (start, length) in cuts.items()}  # fmt: skip
                x = parts.decode(part, (whole(of),))
                return jnp.pad(x, (0, -of % columns)).reshape(-1, columns)

            return lax.dynamic_update_slice_in_dim(out, total(node, nodes) / nodes, i * (size // columns), 0)

        nothing = 0 * jnp.sum(jax.tree.leaves(payloads)[0].reshape(-1)[:1]).astype(jnp.float32)
        out = jnp.full((-(-n // columns), columns), nothing)  # varies over the devices that the payloads vary over
        out = lax.fori_loop(0, count, lambda i, out: write(i, out, size), out)
        out = write(jnp.int32(count), out, n - count * size) if n > count * size else out
        return out.reshape(-1)[:n]

    def total(node, nodes):
        # One after the other, for XLA on CPU does not fuse a sum over the first axis with what makes its operand.
        few = min(nodes, UNROLLED)
        return lax.fori_loop(few, nodes, lambda i, sum_: sum_ + node(i), reduce(jnp.add, [node(i) for i in range(few)]))

    def decode(payload, layers):
        n = values_of(layers)
        if cut(n)[0] == n:
            return parts.decode(payload, layers)
        return mean_of({field: x[None] for field, x in payload.items()}, layers)

    return Codec(parts.name, False, encode, decode, mean_of, values_of)


def rows(x: Array) -> Array:
    """A vector in rows of a power of two: XLA on CPU vectorises what is written row by row."""
    return x.reshape(-1, math.gcd(x.size, COLUMNS))


def part_size(n: int, bucket: int) -> int:
    """Number of values of a part: whole buckets and whole words, or all n values.

    Example:
      >>> part_size(10**7, 512), part_size(10**7, 100), part_size(1000, 512), part_size(10**7, 0)
      (262144, 261600, 1000, 10000000)
    """
    if backend() == "tpu":  # there the whole vector is one range of tiles: `in_tiles`
        return n
    most = 2**18 if backend() == "cpu" else 2**22  # 1 MB fits a core's cache; other devices need more
    unit = math.lcm(bucket, 32)
    return max(most // unit, 1) * unit if bucket and n > max(most, unit) else n


def _lengths(parts: Parts, size: int) -> dict[str, int]:
    """Lengths of the arrays in a part's payload."""
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    payload = jax.eval_shape(lambda key, x: parts.encode(key, x, (whole(size),)), jax.random.key(0), x)
    return {field: x.size for field, x in payload.items()}


def over_nodes(decode: Callable[[Payload], Array], payloads: Payload, n: int) -> Array:
    """The mean over nodes of their decoded payloads, f32[n], one node after the other."""
    # A scan: [K, n] at once would not fit for a large model.
    one = jax.tree.leaves(payloads)[0]  # zeros like it vary over the same mesh axes

    def add(total, payload):  # the barrier prevents fusion with the sum, so that all layouts give the same bits
        return total + jax.lax.optimization_barrier(decode(payload)), None

    return jax.lax.scan(add, jnp.zeros_like(one, jnp.float32, (n,)), payloads)[0] / one.shape[0]
