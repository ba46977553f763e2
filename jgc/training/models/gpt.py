"""GPT: a decoder-only transformer. Token and position embeddings, pre-norm blocks, a tied or an untied head.

A block with `units` u has four matrices and no biases: `attention/qkv` [u, 3u], `attention/out` [u, u], `mlp/up`
[u, 4u] and `mlp/down` [4u, u]; with its two norms that is 12 u^2 + 2 u parameters in 6 leaves.

References:
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
    Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.

Differs from GPT-2:
    1. Matrices and norms have no biases, and there is no dropout.
    2. Norms add 1e-6 to the variance, where GPT-2 adds 1e-5.
    3. Positions start as the tokens do, with a standard deviation of 0.02.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jgc.training.models.base import Model, Norm, check_model, check_positive

INIT = 0.02  # standard deviation of embeddings and matrices


def normal(scale: float = 1.0) -> jax.nn.initializers.Initializer:
    """The initialiser of embeddings and matrices."""
    return nn.initializers.normal(INIT * scale)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`softmax(q k^T / sqrt(d)) v` over no later tokens, dtype[b, heads, T, d]; logits and weights in f32.

    With its gradient it takes half the time of `jax.nn.dot_product_attention` on CPU: heads stand before tokens, and
    division by the sum of the weights comes after the product.
    """
    t, d = q.shape[-2:]
    logits = jnp.einsum("bhtd,bhsd->bhts", q * d**-0.5, k, preferred_element_type=jnp.float32)
    logits = jnp.where(jnp.tri(t, dtype=bool), logits, -jnp.inf)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    x = jnp.einsum("bhts,bhsd->bhtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (x / weights.sum(-1, keepdims=True)).astype(v.dtype)


class Attention(nn.Module):
    """Causal self-attention, dtype[b, T, units] to the same. `qkv/kernel`, `out/kernel`."""

    heads: int
    scale: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, units = x.shape
        qkv = nn.Dense(3 * units, use_bias=False, kernel_init=normal(), dtype=self.dtype, name="qkv")(x)
        qkv = jnp.split(qkv.reshape(b, t, 3 * self.heads, units // self.heads), 3, axis=2)
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in qkv)
        x = jnp.swapaxes(causal_attention(q, k, v), 1, 2).reshape(b, t, units)
        return nn.Dense(units, use_bias=False, kernel_init=normal(self.scale), dtype=self.dtype, name="out")(x)


class Mlp(nn.Module):
    """Two matrices with a GELU between them, dtype[b, T, units] to the same. `up/kernel`, `down/kernel`."""

    scale: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        units = x.shape[-1]
        x = nn.gelu(nn.Dense(4 * units, use_bias=False, kernel_init=normal(), dtype=self.dtype, name="up")(x))
        return nn.Dense(units, use_bias=False, kernel_init=normal(self.scale), dtype=self.dtype, name="down")(x)


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a shortcut: `norm1`, `attention`, `norm2`, `mlp`."""

    heads: int
    scale: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm1, norm2 = (nn.LayerNorm(use_bias=False, dtype=self.dtype, name=f"norm{i}") for i in (1, 2))
        x = x + Attention(self.heads, self.scale, self.dtype, name="attention")(norm1(x))
        return x + Mlp(self.scale, self.dtype, name="mlp")(norm2(x))


class GPT(nn.Module):
    """Tokens i32[b, T] to logits f32[b, T, num_classes] of each next token; T is at most `context`.

    Windows of text, (tokens i32[b, T], start bool[b]), work as well: each is a separate text, and `start` is not used.

    Parameters: `embedding/embedding`, `positions/embedding`, `block01/attention/qkv/kernel`, ..., `norm/scale`, and
    `head/kernel` if the head is untied.
    """

    num_classes: int
    units: int
    layers: int
    heads: int
    context: int
    tied: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: Any, train: bool = False) -> jax.Array:
        tokens = inputs[0] if isinstance(inputs, tuple) else inputs
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"a window must have at most {self.context} tokens, the model's `context`, got {length}")
        words, places = (
            nn.Embed(count, self.units, embedding_init=normal(), dtype=self.dtype, name=name)
            for count, name in ((self.num_classes, "embedding"), (self.context, "positions"))
        )
        x = words(tokens) + places(jnp.arange(length))
        scale = (2 * self.layers) ** -0.5  # as in GPT-2: the sum of all blocks' outputs keeps its size
        for i in range(1, self.layers + 1):
            x = Block(self.heads, scale, self.dtype, name=f"block{i:02d}")(x)
        x = nn.LayerNorm(use_bias=False, dtype=self.dtype, name="norm")(x)
        if self.tied:
            return x.astype(jnp.float32) @ words.embedding.T
        return nn.Dense(self.num_classes, use_bias=False, kernel_init=normal(), name="head")(x.astype(jnp.float32))


def gpt(
    num_classes: int, *, units: int = 128, layers: int = 4, heads: int = 4, context: int = 256, tied: bool = True,
    norm: Norm = "none", dtype: Any = jnp.float32,
) -> Model:  # fmt: skip
    """A GPT for windows of up to `context` tokens; `tied`: the token embedding is also the head's matrix."""
    check_model(num_classes, norm, ("none",))
    check_positive(units=units, layers=layers, heads=heads, context=context)
    if units % heads:
        raise ValueError(f"`heads` must divide the {units} units, got {heads}")
    # the embeddings' gradients have few nonzero rows: no first layer that may go uncompressed
    last = r"^embedding/" if tied else r"^head/"
    module = GPT(num_classes, units, layers, heads, context, tied, dtype)
    return Model(module, first_layer="", last_layer=last, kind="text")
