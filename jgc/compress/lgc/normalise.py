"""Normalise the selected values of nodes and layers for the autoencoder; symbols as in `server`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc.compress.lgc import autoencoder as ae
from jgc.compress.lgc.settings import Lgc, LgcPs
from jgc.layout.pack import Layer, Layers, layer_ids
from jgc.selection.chunks import largest_in_rows
from jgc.selection.entries import replaced
from jgc.selection.ranges import Range
from jgc.selection.selector import Selector, layer_means
from jgc.selection.top_k import largest_in_ranges
from jgc.types import Array

LARGEST = 16.0  # of z; a node's largest value is seldom above 8 times the mean of those selected


class Selection(NamedTuple):
    """The layers, and how values of each are selected. Static."""

    layers: Layers  # of the vector
    selector: Selector  # chooses and packs positions
    counts: tuple[int, ...]  # selected values of each layer
    mu: int  # selected values of all layers
    ids: np.ndarray  # i32[mu], layer of each selected value


def select_layers(selector: Selector, layers: Layers) -> Selection:
    """The selection for these layers."""
    counts = selector.counts(layers)
    return Selection(layers, selector, counts, sum(counts), layer_ids(counts))


class View(NamedTuple):
    """The normalisation of a node's selected values: z = (s x - mean) / scale."""

    signs: Array  # f32[mu], +1 or -1
    means: Array  # f32[L]
    scales: Array  # f32[L], 0 or positive


def innovations_by_layer(config: LgcPs, selection: Selection) -> tuple[int, ...]:
    """How many innovations a node sends of each layer: the share `innovation` of its selected
    values, at least one (Algorithm 1); over all layers together, one number, also at least one."""
    if config.innovation_by != "layer":
        # 0.29 * 100 is a little less than 29
        count = int(config.innovation * selection.mu + 1e-9)
        return (max(count, 1) if config.innovation and selection.mu else 0,)
    if not config.innovation:
        return (0,) * len(selection.counts)
    return Selector(config.innovation).counts(_selected(selection))


def _selected(selection: Selection) -> Layers:
    """The layers of the vector of selected values, f32[mu]."""
    starts = np.cumsum((0, *selection.counts))[:-1]
    rows = zip(selection.layers, starts, selection.counts, strict=True)
    return tuple(Layer(layer.name, int(start), count, (count,)) for layer, start, count in rows)


def scales_of(config: Lgc, x: Array, selection: Selection) -> Array:
    """Mean magnitude of each layer's values, f32[L]; all 1 if `scale` is "none"."""
    if config.scale == "none":
        return jnp.ones((len(selection.counts),), jnp.float32)
    return layer_means(jnp.abs(x), selection.counts)


def means_of(config: Lgc, x: Array, signs: Array, selection: Selection) -> Array:
    """Mean of each layer's sign-folded values, f32[L]; zeros if means are not sent."""
    if not config.send_means:
        return jnp.zeros((len(selection.counts),), jnp.float32)
    return layer_means(signs * x, selection.counts)


def to_z(config: Lgc, x: Array, view: View, selection: Selection) -> Array:
    """Values f32[mu] to z f32[m], in [-16, 16] if they are scaled. A layer of scale 0 is not."""
    scales = jnp.where(view.scales > 0, view.scales, 1.0)
    z = (view.signs * x - view.means[selection.ids]) / scales[selection.ids]
    if config.scale == "layer":
        # The scales may be a different node's, and many times too small: convolutions would spread
        # such values over the other layers, and squares overflow. With exact feedback the residual
        # keeps the rest.
        z = jnp.clip(z, -LARGEST, LARGEST)
    return jnp.pad(z, (0, ae.padded(selection.mu) - selection.mu))


def from_z(z: Array, view: View, selection: Selection) -> Array:
    """z f32[m] to values f32[mu]. A layer of scale 0 gets its mean, no decoder biases."""
    return view.signs * (view.means[selection.ids] + view.scales[selection.ids] * z[: selection.mu])


def choose_innovations(config: LgcPs, x: Array, view: View, selection: Selection) -> Array:
    """Indices of the selected values that a node sends exactly, i32[innovations], ascending."""
    if config.innovation_by == "layer":
        counts = innovations_by_layer(config, selection)
        layers = zip(_selected(selection), counts, strict=True)
        return largest_in_ranges(x, [Range(layer.start, layer.size, k) for layer, k in layers])
    explained = view.signs * view.means[selection.ids] if config.innovation_by == "error" else 0.0
    (count,) = innovations_by_layer(config, selection)
    return largest_in_rows((x - explained)[None], count)[0]


def server_views(
    config: Lgc, x: Array, leader: Array, selection: Selection
) -> tuple[View, Array]:
    """All nodes' views of their values x f32[K, mu], and z f32[K, m], on a node that has all x."""
    signs = jnp.where((x < 0) & config.fold_signs, jnp.float32(-1), jnp.float32(1))
    scales = jax.vmap(lambda x: scales_of(config, x, selection))(x)
    if config.positions == "leader":
        signs = jnp.broadcast_to(signs[leader], signs.shape)
        scales = jnp.broadcast_to(scales[leader], scales.shape)
    means = jax.vmap(lambda x, s: means_of(config, x, s, selection))(x, signs)
    views = View(signs, means, scales)
    return views, jax.vmap(lambda x, view: to_z(config, x, view, selection))(x, views)


def header_of(config: Lgc, x: Array, positions: Array, selection: Selection) -> dict[str, Array]:
    """The payload of positions, and of the signs and scales of the values x f32[mu] there."""
    header = {"positions": selection.selector.pack(positions, selection.layers)}
    if config.fold_signs:
        header["signs"] = jnp.packbits(x < 0)
    # The mean of values folded by their signs is their mean magnitude: means serve as scales.
    if config.scale == "layer" and not (config.fold_signs and config.send_means):
        header["scales"] = scales_of(config, x, selection)
    return header


def unpacked_signs(header: dict[str, Array], mu: int) -> Array:
    """The signs in a header, as +1 or -1, f32[mu]; all +1 if it has none."""
    if "signs" not in header:
        return jnp.ones((mu,), jnp.float32)
    return 1.0 - 2.0 * jnp.unpackbits(header["signs"], count=mu).astype(jnp.float32)


def view_of(config: Lgc, x: Array, header: dict[str, Array], selection: Selection) -> View:
    """This node's view of its values x f32[mu], with signs and scales from `header` or from x."""
    signs = unpacked_signs(header, selection.mu)
    scales = header["scales"] if "scales" in header else scales_of(config, x, selection)
    return View(signs, means_of(config, x, signs, selection), scales)


def innovation_vector(
    config: Lgc, view: View, picked: Array, values: Array, selection: Selection
) -> Array:
    """The decoder's innovation input: z where values were sent, zero elsewhere, f32[m]."""
    x = replaced(jnp.zeros((selection.mu,), jnp.float32), picked, values)
    z = to_z(config, x, view, selection)
    return replaced(jnp.zeros((ae.padded(selection.mu),), jnp.float32), picked, z[picked])
