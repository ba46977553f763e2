"""A checksum for each array of a state: 32 bits, however it is sharded over devices or processes.

An array is read as words of its bytes, u32 (u8 or u16 if elements are smaller). Its checksum is the
sum modulo 2^32 of a hash of (position, word) over all words. For each position the hash is a
bijection of the word, so a change within one word always shows; other damage passes with a
probability of 2^-32. Unlike a CRC-32 it does not need the whole array in one place: each process
adds up the words of its shards, and sends four bytes an array.

Source: the hash has the constants of lowbias32, Wellons 2018, "Prospecting for Hash Functions".
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

BLOCK = 1 << 18  # words: the passes over a block stay in a processor's cache


def checksums(arrays: Sequence[Any]) -> np.ndarray:
    """The checksums of arrays, of JAX or NumPy, u32[number of arrays].

    Collective if processes hold parts of an array: then all processes must call it.

    Example:
      >>> x = np.arange(6, dtype=np.float32)
      >>> a, b = checksums([x, x[::-1]])
      >>> a != b, a == checksums([jax.numpy.asarray(x)])[0]
      (np.True_, np.True_)
    """
    divided = any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in arrays)
    # an array that every process holds whole counts once
    counts_here = not divided or jax.process_index() == 0
    with ThreadPoolExecutor() as pool:  # NumPy works on several arrays at once
        sums = np.array(list(pool.map(lambda x: _of_shards(x, counts_here), arrays)), np.uint32)
    if divided:
        from jax.experimental.multihost_utils import process_allgather

        sums = np.asarray(process_allgather(sums)).sum(0, dtype=np.uint32)
    return sums


def _of_shards(x: Any, counts_here: bool) -> int:
    """The part of an array's checksum that this process computes."""
    if not isinstance(x, jax.Array):
        return _of_words(np.asarray(x), (slice(None),) * np.ndim(x), np.shape(x)) * counts_here
    if x.is_fully_addressable and not counts_here:
        return 0
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    return sum(_of_words(np.asarray(shard.data), shard.index, x.shape) for shard in shards) % 2**32


def _of_words(part: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """The sum over the words of `part`, the slice `index` of an array of this shape."""
    words = (
        np.ascontiguousarray(part).reshape(*part.shape, 1).view(f"<u{min(part.dtype.itemsize, 4)}")
    )
    strides = [words.shape[-1] * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum((of.start or 0) * stride for of, stride in zip(index, strides, strict=True))
    return _of_block(words, first, [*strides, 1])


def _of_block(words: np.ndarray, first: int, strides: Sequence[int]) -> int:
    """The sum over words at the positions first + i * strides[0] + ..., modulo 2^32."""
    if words.size > BLOCK:
        axis = int(np.argmax(words.shape))
        half = words.shape[axis] // 2
        before, after = np.split(words, [half], axis)
        return (
            _of_block(before, first, strides)
            + _of_block(after, first + half * strides[axis], strides)
        ) % 2**32
    x = np.full(words.shape, first % 2**32, np.uint32)
    for axis, stride in enumerate(strides):
        steps = np.arange(words.shape[axis], dtype=np.uint32) * np.uint32(stride % 2**32)
        x += steps.reshape(-1, *[1] * (words.ndim - axis - 1))
    x *= np.uint32(0x9E3779B9)
    x += words
    x ^= x >> 16
    x *= np.uint32(0x21F0AAAD)
    x ^= x >> 15
    x *= np.uint32(0x735A2D97)
    x ^= x >> 15
    return int(x.sum(dtype=np.uint32))
