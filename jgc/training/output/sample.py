"""A sample of text from a model of characters, at the end of a run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jgc.nodes.placing import to_host
from jgc.training.data import Window
from jgc.training.run.setup import Setup
from jgc.training.steps.step import TrainState
from jgc.types import Array, Key, PyTree

LENGTH = 300
FIRST = "\n"


def sample_of(setup: Setup, state: TrainState) -> str | None:
    """Characters drawn from a trained model, or None for other data. All processes must call it."""
    vocabulary = setup.source.vocabulary
    if not vocabulary:
        return None
    first = vocabulary.index(FIRST) if FIRST in vocabulary else 0
    window = setup.source.inputs(1).words.shape[1]
    params = jax.tree.map(to_host, state.params)
    key = jax.random.key(setup.parts.config.seed)
    characters = np.asarray(sample(setup.parts.apply, params, key, first, window, LENGTH))
    return "".join(vocabulary[i] if i < len(vocabulary) else "?" for i in characters.tolist()).strip()


def sample(apply: Callable, params: PyTree, key: Key, first: int, window: int, length: int) -> Array:
    """Tokens i32[length] drawn one after the other; the model sees at most `window` before each, `first` the first."""

    def step(carry, key):
        tokens, count = carry  # i32[1, window], the last `count` of the text so far
        # each window starts a text, so what an LSTM carries from one to the next is dropped
        logits, _ = apply({"params": params}, Window(tokens, jnp.ones(1, bool)), train=False, mutable=["carry"])
        drawn = jax.random.categorical(key, logits[0, count - 1])
        full = count == window
        tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
        tokens = tokens.at[0, jnp.minimum(count, window - 1)].set(drawn)
        return (tokens, jnp.minimum(count + 1, window)), drawn

    @jax.jit
    def draw(key):
        tokens = jnp.zeros((1, window), jnp.int32).at[0, 0].set(first)
        return jax.lax.scan(step, (tokens, jnp.int32(1)), jax.random.split(key, length))[1]

    return draw(key)
