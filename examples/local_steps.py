"""Exchange every 10 steps: a small GPT under AdamW, by DiLoCo and by SparseLoCo, and exchanging in every step.

    python examples/local_steps.py

Every node takes 10 steps of AdamW, which send nothing. Then the nodes aggregate their progress, by any method, and an
outer optimiser moves the shared parameters. Prints losses on unseen text, and bytes.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

WIDTH, HEADS, BLOCKS, WINDOW, CHARACTERS = 64, 4, 2, 64, 128
NODES, EXAMPLES, STEPS, EVERY = 4, 2, 60, 10
SPARSE = jgc.compress.topk(alpha=1 / 64, value_code="2bit-codebook", residual_decay=0.95)
METHODS = {  # the outer optimiser, and the method of the exchange
    "DiLoCo": (optax.sgd(0.7, momentum=0.9, nesterov=True), jgc.compress.dense()),
    "SparseLoCo": (optax.sgd(1.0), SPARSE),
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


def loss(params, text):
    """The mean loss of the next character over a node's text, i32[EXAMPLES, WINDOW + 1]."""
    x = params["embed"][text[:, :-1]] + params["position"]
    for i in range(BLOCKS):
        qkv = normed(x, params[f"{i}/norm1"]) @ params[f"{i}/qkv"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params[f"{i}/out"]
        x = x + jax.nn.gelu(normed(x, params[f"{i}/norm2"]) @ params[f"{i}/up"]) @ params[f"{i}/down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], text[:, 1:]).mean()


def batch_of(step, unseen=False):
    """Windows of text, i32[NODES, EXAMPLES, WINDOW + 1]: different examples on each node. The last tenth is unseen."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)  # some text that every Python has
    text = text[text < CHARACTERS].astype(np.int32)
    text = text[len(text) * 9 // 10 :] if unseen else text[: len(text) * 9 // 10]
    starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, (NODES, EXAMPLES, 1))
    return text[starts + np.arange(WINDOW + 1)]


def adamw(steps):
    """AdamW after clipping, with a warm-up and a cosine: the optimiser of every step, or the inner one of each node."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 10, steps, 5e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))


def train(init, step, steps=STEPS):
    """The state after some steps, and the loss on unseen text."""
    state = init(jax.random.key(1), first_params(jax.random.key(0)))
    for i in range(steps):
        state, _ = step(state, batch_of(i))
    unseen = batch_of(0, unseen=True).reshape(-1, WINDOW + 1)
    return state, float(jax.jit(loss)(jax.device_get(state.params), unseen))


def local_steps(name, nodes, every=EVERY, steps=STEPS):
    """A method of `METHODS` with AdamW inside."""
    outer, compressor = METHODS[name]
    return jgc.local_steps(adamw(steps), outer, compressor, every, nodes)


if __name__ == "__main__":
    nodes, params = jgc.make_nodes(NODES), first_params(jax.random.key(0))
    before = float(jax.jit(loss)(params, batch_of(0, unseen=True).reshape(-1, WINDOW + 1)))
    _, after = train(*jgc.make_step(loss, jgc.compress.dense(), adamw(STEPS), nodes, unroll=False))
    (sent,) = jgc.bytes_per_step(jgc.compress.dense(), params, nodes).values()
    print(f"{'every step':10} loss {before:.3f} to {after:.3f}, {sent.node:9,.0f} bytes a step of each node")
    for name in METHODS:
        local = local_steps(name, nodes)
        _, after = train(*local.make_step(loss, unroll=False))
        (sent,) = local.bytes_per_round(params).values()
        print(f"{name:10} loss {before:.3f} to {after:.3f}, {sent.node / EVERY:9,.0f} bytes a step of each node")
