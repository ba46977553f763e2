"""A GPT in Flax NNX, trained with AdamW on eight nodes that send 2 % of their gradients.

    python examples/gpt_nnx.py

The nodes share the available devices. Prints losses and bytes. gpt_linen.py and gpt_equinox.py train the same GPT:
weights are drawn by name, so all three start equal and reach the same loss.
"""

import argparse
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgc

WIDTH, HEADS, BLOCKS, WINDOW, CHARACTERS = 64, 4, 2, 64, 128
NODES, EXAMPLES, STEPS = 8, 2, 60


def drawn(name):
    """An initialiser that depends only on the name."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return lambda key, shape, dtype=jnp.float32, **other: jnp.asarray(0.05 * random.normal(size=shape), dtype)


class Block(nnx.Module):
    """Attention, then a layer of neurons."""

    def __init__(self, number, rngs):
        def linear(name, n, m):
            return nnx.Linear(n, m, use_bias=False, kernel_init=drawn(f"{name}{number}"), rngs=rngs)

        def norm():
            return nnx.LayerNorm(WIDTH, epsilon=1e-6, use_bias=False, use_fast_variance=False, rngs=rngs)

        self.norm1, self.qkv, self.out = norm(), linear("qkv", WIDTH, 3 * WIDTH), linear("out", WIDTH, WIDTH)
        self.norm2, self.up, self.down = norm(), linear("up", WIDTH, 4 * WIDTH), linear("down", 4 * WIDTH, WIDTH)

    def __call__(self, x):  # f32[b, t, WIDTH]
        qkv = self.qkv(self.norm1(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Logits of the next character, f32[b, t, CHARACTERS]."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(CHARACTERS, WIDTH, embedding_init=drawn("embed"), rngs=rngs)
        self.position = nnx.Param(drawn("position")(None, (WINDOW, WIDTH)))
        self.blocks = nnx.List([Block(number, rngs) for number in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, CHARACTERS, use_bias=False, kernel_init=drawn("head"), rngs=rngs)

    def __call__(self, tokens):  # i32[b, t]
        x = self.embed(tokens) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(steps):
    """Windows of text, i32[NODES, EXAMPLES, WINDOW + 1]: different examples on each node."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)  # some text that every Python has
    text = text[text < CHARACTERS].astype(np.int32)
    for step in range(steps):
        starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, (NODES, EXAMPLES, 1))
        yield text[starts + np.arange(WINDOW + 1)]


def train(nodes, steps=STEPS):
    """The loss of every step."""
    graph, params, rest = nnx.split(GPT(nnx.Rngs(0)), nnx.Param, ...)  # only the parameters are trained and compressed

    def loss(params, text):  # of one node: text i32[EXAMPLES, WINDOW + 1]
        logits = nnx.merge(graph, params, rest)(text[:, :-1])
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
