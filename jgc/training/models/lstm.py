"""A language model of LSTM layers: embedding, two layers of 200 units, softmax over the vocabulary.

The small model of Zaremba et al., without dropout: 4,651,600 parameters with 10,000 words.

References:
    Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 1997.
    Zaremba, Sutskever and Vinyals, "Recurrent Neural Network Regularization", arXiv:1409.2329, 2014.

Differs from the paper:
    1. The recurrent state is a Flax collection, `carry`, next to `params`; the caller passes it from call to call. It
       is set to zero for streams that start, as the input says.
    2. A cell has one bias per gate; their program has two, which it adds.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jgc.training.models.base import Model, Norm, check_model, check_positive

INIT = 0.1  # parameters are drawn uniformly from [-INIT, INIT]


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The initialiser of all parameters, dtype[shape]."""
    return jax.random.uniform(key, shape, dtype, -INIT, INIT)


class LanguageModel(nn.Module):
    """Windows of words i32[b, T] and start bool[b] to logits f32[b, T, num_classes] of each next word.

    Parameters: `embedding/embedding`, `layer1/{ii,if,ig,io}/kernel`, `layer1/{hi,hf,hg,ho}/{kernel,bias}`, ...,
    `head/{kernel,bias}`. Carried: `state1`, ..., a cell and a hidden state f32[b, units] each.
    """

    num_classes: int
    units: int = 200
    layers: int = 2
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array], train: bool) -> jax.Array:
        words, start = inputs
        x = nn.Embed(self.num_classes, self.units, embedding_init=uniform, dtype=self.dtype, name="embedding")(words)
        for i in range(1, self.layers + 1):
            x = self.layer(x, start, i)
        return nn.Dense(self.num_classes, kernel_init=uniform, bias_init=uniform, name="head")(x.astype(jnp.float32))

    def layer(self, x: jax.Array, start: jax.Array, number: int) -> jax.Array:
        """dtype[b, T, units] to dtype[b, T, units], starting from the state after the window before."""
        inits: dict[str, Any] = dict.fromkeys(("kernel_init", "recurrent_kernel_init", "bias_init"), uniform)
        cell = nn.OptimizedLSTMCell(self.units, **inits, dtype=self.dtype, name=f"layer{number}")
        state = self.variable("carry", f"state{number}", cell.initialize_carry, jax.random.key(0), x[:, 0].shape)
        before = jax.tree.map(lambda s: jnp.where(start[:, None], 0, s), state.value)
        after, x = nn.RNN(cell, return_carry=True)(x, initial_carry=before)
        if not self.is_initializing():
            state.value = after
        return x


def lstm(
    num_classes: int, *, units: int = 200, layers: int = 2, norm: Norm = "none", dtype: Any = jnp.float32
) -> Model:
    """An LSTM language model for windows of any length."""
    check_model(num_classes, norm, ("none",))
    check_positive(units=units, layers=layers)
    # no first layer that may go uncompressed: the embedding has nearly half of the parameters
    return Model(LanguageModel(num_classes, units, layers, dtype), first_layer="", last_layer=r"^head/", kind="text")
