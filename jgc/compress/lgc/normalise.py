"""Normalise the selected values of different nodes and layers for the autoencoder.

Symbols as in `jgc.compress.lgc.server`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc.compress.lgc import autoencoder as ae
from jgc.compress.lgc.settings import Lgc, LgcPs
from jgc.compress.settings import selector_of
from jgc.layout.pack import Layer, Layers, layer_ids
from jgc.selection.chunks import largest_in_rows
from jgc.selection.select import counts_per_layer, layer_means, replaced, top_positions
from jgc.selection.selector import Selector
from jgc.types import Array


class Selection(NamedTuple):
    """The layers, and how values of each are selected. Static."""

    layers: Layers
    selector: Selector

    @property
    def counts(self) -> tuple[int, ...]:  # selected values of each layer
        return self.selector.counts(self.layers)

    @property
    def mu(self) -> int:
        return sum(self.counts)

    @property
    def ids(self) -> np.ndarray:  # layer of each selected value, i32[mu]
        return layer_ids(self.counts)

    def positions(self, v: Array) -> Array:
        """Positions of the selected values of v f32[n], i32[mu]."""
        return self.selector.positions(v, self.layers)

    def pack(self, positions: Array) -> Array:
        """Positions as u32[words]."""
        return self.selector.pack(positions, self.layers)

    def unpack(self, packed: Array) -> Array:
        """The inverse of `pack`."""
        return self.selector.unpack(packed, self.layers)


class View(NamedTuple):
    """The normalisation of a node's selected values: z = (s x - mean) / scale."""

    signs: Array  # f32[mu], +1 or -1
    means: Array  # f32[L]
    scales: Array  # f32[L], 0 or positive


def select_layers(config: Lgc, layers: Layers) -> Selection:
    """The selection for these layers."""
    return Selection(layers, selector_of(config, config.alpha, config.min_values))


def innovations_by_layer(config: LgcPs, selection: Selection) -> tuple[int, ...]:
    """How many innovations a node sends of each layer's selected values, in the order of the layers.

    The share `innovation` of them, at least one (Algorithm 1); over all layers together a single number, rounded down.
    """
    if config.innovation_by != "layer":
        return (int(config.innovation * selection.mu),)
    if not config.innovation:
        return (0,) * len(selection.counts)
    return counts_per_layer(_selected(selection), config.innovation)


def _selected(selection: Selection) -> Layers:
    """The layers of the vector of selected values, f32[mu]."""
    starts = np.cumsum((0, *selection.counts))[:-1]
    return tuple(
        Layer(layer.name, int(start), count, (count,))
        for layer, start, count in zip(selection.layers, starts, selection.counts, strict=True)
    )


def innovation_count(config: LgcPs, selection: Selection) -> int:
    """How many innovations a node sends."""
    return sum(innovations_by_layer(config, selection))


def signs_of(config: Lgc, x: Array) -> Array:
    """+1 or -1 for every value; all +1 without `fold_signs`."""
    return jnp.where(x < 0, jnp.float32(-1), jnp.float32(1)) if config.fold_signs else jnp.ones_like(x)


def scales_of(config: Lgc, x: Array, selection: Selection) -> Array:
    """Mean magnitude of each layer's values, f32[L], 0 for a layer of zeros; all 1 if `scale` is "none"."""
    if config.scale == "none":
        return jnp.ones((len(selection.counts),), jnp.float32)
    return layer_means(jnp.abs(x), selection.counts)


def means_of(config: Lgc, x: Array, signs: Array, selection: Selection) -> Array:
    """Mean of each layer's sign-folded values, f32[L]; zeros if means are not sent."""
    if not config.send_means:
        return jnp.zeros((len(selection.counts),), jnp.float32)
    return layer_means(signs * x, selection.counts)


def to_z(x: Array, view: View, selection: Selection) -> Array:
    """Values f32[mu] to z f32[m]. A layer with scale 0 (the leader's values are all zero) stays unscaled."""
    scales = jnp.where(view.scales > 0, view.scales, 1.0)
    z = (view.signs * x - view.means[selection.ids]) / scales[selection.ids]
    return jnp.pad(z, (0, ae.padded(selection.mu) - selection.mu))


def from_z(z: Array, view: View, selection: Selection) -> Array:
    """z f32[m] to values f32[mu]. A layer with scale 0 gets only its mean: decoder biases must not become values."""
    return view.signs * (view.means[selection.ids] + view.scales[selection.ids] * z[: selection.mu])


def choose_innovations(config: LgcPs, x: Array, view: View, selection: Selection) -> Array:
    """Indices of the selected values that a node sends exactly, i32[innovations], ascending."""
    if config.innovation_by == "layer":
        return top_positions(x, _selected(selection), innovations_by_layer(config, selection))
    explained = view.signs * view.means[selection.ids] if config.innovation_by == "error" else 0.0
    return largest_in_rows((x - explained)[None], innovation_count(config, selection))[0]


def server_views(config: Lgc, x: Array, leader: Array, selection: Selection) -> View:
    """All nodes' views of their values x f32[K, mu], for a server that has the values themselves."""
    signs = signs_of(config, x)
    scales = jax.vmap(lambda x: scales_of(config, x, selection))(x)
    if config.positions == "leader":
        signs = jnp.broadcast_to(signs[leader], signs.shape)
        scales = jnp.broadcast_to(scales[leader], scales.shape)
    return View(signs, jax.vmap(lambda x, s: means_of(config, x, s, selection))(x, signs), scales)


def header_of(config: Lgc, v: Array, positions: Array, selection: Selection) -> dict[str, Array]:
    """The payload of positions, and of the signs and scales of the values there."""
    x = v[positions]
    header = {"positions": selection.pack(positions)}
    if config.fold_signs:
        header["signs"] = jnp.packbits(x < 0)
    if config.scale == "layer" and not scales_are_means(config):
        header["scales"] = scales_of(config, x, selection)
    return header


def scales_are_means(config: Lgc) -> bool:
    """Whether means serve as scales: the mean of values folded by their own signs is their mean magnitude."""
    return config.fold_signs and config.send_means and config.scale == "layer"


def unpacked_signs(config: Lgc, header: dict[str, Array], selection: Selection) -> Array:
    """The signs in a header, as +1 or -1, f32[mu]."""
    if not config.fold_signs:
        return jnp.ones((selection.mu,), jnp.float32)
    return 1.0 - 2.0 * jnp.unpackbits(header["signs"], count=selection.mu).astype(jnp.float32)


def view_of(config: Lgc, x: Array, header: dict[str, Array], selection: Selection) -> View:
    """This node's view of its own values, with signs and scales from `header` or from x itself."""
    signs = unpacked_signs(config, header, selection)
    scales = header["scales"] if "scales" in header else scales_of(config, x, selection)
    return View(signs, means_of(config, x, signs, selection), scales)


def innovation_vector(view: View, picked: Array, values: Array, selection: Selection) -> Array:
    """The decoder's innovation input: z where values were sent, zero elsewhere, f32[m]."""
    z = to_z(replaced(jnp.zeros((selection.mu,), jnp.float32), picked, values), view, selection)
    return replaced(jnp.zeros((ae.padded(selection.mu),), jnp.float32), picked, z[picked])
