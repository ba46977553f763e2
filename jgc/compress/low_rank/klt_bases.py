"""Learned bases, from mean gradients, in which a few coefficients hold most of a layer's energy.

M_i = decay M_i + unfold_i(G) unfold_i(G)'       second moments of mode i, G a layer's mean gradient
M_i = U_i diag(l_i) U_i'                         its basis
energy of a coefficient = trace(M) times the product of its l_i / trace(M), as if independent
"""

import math
from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.layout.eigenvectors import eigh
from jgc.layout.pack import Layer
from jgc.selection.ranges import Range, bits_of
from jgc.selection.top_k import largest_in_ranges
from jgc.types import Array

# The residual is exact only in full f32.
_tensordot = partial(jnp.tensordot, precision=lax.Precision.HIGHEST)

Factors = tuple[tuple[Array, ...], ...]  # per layer, one array per mode


def modes(layers: Sequence[Layer]) -> list[tuple[int, ...]]:
    """The modes of each layer: taps, inputs and outputs of a convolution; one of biases and norms.

    Example:
      >>> from jgc.layout.pack import make_packing
      >>> tree = {"bias": (16,), "conv": (3, 3, 8, 16), "dense": (8, 5)}
      >>> tree = {name: jnp.zeros(shape) for name, shape in tree.items()}
      >>> modes(make_packing(tree).layers)
      [(9, 8, 16), (8, 5), (16,)]
    """
    shapes = [layer.shape for layer in layers]
    return [(math.prod(shape[:-2]), *shape[-2:]) if len(shape) > 2 else shape for shape in shapes]


def _by_layer(flat: Array, layers: Sequence[Layer]) -> list[Array]:
    """The layers of f32[n]; the axes of each are its modes."""
    return [flat[layer.start : layer.start + layer.size].reshape(shape)
            for layer, shape in zip(layers, modes(layers), strict=True)]  # fmt: skip


def rotate(layers: Sequence[Layer], bases: Factors, flat: Array, back: bool = False) -> Array:
    """f32[n] to coefficients f32[n], or back."""
    out = [jnp.zeros((0,), jnp.float32)]
    for x, factors in zip(_by_layer(flat, layers), bases, strict=True):
        for axis, u in enumerate(factors):
            if u.ndim == 2:
                x = jnp.moveaxis(_tensordot(u, x, ((1 if back else 0,), (axis,))), 0, axis)
        out.append(x.reshape(-1))
    return jnp.concatenate(out)


def nothing_learned(layers: Sequence[Layer], max_mode: int) -> tuple[Factors, Factors]:
    """Zero moments and identity bases, each [r, r], for modes of size 2 to `max_mode`; else moments
    [r], bases [0]."""

    def first(shape, r):
        if len(shape) > 1 and 1 < r <= max_mode:
            return jnp.zeros((r, r), jnp.float32), jnp.eye(r, dtype=jnp.float32)
        return jnp.zeros((r,), jnp.float32), jnp.zeros((0,), jnp.float32)

    pairs = [[first(shape, r) for r in shape] for shape in modes(layers)]
    moments, bases = (tuple(tuple(pair[i] for pair in layer) for layer in pairs) for i in (0, 1))
    return moments, bases


def add_moments(decay: float, old: Factors, mean: Array, layers: Sequence[Layer]) -> Factors:
    """Add one more mean f32[n] to the second moments."""

    def of_mode(x: Array, axis: int, moment: Array) -> Array:
        a = jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
        new = _tensordot(a, a, ((1,), (1,))) if moment.ndim == 2 else jnp.sum(a * a, axis=1)
        return decay * moment + new

    return tuple(tuple(of_mode(x, axis, moment) for axis, moment in enumerate(moments))
                 for x, moments in zip(_by_layer(mean, layers), old, strict=True))  # fmt: skip


def eigenbases(moments: Factors, count: int) -> tuple[Factors, Array, Array]:
    """Eigenvectors of the moments; positions i32[count], ascending, of the coefficients with most
    energy; their groups i32[count], see `grouped`."""
    nothing = jnp.zeros((0,), jnp.float32)
    bases, energies = [], [nothing]
    rotated = iter(eigh([moment for layer in moments for moment in layer if moment.ndim == 2]))
    for layer in moments:
        pairs = [next(rotated) if moment.ndim == 2 else (moment, nothing) for moment in layer]
        values = [jnp.maximum(value, 0) for value, _ in pairs]
        whole = energy = jnp.sum(values[0])
        for value in values:  # as if the modes were independent
            energy = jnp.multiply.outer(energy, value / jnp.maximum(whole, 1e-30))
        bases.append(tuple(vectors for _, vectors in pairs))
        energies.append(energy.reshape(-1))
    all_energies = jnp.concatenate(energies)
    positions = largest_in_ranges(all_energies, [Range(0, all_energies.size, count)])
    return tuple(bases), positions, grouped(all_energies[positions])


def grouped(energies: Array) -> Array:
    """Groups by energy, i32[k]: 0 for the largest, then groups of 2, 4, 8, ...; ties share one.

    Example:
      >>> grouped(jnp.array([2.0, 9.0, 1.0, 1.0, 4.0]))
      Array([1, 0, 2, 2, 1], dtype=int32)
    """
    # How many are larger than the last one of each group but the last group.
    last = np.array([2**i - 2 for i in range(1, group_count(energies.size))], np.int32)
    bits = bits_of(energies)

    # The bits of that one, highest first: XLA for TPU compiles that in a second, a sort of 250,000
    # values in nine.
    def refine(i, least):
        higher = least + (1 << (30 - i))
        return jnp.where(jnp.sum(bits[None] >= higher[:, None], axis=1) > last, higher, least)

    least = lax.fori_loop(0, 31, refine, jnp.zeros_like(bits, shape=last.shape))
    return jnp.sum(bits[None] < least[:, None], axis=0, dtype=jnp.int32)


def group_count(k: int) -> int:
    """How many groups k coefficients have.

    Example:
      >>> [group_count(k) for k in (0, 1, 2, 3, 4, 7, 8)]
      [0, 1, 2, 2, 3, 3, 4]
    """
    return k.bit_length()
