"""A GPT in Flax linen, trained with AdamW on eight nodes that send 2 % of their gradients.

    python examples/gpt_linen.py

The nodes share the available devices. Prints losses and bytes. gpt_nnx.py and gpt_equinox.py train the same GPT:
weights are drawn by name, so all three start equal and reach the same loss.
"""

import argparse
import zlib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

WIDTH, HEADS, BLOCKS, WINDOW, CHARACTERS = 64, 4, 2, 64, 128
NODES, EXAMPLES, STEPS = 8, 2, 60


def drawn(name):
    """An initialiser that depends only on the name."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return lambda key, shape, dtype=jnp.float32: jnp.asarray(0.05 * random.normal(size=shape), dtype)


class Block(nn.Module):
    """Attention, then a layer of neurons."""

    number: int

    @nn.compact
    def __call__(self, x):  # f32[b, t, WIDTH]
        def dense(name, size):
            return nn.Dense(size, use_bias=False, kernel_init=drawn(f"{name}{self.number}"), name=name)

        def norm(name):
            return nn.LayerNorm(1e-6, use_bias=False, use_fast_variance=False, name=name)

        qkv = dense("qkv", 3 * WIDTH)(norm("norm1")(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + dense("out", WIDTH)(attended)
        return x + dense("down", WIDTH)(nn.gelu(dense("up", 4 * WIDTH)(norm("norm2")(x))))


class GPT(nn.Module):
    """Logits of the next character, f32[b, t, CHARACTERS]."""

    @nn.compact
    def __call__(self, tokens):  # i32[b, t]
        x = nn.Embed(CHARACTERS, WIDTH, embedding_init=drawn("embed"), name="embed")(tokens)
        x = x + self.param("position", drawn("position"), (WINDOW, WIDTH))
        for number in range(BLOCKS):
            x = Block(number)(x)
        return nn.Dense(CHARACTERS, use_bias=False, kernel_init=drawn("head"), name="head")(x)


def batches(steps):
    """Windows of text, i32[NODES, EXAMPLES, WINDOW + 1]: different examples on each node."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)  # some text that every Python has
    text = text[text < CHARACTERS].astype(np.int32)
    for step in range(steps):
        starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, (NODES, EXAMPLES, 1))
        yield text[starts + np.arange(WINDOW + 1)]


def train(nodes, steps=STEPS):
    """The loss of every step."""
    model = GPT()
    params = model.init(jax.random.key(0), jnp.zeros((1, WINDOW), jnp.int32))["params"]

    def loss(params, text):  # of one node: text i32[EXAMPLES, WINDOW + 1]
        logits = model.apply({"params": params}, text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    compressor = jgc.compress.topk(alpha=0.02)
    init, step = jgc.make_step(loss, compressor, optax.adamw(3e-3), nodes, unroll=False)
    state, losses = init(jax.random.key(0), params), []
    for text in batches(steps):
        state, metrics = step(state, text)
        losses.append(metrics.loss)  # still on the device: reading it would wait for the step
        if len(losses) % 20 == 0:
            print(f"step {len(losses):3}  loss {metrics.loss:.4f}")
    sent = jgc.bytes_per_step(compressor, params, nodes)["top-k"]
    print(f"a node sends {sent.node:,.0f} bytes a step, {sent.uncompressed:,.0f} uncompressed")
    return [float(x) for x in losses]


if __name__ == "__main__":
    train(jgc.make_nodes(NODES))
