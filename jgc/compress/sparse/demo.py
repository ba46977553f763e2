"""DeMo: decoupled momentum. Each node sends the largest DCT coefficients of its momentum.

On each node, with m its momentum and g its gradient, for every chunk of 64 x 64 values of each
layer's matrix:

    m = beta m + g
    q = the k largest coefficients of DCT(m)            sent
    m = m - inverse DCT(q)
    aggregate = sign(inverse DCT(mean over nodes of q))

The part of m that is not sent stays in m and fades with beta: momentum and residual are one vector.

Source: Peng, Quesnelle, Kingma 2024, "DeMo: Decoupled Momentum Optimization", Algorithm 1 and
Section 3.

Differs from the paper
  1. Chunks at the edges of a matrix are padded with zeros; the authors' code takes the largest
     divisor of each dimension below 64. A dimension below 64 is one chunk. `k` is for a full chunk
     of 64 x 64 values; a smaller chunk sends the same share, at least one coefficient.
  2. A kernel with more than two dimensions is the matrix [product of the others, outputs]. Biases
     and norms form one vector, in chunks of 64.
  3. Positions travel in Elias-Fano code, and are counted.
  4. The learning rate is the optimiser's, which must have no momentum: it comes after the sign, and
     a falling rate does not make older momentum weigh more, as it does where m adds up rate * g. A
     sign has a size, `magnitude`.
  5. Weight decay is the optimiser's. Coupled to the gradient it goes through momentum and sign; the
     paper's does not.
  6. The mean of a coefficient is over all nodes. The authors' code takes it over the nodes that
     sent it, so that its coefficients are up to K times larger where nodes choose different ones.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc import comm
from jgc.compress.registry import Entry, check_idle, settings_of
from jgc.layout.batches import searched_together
from jgc.layout.devices import each
from jgc.layout.pack import Layer
from jgc.method import Codec, Layers, compose
from jgc.method.exchange import gather
from jgc.method.memory import error_feedback
from jgc.selection.chunks import largest_in_rows
from jgc.selection.entries import Sparse, scatter
from jgc.types import Array, Compressor
from jgc.wire import elias_fano


@dataclasses.dataclass(frozen=True)
class Demo:
    """Settings of `demo`."""

    decay: float = 0.999
    """beta, decay of the momentum, in (0, 1)"""
    k: int = 32
    """coefficients sent per chunk of chunk * chunk values, at least 1"""
    chunk: int = 64
    """side of a chunk, at least 1"""
    sign: bool = True
    """the aggregate is the sign of the mean, times `magnitude`; if not, the mean"""
    magnitude: float = 0.03
    """factor of a sign, so that learning rates of other methods can be used; the paper's is 1"""


def demo(config: Demo | None = None, **overrides) -> Compressor:
    """Decoupled momentum: k DCT coefficients of every chunk of each node's f32[n], gathered by all
    nodes.

    Raises:
      ValueError: a setting outside its range.

    Example:
      >>> demo(k=8).schedule[0].name
      'dct'

    Source: Peng, Quesnelle, Kingma 2024, "DeMo: Decoupled Momentum Optimization", Algorithm 1.
    """
    config = settings_of(Demo, config, overrides)
    if not 0 < config.decay < 1:
        raise ValueError(f"decay must be in (0, 1), got {config.decay}")
    if not 0 < config.magnitude < float("inf"):
        raise ValueError(f"magnitude must be finite and positive, got {config.magnitude}")
    if not config.sign:
        check_idle(config, "with sign=False", "magnitude")
    if config.chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {config.chunk}")
    if not 1 <= config.k <= config.chunk**2:
        raise ValueError(f"k must be from 1 to chunk * chunk = {config.chunk**2}, got {config.k}")
    momentum = error_feedback(decay=config.decay)._replace(owns_momentum=True)
    return compose(dct_top_k(config), momentum, gather())


def dct_top_k(config: Demo) -> Codec:
    """The largest DCT coefficients of every chunk: mu values and their positions among all."""

    def encode(key, v, layers):
        positions, values, start = [jnp.zeros(0, jnp.int32)], [jnp.zeros(0, jnp.float32)], 0
        transformed = comm.one_by_one(lambda _, v: dct(config, layers, v), (), v)
        for batch, x in zip(_batches(config, layers), transformed, strict=True):
            largest = largest_in_rows(x, batch.k)
            chunks = x.shape[1] * jnp.arange(batch.chunks, dtype=jnp.int32)[:, None]
            positions.append(start + (chunks + largest).reshape(-1))
            chosen = jnp.take_along_axis(x, largest, 1, mode="promise_in_bounds")
            values.append(chosen.reshape(-1))
            start += x.size
        packed = elias_fano.encode(jnp.concatenate(positions), _coefficients(config, layers))
        return {"positions": packed, "values": jnp.concatenate(values)}

    def sparse(payload, layers):
        n, mu = _coefficients(config, layers), _elements(config, layers)
        return Sparse(elias_fano.decode(payload["positions"], n, mu), payload["values"])

    def decode(payload, layers):
        coefficients = spread(config, layers, sparse(payload, layers))
        return comm.one_by_one(lambda _, c: inverse_dct(config, layers, c), (), coefficients)

    def mean(payloads, layers):
        everyone = each(lambda payload: sparse(payload, layers), payloads)
        nodes = payloads["values"].shape[0]
        aggregate = inverse_dct(config, layers, spread(config, layers, everyone)) / nodes
        return config.magnitude * jnp.sign(aggregate) if config.sign else aggregate

    return Codec("dct", False, encode, decode, mean, partial(_elements, config))


