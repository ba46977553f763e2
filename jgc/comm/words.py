"""Arrays of any dtype as 32-bit words, to send several of them in one collective."""

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jgc.backend import backend, plain
from jgc.types import Array, PyTree


def to_words(tree: PyTree) -> Array:
    """The bits of all arrays of a tree, in tree order, as one uint32[m].

    Each array is padded with zeros to whole words.
    """
    words = []
    for x in jax.tree.leaves(tree):
        if x.dtype == jnp.bool_:
            raise TypeError("pack booleans into bits before sending them")
        size, per_word = x.dtype.itemsize, 4 // x.dtype.itemsize
        bits = lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{8 * size}"))
        if size == 8:
            bits = lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
        elif size < 4:
            bits = jnp.pad(bits, (0, -bits.size % per_word))
            if not plain() and backend() == "tpu":
                # a TPU fills an axis of 2 or 4 at the end up to 128: a word takes values far apart
                fields = bits.reshape(per_word, -1).astype(jnp.uint32)
                shifted = [field << (8 * size * i) for i, field in enumerate(fields)]
                bits = reduce(jnp.bitwise_or, shifted)
            else:
                bits = lax.bitcast_convert_type(bits.reshape(-1, per_word), jnp.uint32)
        words.append(bits)
    return jnp.concatenate(words)


def from_words(words: Array, like: PyTree) -> PyTree:
    """The inverse of `to_words`; `like` gives the tree, its shapes and its dtypes.

    Example:
      >>> payload = {"scale": jnp.float32(0.5), "signs": jnp.uint8([1, 2, 3])}
      >>> to_words(payload)
      Array([1056964608,     197121], dtype=uint32)
      >>> from_words(to_words(payload), payload)["signs"]
      Array([1, 2, 3], dtype=uint8)
    """
    leaves, start = [], 0
    for x in jax.tree.leaves(like):
        length, size = math.prod(x.shape), x.dtype.itemsize
        unsigned = jnp.dtype(f"uint{8 * size}")
        bits = words[start : start + -(-length * size // 4)]
        start += bits.size
        if size == 8:
            bits = lax.bitcast_convert_type(bits.reshape(-1, 2), unsigned)
        elif size < 4 and not plain() and backend() == "tpu":
            bits = jnp.concatenate([bits >> i for i in range(0, 32, 8 * size)]).astype(unsigned)
        elif size < 4:
            bits = lax.bitcast_convert_type(bits, unsigned)
        leaves.append(lax.bitcast_convert_type(bits.reshape(-1)[:length], x.dtype).reshape(x.shape))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def pack_narrow(x: Array) -> Array:
    """Integers of 8 or 16 bits as i32[m], four or two to a word.

    A sum of such words holds the sums of the integers, if each of these fits its bits: see
    `unpack_narrow`.
    """
    bits = 8 * x.dtype.itemsize
    flat = x.reshape(-1).astype(jnp.int32)
    fields = jnp.pad(flat, (0, -x.size % (32 // bits))).reshape(32 // bits, -1)
    return reduce(jnp.add, [field << (bits * i) for i, field in enumerate(fields)])


def unpack_narrow(words: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """The inverse of `pack_narrow`, also of sums of its results.

    Example:
      >>> x, y = jnp.int16([-3, 7, 32000]), jnp.int16([1, -9, 700])
      >>> unpack_narrow(pack_narrow(x) + pack_narrow(y), (3,), jnp.int16)
      Array([   -2,    -2, 32700], dtype=int16)
    """
    bits, fields = 8 * jnp.dtype(dtype).itemsize, []
    for _ in range(32 // bits):
        fields.append(words << (32 - bits) >> (32 - bits))  # the lowest, with its sign
        words = (words - fields[-1]) >> bits
    return jnp.concatenate(fields)[: math.prod(shape)].astype(dtype).reshape(shape)
