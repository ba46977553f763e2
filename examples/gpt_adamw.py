"""A GPT of plain functions under AdamW, with the compressor as one transform of an optax chain.

    python examples/gpt_adamw.py

Shows the parts of the loop: node-local gradients, local clipping, top-k for matrices, norms uncompressed, AdamW with a
schedule and a mask for weight decay. Prints losses and bytes next to the uncompressed run.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

WIDTH, HEADS, BLOCKS, WINDOW, CHARACTERS = 64, 4, 2, 64, 128
NODES, EXAMPLES, STEPS = 8, 2, 60
METHODS = {
    "uncompressed": jgc.compress.dense(),
    "top-k, 2 %": jgc.compress.per_layer([("norm", jgc.compress.dense())], default=jgc.compress.topk(alpha=0.02)),
}


def first_params(key):
    """The parameters: matrices f32[n, m], and scales of norms f32[WIDTH]."""
    shapes = {"embed": (CHARACTERS, WIDTH), "position": (WINDOW, WIDTH), "head": (WIDTH, CHARACTERS)}
    for i in range(BLOCKS):
        shapes[f"{i}/qkv"], shapes[f"{i}/out"] = (WIDTH, 3 * WIDTH), (WIDTH, WIDTH)
        shapes[f"{i}/up"], shapes[f"{i}/down"] = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    matrices = {name: 0.05 * jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    return matrices | {f"{i}/norm{j}": jnp.ones(WIDTH) for i in range(BLOCKS) for j in (1, 2)}


def normed(x, scale):
    """x f32[..., WIDTH] with mean 0 and variance 1, times the scale."""
    return scale * jax.nn.standardize(x, epsilon=1e-6)


def gpt(params, tokens):
    """Logits of the next character, f32[b, t, CHARACTERS], from i32[b, t]."""
    x = params["embed"][tokens] + params["position"]
    for i in range(BLOCKS):
        qkv = normed(x, params[f"{i}/norm1"]) @ params[f"{i}/qkv"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params[f"{i}/out"]
        x = x + jax.nn.gelu(normed(x, params[f"{i}/norm2"]) @ params[f"{i}/up"]) @ params[f"{i}/down"]
    return x @ params["head"]


def loss(params, text):
    """The mean loss over a node's text, i32[EXAMPLES, WINDOW + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(gpt(params, text[:, :-1]), text[:, 1:]).mean()


def batch_of(step):
    """Windows of text, i32[NODES, EXAMPLES, WINDOW + 1]: different examples on each node."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)  # some text that every Python has
    text = text[text < CHARACTERS].astype(np.int32)
    starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, (NODES, EXAMPLES, 1))
    return text[starts + np.arange(WINDOW + 1)]


def make_optimizer(compressor, nodes, steps):
    """Clip each node's gradient, compress, then AdamW: transforms with a state come after the compressor."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 10, steps, 5e-4)
    decayed = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        jgc.compress.as_optax(compressor, nodes),
        optax.adamw(rate, weight_decay=0.1, mask=decayed),
    )


def train(compressor, nodes, steps=STEPS):
    """The losses of all steps, and the loss on windows that no step has used."""
    params = jgc.place(first_params(jax.random.key(0)), jgc.SHARED, nodes)
    tx = make_optimizer(compressor, nodes, steps)
    opt_state = jgc.init_optax(tx, params, nodes)
    placements = jgc.placements_of(opt_state)
    gradients = jgc.node_grads(loss, nodes, unroll=False)
    ins, outs = (jgc.LOCAL, placements, jgc.SHARED), (jgc.SHARED, placements)
    update = jgc.on_nodes(tx.update, nodes, ins, outs)

    @jax.jit
    def train_step(params, opt_state, text):
        losses, grads = gradients(params, text)  # f32[NODES], leaves [NODES, ...]
        updates, opt_state = update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    losses = []
    for step in range(steps):
        params, opt_state, value = train_step(params, opt_state, jgc.place(batch_of(step), jgc.BATCH, nodes))
        losses.append(value)
    unseen = jax.jit(loss)(params, batch_of(steps + 1).reshape(-1, WINDOW + 1))
    return [float(x) for x in losses], float(unseen)


if __name__ == "__main__":
    nodes = jgc.make_nodes(NODES)
    for name, compressor in METHODS.items():
        losses, unseen = train(compressor, nodes)
        (sent,) = jgc.bytes_per_step(compressor, first_params(jax.random.key(0)), nodes).values()
        print(f"{name:12} loss {losses[0]:.3f} to {losses[-1]:.3f}, unseen {unseen:.3f}, {sent.node:,.0f} bytes a step")