# --- chunks of a layer's matrix -------------------------------------------------------------------


def _grid(config: Demo, layer: Layer) -> tuple[int, int, int, int]:
    """Rows and columns of chunks in a layer's matrix, rows and columns of values in a chunk."""
    *others, cols = layer.shape
    rows = math.prod(others)
    a, b = min(rows, config.chunk), min(cols, config.chunk)
    return -(-rows // a), -(-cols // b), a, b


def _coefficients(config: Demo, layers: Layers) -> int:
    """Number of all coefficients, including the padding's."""
    return sum(math.prod(_grid(config, layer)) for layer in layers)


class _Batch(NamedTuple):
    """Layers whose chunks [chunks, a, b] are searched together; each chunk sends k coefficients."""

    layers: Layers
    chunks: int
    a: int
    b: int
    k: int


def _batches(config: Demo, layers: Layers) -> list[_Batch]:
    """The layers in batches."""
    batches = []
    for alike in searched_together(layers, lambda layer: _grid(config, layer)[2:]):
        *_, a, b = _grid(config, alike[0])
        k = max(1, round(config.k * a * b / config.chunk**2))
        batches.append(_Batch(alike, _coefficients(config, alike) // (a * b), a, b, k))
    return batches


def _elements(config: Demo, layers: Layers) -> int:
    return sum(batch.chunks * batch.k for batch in _batches(config, layers))


def spread(config: Demo, layers: Layers, everyone: Sparse) -> list[Array]:
    """Coefficients [..., mu], added up, as f32[chunks, a, b] for every batch."""
    out, start, at = [], 0, 0  # of the batch, among all coefficients and among the sent ones
    for batch in _batches(config, layers):
        shape, end = (batch.chunks, batch.a, batch.b), at + batch.chunks * batch.k
        entries = Sparse(everyone.positions[..., at:end] - start, everyone.values[..., at:end])
        out.append(scatter(entries, math.prod(shape)).reshape(shape))
        start, at = start + math.prod(shape), end
    return out


# --- the transform --------------------------------------------------------------------------------


def basis(size: int) -> np.ndarray:
    """The orthonormal DCT-II, f32[size, size], one frequency a row.

    Example:
      >>> basis(2).round(3).tolist()
      [[0.7070000171661377, 0.7070000171661377], [0.7070000171661377, -0.7070000171661377]]
    """
    rows = np.cos(np.pi * np.outer(np.arange(size), 2 * np.arange(size) + 1) / (2 * size))
    rows[0] /= np.sqrt(2)
    return (np.sqrt(2 / size) * rows).astype(np.float32)


# the residual is exact only in full f32
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def dct(config: Demo, layers: Layers, v: Array) -> list[Array]:
    """The coefficients of all chunks of v f32[n], f32[chunks, a b] for every batch."""
    out = []
    for batch in _batches(config, layers):
        x = jnp.concatenate([_chunks(config, layer, v) for layer in batch.layers])
        x = _einsum("ia,cab,jb->cij", basis(batch.a), x, basis(batch.b))
        out.append(x.reshape(batch.chunks, -1))
    return out


def inverse_dct(config: Demo, layers: Layers, coefficients: Sequence[Array]) -> Array:
    """The inverse of `dct`, from f32[chunks, a, b] for every batch: a vector f32[n]."""
    values: dict[Layer, Array] = {}
    for batch, x in zip(_batches(config, layers), coefficients, strict=True):
        chunks, start = _einsum("ia,cij,jb->cab", basis(batch.a), x, basis(batch.b)), 0
        for layer in batch.layers:
            m, n, *_ = _grid(config, layer)
            values[layer] = _values(config, layer, chunks[start : start + m * n])
            start += m * n
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *(values[layer] for layer in layers)])


def _chunks(config: Demo, layer: Layer, v: Array) -> Array:
    """The chunks of a layer, row by row, padded with zeros: f32[n] -> f32[chunks, a, b]."""
    m, n, a, b = _grid(config, layer)
    matrix = v[layer.start : layer.start + layer.size].reshape(-1, layer.shape[-1])
    rows, cols = matrix.shape
    matrix = jnp.pad(matrix, ((0, m * a - rows), (0, n * b - cols)))
    return matrix.reshape(m, a, n, b).swapaxes(1, 2).reshape(m * n, a, b)


def _values(config: Demo, layer: Layer, chunks: Array) -> Array:
    """The inverse of `_chunks`: the layer's values, f32[size]."""
    m, n, a, b = _grid(config, layer)
    matrix = chunks.reshape(m, n, a, b).swapaxes(1, 2).reshape(m * a, n * b)
    cols = layer.shape[-1]
    return matrix[: layer.size // cols, :cols].reshape(-1)


METHOD = Entry(
    "demo", Demo, demo, "Peng et al. 2024", lossless=None, citation=("peng2024demo",),
    exempt={"conservation": "momentum fades, and the aggregate is a sign"})
