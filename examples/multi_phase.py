"""A method with phases: GradiVeQ sends everything, then samples gradients, then sends them in principal components.

    python examples/multi_phase.py

It finds its phases during the run, because the number of components follows from the samples. `make_step` looks up the
phase of each step, calls the transition (which computes the components), and compiles one program per phase.
Prints the phases as they come. `run_by_hand` is the same loop from public parts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

NODES, STEPS = 4, 60
COMPRESSOR = jgc.compress.gradiveq(warmup_steps=10, sampling_steps=10, compressed_steps=20, loss=0.1)


def first_params():
    """Two convolutions and a dense layer."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "first": 0.3 * jax.random.normal(keys[0], (3, 3, 1, 16)),
        "second": 0.1 * jax.random.normal(keys[1], (3, 3, 16, 16)),
        "head": {"kernel": 0.1 * jax.random.normal(keys[2], (16, 4)), "bias": jnp.zeros(4)},
    }


def loss(params, batch):
    """A node's mean cross-entropy."""
    x = batch["image"]  # f32[b, 8, 8, 1]
    for name in ("first", "second"):
        x = jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    logits = x.max(axis=(1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def batch_of(step):
    """Noisy waves in one of four directions, leading axes [NODES, 16]."""
    random = np.random.default_rng(step)
    label = random.integers(0, 4, (NODES, 16))
    down, right = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    waves = np.stack([np.sin(a * down + b * right) for a, b in ((2, 0), (0, 2), (1.4, 1.4), (1.4, -1.4))])
    image = waves[label] + random.normal(size=(NODES, 16, 8, 8))
    return {"image": image[..., None].astype(np.float32), "label": label.astype(np.int32)}


def run(nodes, steps=STEPS):
    """The loss of every step, with `make_step`."""
    init, step = jgc.make_step(loss, COMPRESSOR, optax.adam(1e-2), nodes)
    state, losses = init(jax.random.key(1), first_params()), []
    for i in range(steps):
        before = state.phase
        state, metrics = step(state, batch_of(i))
        losses.append(metrics.loss)
        if i == 0 or state.phase.value != before.value:
            sent = float(metrics.info.elements_sent)
            print(f"step {i:3}: phase {state.phase.name!r}, {sent:.0f} values a node, loss {metrics.loss:.4f}")
    return [float(x) for x in losses]


def run_by_hand(nodes, steps=STEPS):
    """The same from public parts, for loops that do something in between."""
    optimizer, key, placement = optax.adam(1e-2), jax.random.key(1), jgc.State(jgc.SHARED, jgc.LOCAL)
    params = jgc.place(first_params(), jgc.SHARED, nodes)
    opt_state = jgc.place(optimizer.init(params), jgc.SHARED, nodes)
    state = jgc.place(COMPRESSOR.init(key, params, nodes), placement, nodes)
    gradients, update = jax.jit(jgc.node_grads(loss, nodes)), jax.jit(optimizer.update)
    phase, programs, losses = jgc.phase_at(COMPRESSOR.schedule, 0), {}, []
    for i in range(steps):
        before, phase = phase, jgc.phase_after(COMPRESSOR, phase, i, state, nodes)
        if phase.value != before.value:
            state = jgc.place(COMPRESSOR.transition(before.value, phase.value, state, nodes), placement, nodes)
        if phase.value not in programs:
            programs[phase.value] = jax.jit(jgc.compress.step_on_nodes(COMPRESSOR.aggregate, phase.value, nodes))
        values, grads = gradients(params, jgc.place(batch_of(i), jgc.BATCH, nodes))  # [NODES], [NODES, ...]
        mean, state, _ = programs[phase.value](jax.random.fold_in(key, i), grads, state)
        updates, opt_state = update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(values.mean()))
    return losses


if __name__ == "__main__":
    nodes = jgc.make_nodes(NODES)
    for name, sent in jgc.bytes_per_step(COMPRESSOR, first_params(), nodes).items():
        print(f"{name:10} at most {sent.node:6,.0f} bytes a node and step, {sent.uncompressed:,.0f} uncompressed")
    losses = run(nodes)
    print(f"step {STEPS:3}: loss {losses[-1]:.4f}")
