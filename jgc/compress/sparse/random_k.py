"""Random-k: all nodes draw the same random positions, so only values are sent, by an all-reduce.

    v = r + g;  send v at k random positions of each layer;  r = v - sent

Source: Stich et al. 2018, "Sparsified SGD with Memory", NeurIPS, Definition 2.1 (rand_k) and
Algorithm 1.

Differs from the paper
  1. All nodes draw the same positions, from the shared random key and the number of steps: an
     all-reduce adds the values, and no positions are sent. The paper's nodes may draw different
     ones.
  2. Each layer, rotated by a random offset, is cut into k ranges of nearly equal length, and one
     position is drawn from each. Every position still has the probability k / n, but two neighbours
     are rarely drawn together. A uniform draw of k out of n would sort n random numbers in every
     step.
  3. Error feedback replaces the factor n / k of the unbiased rand_k.
  4. An uncompressed warm-up can come first (`warmup_steps`, 0 by default).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Sparsifying, memory_of, schedule_of
from jgc.compress.sparse.shared_positions import Algorithm, shared_positions
from jgc.layout.pack import Layers, layer_ids
from jgc.method.messages import both_ways
from jgc.selection.entries import Unordered
from jgc.selection.selector import Selector, make_selector
from jgc.types import Array, Compressor, Key, Message, Nodes


@dataclasses.dataclass(frozen=True)
class RandomK(Sparsifying):
    """Settings of `random_k`."""

    algorithm: Algorithm = "psum"
    """how values are averaged: the runtime's all-reduce or an explicit ring"""


def random_k(config: RandomK | None = None, **overrides) -> Compressor:
    """Random positions with error feedback: f32[mu] of every node through an all-reduce, no
    positions.

    A value waits for 1 / alpha steps, and then all that it has accumulated moves together: with
    0.1 % and `momentum_at_once` a ResNet-20 diverged at the baseline's learning rate
    (docs/results/long_runs).

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [phase.name for phase in random_k(alpha=0.01, warmup_steps=100).schedule]
      ['dense', 'random-k']

    Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with Memory", NeurIPS, Algorithm 1.
    """
    config = settings_of(RandomK, config, overrides)
    memory, schedule = memory_of(config), schedule_of(config, "random-k")
    return shared_positions(
        drawn, messages, memory, schedule, config.alpha,
        lambda share: make_selector(share, config.min_values), config.algorithm, Unordered)


def drawn(
    key: Key, step: Array, v: Array, layers: Layers, selector: Selector, nodes: Nodes
) -> Array:
    """Draw one position from each of k ranges of every layer, rotated by a random offset."""
    if not layers:
        return jnp.zeros((0,), jnp.int32)
    counts = selector.counts(layers)
    to_start, to_range = jax.random.split(jax.random.fold_in(key, step))
    sizes = np.array([layer.size for layer in layers], np.int32)
    edges = [np.arange(k + 1, dtype=np.int64) * n // k
             for n, k in zip(sizes, counts, strict=True)]  # fmt: skip
    lows = np.concatenate([edge[:-1] for edge in edges]).astype(np.uint32)  # u32[mu], as below
    lengths = np.concatenate([np.diff(edge) for edge in edges]).astype(np.int32)
    starts = jax.random.randint(to_start, sizes.shape, 0, sizes).astype(jnp.uint32)  # [layers]
    places = lows + jax.random.randint(to_range, lows.shape, 0, lengths).astype(jnp.uint32)
    layer_of = layer_ids(counts)
    # < 2^32 as sizes are < 2^31
    wrapped = (places + starts[layer_of]) % sizes.astype(np.uint32)[layer_of]
    of_layer = np.array([layer.start for layer in layers], np.int32)[layer_of]
    return wrapped.astype(jnp.int32) + of_layer


def messages(layers: Layers, selector: Selector) -> tuple[Message, ...]:
    """Only values are sent."""
    return both_ways({"values": 4.0 * sum(selector.counts(layers))})


METHOD = Entry(
    "random_k", RandomK, random_k, "Stich et al. 2018", lossless={"alpha": 1.0}, layers=FIRST_DENSE,
    citation=("stich2018sparsified",))
