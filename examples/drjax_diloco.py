"""A local-step trainer in drjax, such as MaxText's DiLoCo, with its mean over replicas compressed by jgc.

    pip install drjax && python examples/drjax_diloco.py

Each replica takes 10 steps of AdamW. `drjax.reduce_mean`, or jgc with its state, then gives the mean of
their progress, and an outer optimiser applies it. docs/drjax.md has the lines that change.
"""

import argparse
from typing import Any, NamedTuple

import drjax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

REPLICAS, EXAMPLES, WINDOW, CHARACTERS, STEPS, EVERY = 4, 64, 12, 128, 300, 10
INNER, OUTER = optax.adamw(3e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)


class Model(nn.Module):
    @nn.compact
    def __call__(self, text):  # the last WINDOW characters -> logits of the next
        x = nn.Embed(CHARACTERS, 32)(text).reshape(len(text), -1)
        return nn.Dense(CHARACTERS)(nn.gelu(nn.Dense(256)(x)))


class TrainState(NamedTuple):
    step: jax.Array
    params: Any  # shared
    outer: Any
    replica_params: Any  # [REPLICAS, ...]
    inner: Any  # [REPLICAS, ...]
    compression: Any  # jgc's state: residuals, [REPLICAS, ...]; () without compression


def loss(params, text):
    """The mean loss over a replica's windows, i32[EXAMPLES, WINDOW + 1]."""
    logits = Model().apply(params, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, -1]).mean()


def inner_step(params, inner, text):
    value, grads = jax.value_and_grad(loss)(params, text)
    updates, inner = INNER.update(grads, inner, params)
    return optax.apply_updates(params, updates), inner, value


def make_trainer(compressor, nodes):
    """`init(key)` and `train_step(state, text)`; by `drjax.reduce_mean` if there is no compressor."""
    if compressor is not None:
        if compressor.next_phase is not None:  # powersgd(alternate=True), gradiveq
            raise ValueError("the method finds its phases during the run: one compiled function cannot follow it")
        compressed_mean = jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes)

    @drjax.program(placements={"replicas": REPLICAS})
    def init(key):
        params, compression = Model().init(key, jnp.zeros((1, WINDOW), jnp.int32)), ()
        if compressor is not None:
            compression = jgc.place(compressor.init(key, params, nodes), jgc.State("shared", "local"), nodes)
        replicas = drjax.broadcast((params, INNER.init(params)))
        return TrainState(jnp.array(0), params, OUTER.init(params), *replicas, compression)

    def synchronize(state):
        moved = jax.tree.map(jnp.subtract, drjax.broadcast(state.params), state.replica_params)
        if compressor is None:
            mean, compression, finite = drjax.reduce_mean(moved), (), True
        else:
            mean, compression, info = compressed_mean(jax.random.key(state.step), moved, state.compression)
            finite = info.finite.all()
        updates, outer = OUTER.update(mean, state.outer, state.params)
        params = optax.apply_updates(state.params, updates)
        after = TrainState(state.step, params, outer, drjax.broadcast(params), state.inner, compression)
        replicas = drjax.broadcast((state.params, INNER.init(state.params)))
        again = TrainState(state.step, state.params, state.outer, *replicas, compression)  # a replica has diverged
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), after, again)

    @drjax.program(placements={"replicas": REPLICAS})
    def train_step(state, text):
        params, inner, losses = drjax.map_fn(inner_step, (state.replica_params, state.inner, text))
        state = state._replace(step=state.step + 1, replica_params=params, inner=inner)
        return jax.lax.cond(state.step % EVERY == 0, synchronize, lambda x: x, state), drjax.reduce_mean(losses)

    return init, jax.jit(train_step, donate_argnums=0)


def batch_of(step, unseen=False):
    """Windows of text, i32[REPLICAS, EXAMPLES, WINDOW + 1]. The last tenth of the text is unseen."""
    text = np.fromfile(argparse.__file__, np.uint8)  # some text that every Python has
    text = text[text < CHARACTERS].astype(np.int32)
    text = text[len(text) * 9 // 10 :] if unseen else text[: len(text) * 9 // 10]
    starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, (REPLICAS, EXAMPLES, 1))
    return text[starts + np.arange(WINDOW + 1)]


def train(compressor, steps=STEPS):
    """The losses, the last one on unseen text, and the bytes that a replica sends in an exchange."""
    places = REPLICAS if len(jax.devices()) >= REPLICAS else 1  # a replica on each device, or all on the first
    mesh = jax.make_mesh((places,), ("replicas",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:places])
    nodes = jgc.from_mesh(mesh, slow="replicas", per_device=REPLICAS // places)
    with jax.set_mesh(mesh):
        init, train_step = make_trainer(compressor, nodes)
        state, losses = init(jax.random.key(0)), []
        for i in range(steps):
            state, value = train_step(state, batch_of(i))
            losses.append(float(value))
    (sent,) = jgc.bytes_per_step(compressor or jgc.compress.dense(), state.params, nodes).values()
    unseen = batch_of(0, unseen=True).reshape(-1, WINDOW + 1)
    return [*losses, float(jax.jit(loss)(jax.device_get(state.params), unseen))], sent.node


if __name__ == "__main__":
    four_bits = jgc.compress.cast(format="mxfp4", error_feedback=True)
    for name, compressor in {"drjax.reduce_mean": None, "jgc, 4 bits": four_bits}.items():
        losses, sent = train(compressor)
        print(f"{name:17} loss {losses[0]:.3f} to {losses[-1]:.3f}, {sent:7,.0f} bytes of a replica in {EVERY} steps")
