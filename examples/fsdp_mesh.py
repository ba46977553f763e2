"""FSDP inside two hosts, compression between them: a GPT on a mesh of 2 x 4 devices.

    python examples/fsdp_mesh.py

Every matrix is sharded over the four devices of a host. Each device compresses the gradient of its shards and
exchanges it with the corresponding device of the other host. Parameters, AdamW's state and residuals stay sharded.
Prints losses, bytes and shares of memory.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # where there are no eight devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import jgc

WIDTH, HEADS, BLOCKS, WINDOW, CHARACTERS = 64, 4, 2, 64, 128
HOSTS, CHIPS, EXAMPLES, STEPS = 2, 4, 4, 40


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
    """The mean loss over a host's text, i32[EXAMPLES, WINDOW + 1]. Written as for one device."""
    return optax.softmax_cross_entropy_with_integer_labels(gpt(params, text[:, :-1]), text[:, 1:]).mean()


def batch_of(step):
    """Windows of text, i32[HOSTS, EXAMPLES, WINDOW + 1]."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)  # some text that every Python has
    text = text[text < CHARACTERS].astype(np.int32)
    starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, (HOSTS, EXAMPLES, 1))
    return text[starts + np.arange(WINDOW + 1)]


def divided(params, mesh):
    """The parameters with their first dimension sharded over the chips of a host; vectors whole."""
    of = lambda x: NamedSharding(mesh, P("chip") if x.ndim > 1 else P())  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, of(x)), params)


def share(tree):
    """The share of a tree's bytes that one device holds."""
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    return held / sum(x.nbytes for x in jax.tree.leaves(tree))


def train(sharded=True, steps=STEPS):
    """The losses, and the state after the last step."""
    mesh = jax.make_mesh((HOSTS, CHIPS), ("host", "chip"))
    nodes = jgc.from_mesh(mesh, slow="host", fast="chip")
    params = first_params(jax.random.key(0))
    params = divided(params, mesh) if sharded else params
    compressor = jgc.compress.topk(alpha=0.05)
    init, step = jgc.make_step(loss, compressor, optax.adamw(3e-3), nodes)
    state, losses = init(jax.random.key(1), params), []
    (sent,) = jgc.bytes_per_step(compressor, state.params, nodes).values()
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
        losses.append(metrics.loss)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; a device sends {sent.device:,.0f} bytes, a host {sent.node:,.0f}")
    return [float(x) for x in losses], state


if __name__ == "__main__":
    for sharded in (False, True):
        print("parameters sharded inside a host" if sharded else "parameters whole on every device", end=": ")
        losses, state = train(sharded)
        parts = {"parameters": state.params, "AdamW": state.opt_state[0].mu, "residuals": state.compressor.local}
        print("  one device holds", ", ".join(f"{100 * share(x):.1f} % of all {name}" for name, x in parts.items()))
