"""Every kind of collective, with integers whose sums are exact, against NumPy; and its time."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc import comm
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL
from jgc.nodes.placing import place
from jgc.types import Array, Nodes

SIZES = (1, 1000, 1 << 20)  # values of a node, rounded up to a multiple of the nodes
REPEATS = 5
FIELD = "doctor"


class Kind(NamedTuple):
    """A collective.

    Attributes:
      name: for people.
      dtype: of the values.
      call: `(x [n], nodes) -> [m]` on a node.
      expected: `x [K, n] -> [K, m]`, what every node is to get.
    """

    name: str
    dtype: str
    call: Callable[[Array, Nodes], Array]
    expected: Callable[[np.ndarray], np.ndarray]


def _sum(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.sum(0, dtype=x.dtype), x.shape)


def _gathered(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.reshape(-1), (len(x), x.size))


def _parts(x: np.ndarray) -> np.ndarray:
    """[K, K, m]: of each node, the part for each node."""
    return x.reshape(len(x), len(x), -1)


def _scattered(x: np.ndarray) -> np.ndarray:
    return _parts(x).sum(0, dtype=x.dtype)


def _exchanged(x: np.ndarray) -> np.ndarray:
    return _parts(x).swapaxes(0, 1).reshape(x.shape)


def _gather(x: Array, nodes: Nodes) -> Array:
    return comm.all_gather(x, nodes, FIELD).reshape(-1)


def _broadcast(x: Array, nodes: Nodes) -> Array:
    return comm.broadcast(x, jnp.int32(nodes.count - 1), nodes, FIELD)


def _ring(x: Array, nodes: Nodes) -> Array:
    return comm.ring_mean(x * nodes.count, nodes, FIELD)  # the mean of multiples of K is exact


def _shift(x: Array, nodes: Nodes) -> Array:
    return lax.ppermute(x, nodes.slow, [(i, (i + 1) % nodes.count) for i in range(nodes.count)])


KINDS = (
    *(Kind("all-reduce", dtype, partial(comm.psum, field=FIELD), _sum) for dtype in ("float32", "int32", "int8")),
    Kind("all-reduce of maxima", "float32", partial(comm.pmax, field=FIELD),
         lambda x: np.broadcast_to(x.max(0), x.shape)),
    *(Kind("all-gather", dtype, _gather, _gathered) for dtype in ("float32", "uint32", "uint8")),
    Kind("broadcast", "float32", _broadcast, lambda x: np.broadcast_to(x[-1], x.shape)),
    Kind("ring of ppermute", "float32", _ring, _sum),
    Kind("ppermute", "float32", _shift, lambda x: np.roll(x, 1, axis=0)),
    Kind("reduce-scatter", "float32", lambda x, nodes: lax.psum_scatter(x, nodes.slow, tiled=True), _scattered),
    Kind("all-to-all", "float32", lambda x, nodes: lax.all_to_all(x, nodes.slow, 0, 0, tiled=True), _exchanged),
)  # fmt: skip
"""The collectives of `jgc.comm`, and three bare ones: the ppermute of its rings, and two that a sharded model needs."""


def values(kind: Kind, nodes: int, size: int) -> np.ndarray:
    """[K, n], small integers that differ between nodes and positions; their sums fit the dtype.

    Example:
      >>> values(KINDS[0], 2, 3)
      array([[0., 1., 2., 3.],
             [1., 2., 3., 4.]], dtype=float32)
    """
    int8 = kind.dtype == "int8"
    different = max(2, 127 // nodes) if int8 else 97
    size = -(-size // nodes) * nodes
    x = (np.arange(size) + np.arange(nodes)[:, None]) % different
    x[127 if int8 else nodes :] = 0  # more nodes with ones would exceed the dtype
    return x.astype(kind.dtype)


def check(kind: Kind, nodes: Nodes) -> tuple[str, str]:
    """The error of a collective on this process's devices, or "", and the finding in words.

    All processes must call it.
    """
    program = jax.jit(on_nodes(lambda x: kind.call(x, nodes), nodes, (LOCAL,), LOCAL))
    for size in SIZES:
        sent = values(kind, nodes.count, size)
        x = place(sent, LOCAL, nodes)
        seconds = []
        try:
            wrong = difference(program(x), kind.expected(sent))
            for _ in range(0 if wrong else REPEATS):
                begun = time.perf_counter()
                jax.block_until_ready(program(x))
                seconds.append(time.perf_counter() - begun)
        except jax.errors.JaxRuntimeError as error:  # as a broken link ends: one line of it
            wrong = (str(error).splitlines() or ["it failed"])[0]
        if wrong:
            return f"wrong for {sent.shape[1]:,} values of a node: {wrong}", ""
    size = sent[0].nbytes
    return "", f"right; {size / 1e6:.1f} MB of a node in {1e3 * float(np.median(seconds)):.1f} ms"


def difference(got: Array, expected: np.ndarray) -> str:
    """The first value on a device of this process that is not what it should be, in words; "" if all are right."""
    for shard in got.addressable_shards:
        have, want = np.asarray(shard.data), expected[shard.index]
        if have.shape != want.shape:
            return f"device {shard.device.id} has shape {have.shape}, should be {want.shape}"
        if not np.array_equal(have, want):
            at = int(np.flatnonzero(have.reshape(-1) != want.reshape(-1))[0])
            value, right = have.reshape(-1)[at], want.reshape(-1)[at]
            return f"device {shard.device.id} has {value} at position {at}, should be {right}"
    return ""
