"""A GPT in Equinox, trained with AdamW on eight nodes that send 2 % of their gradients.

    pip install equinox && python examples/gpt_equinox.py

The nodes share the available devices. Prints losses and bytes. gpt_linen.py and gpt_nnx.py train the same GPT:
weights are drawn by name, so all three start equal and reach the same loss.
"""

import argparse
import zlib
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

WIDTH, HEADS, BLOCKS, WINDOW, CHARACTERS = 64, 4, 2, 64, 128
NODES, EXAMPLES, STEPS = 8, 2, 60


def drawn(name, *shape):
    """Random weights that depend only on the name."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return jnp.asarray(0.05 * random.normal(size=shape), jnp.float32)


class Block(eqx.Module):
    """Attention, then a layer of neurons."""

    norm1: eqx.nn.LayerNorm
    qkv: jax.Array
    out: jax.Array
    norm2: eqx.nn.LayerNorm
    up: jax.Array
    down: jax.Array
    activation: Callable

    def __init__(self, number):
        self.norm1, self.norm2 = (eqx.nn.LayerNorm(WIDTH, eps=1e-6, use_bias=False) for _ in range(2))
        self.qkv, self.out = drawn(f"qkv{number}", WIDTH, 3 * WIDTH), drawn(f"out{number}", WIDTH, WIDTH)
        self.up, self.down = drawn(f"up{number}", WIDTH, 4 * WIDTH), drawn(f"down{number}", 4 * WIDTH, WIDTH)
        self.activation = jax.nn.gelu  # a leaf that is not an array

    def __call__(self, x):  # f32[t, WIDTH]
        qkv = jax.vmap(self.norm1)(x) @ self.qkv
        q, k, v = jnp.split(qkv.reshape(len(x), 3 * HEADS, -1), 3, axis=1)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ self.out
        return x + self.activation(jax.vmap(self.norm2)(x) @ self.up) @ self.down


class GPT(eqx.Module):
    """Logits of the next character, f32[t, CHARACTERS]."""

    embed: jax.Array
    position: jax.Array
    blocks: list[Block]
    head: jax.Array

    def __init__(self):
        self.embed, self.position = drawn("embed", CHARACTERS, WIDTH), drawn("position", WINDOW, WIDTH)
        self.blocks, self.head = [Block(number) for number in range(BLOCKS)], drawn("head", WIDTH, CHARACTERS)

    def __call__(self, tokens):  # i32[t]
        x = self.embed[tokens] + self.position
        for block in self.blocks:
            x = block(x)
        return x @ self.head


def batches(steps):
    """Windows of text, i32[NODES, EXAMPLES, WINDOW + 1]: different examples on each node."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)  # some text that every Python has
    text = text[text < CHARACTERS].astype(np.int32)
    for step in range(steps):
        starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, (NODES, EXAMPLES, 1))
        yield text[starts + np.arange(WINDOW + 1)]


def train(nodes, steps=STEPS):
    """The loss of every step."""
    params, static = eqx.partition(GPT(), eqx.is_inexact_array)  # jgc and optax take only the arrays

    def loss(params, text):  # of one node: text i32[EXAMPLES, WINDOW + 1]
        logits = jax.vmap(eqx.combine(params, static))(text[:, :-1])
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
