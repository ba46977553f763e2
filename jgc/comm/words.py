"""Arrays of any dtype as 32-bit words, bit for bit, to send several of them in one collective."""

import math
from functools import reduce

import jax.numpy as jnp
from jax import lax

from jgc.backend import backend
from jgc.types import Array


def word_count(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Number of 32-bit words that an array takes."""
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // 4)


def to_words(x: Array) -> Array:
    """The bits of an array as uint32[m], padded with zeros to whole words."""
    if x.dtype == jnp.bool_:
        raise TypeError("pack booleans into bits before sending them")
    bits = lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    if x.dtype.itemsize == 4:
        return bits
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
    per_word = 4 // x.dtype.itemsize
    bits = jnp.pad(bits, (0, -bits.size % per_word))
    if backend() == "tpu":  # there an axis of 2 or 4 at the end is filled up to 128: a word takes values far apart
        fields = bits.reshape(per_word, -1).astype(jnp.uint32)
        return reduce(jnp.bitwise_or, [field << (32 // per_word * i) for i, field in enumerate(fields)])
    return lax.bitcast_convert_type(bits.reshape(-1, per_word), jnp.uint32)


def from_words(words: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The inverse of `to_words`."""
    dtype = jnp.dtype(dtype)
    unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
    if dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(words.reshape(-1, 2), unsigned)
    elif dtype.itemsize == 4:
        bits = words
    elif backend() == "tpu":
        bits = jnp.concatenate([words >> i for i in range(0, 32, 8 * dtype.itemsize)]).astype(unsigned)
    else:
        bits = lax.bitcast_convert_type(words, unsigned)
    return lax.bitcast_convert_type(bits.reshape(-1)[: math.prod(shape)], dtype).reshape(shape)


def join_words(payload: dict[str, Array]) -> Array:
    """A dict of arrays as one uint32[m], in the order of the sorted names."""
    return jnp.concatenate([to_words(payload[name]) for name in sorted(payload)])


def split_words(words: Array, like: dict[str, Array]) -> dict[str, Array]:
    """The inverse of `join_words`; `like` gives shapes and dtypes."""
    out, start = {}, 0
    for name in sorted(like):
        length = word_count(like[name].shape, like[name].dtype)
        out[name] = from_words(words[start : start + length], like[name].shape, like[name].dtype)
        start += length
    return out
