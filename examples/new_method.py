"""A new compression method in one file: "turns" sends every s-th value in turn and keeps the rest.

    python examples/new_method.py

A method is a function that runs on one node, and a list of its messages; `from_step` adds packing, the residual, the
skipped step and the byte count. Prints losses next to `dense`, bytes, and that no gradient is lost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc
from jgc import comm
from jgc.layout.pack import values_of
from jgc.method import Step, from_step
from jgc.method.memory import error_feedback
from jgc.method.messages import both_ways
from jgc.method.phases import single


def turns(every=8):
    """Step t sends the values at positions t, t + every, t + 2 every ... by one all-reduce.

    Example:
      >>> turns(4).schedule[0].name
      'turns'
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")

    def init(key, layers, nodes):
        return jnp.int32(0), ()  # shared by all nodes: the turn; no state per node

    def step(phase, key, v, state, layers, nodes):  # v: f32[n], this node's gradient plus residual
        turn = state.shared
        rows = jnp.pad(v, (0, -v.size % every)).reshape(-1, every)
        column = jnp.arange(every) == turn
        mean = comm.pmean(rows[:, turn], nodes, "values")  # f32[n / every]: the only message
        mean, sent = (jnp.where(column, x, 0).reshape(-1)[: v.size] for x in (mean[:, None], rows))
        return Step(mean, sent, shared=(turn + 1) % every, elements=len(rows))

    def messages(phase, layers, nodes):
        return both_ways({"values": 4.0 * -(-values_of(layers) // every)})

    return from_step(step, init=init, memory=error_feedback(), messages=messages, schedule=single("turns"))


# --- use it -------------------------------------------------------------------------------------------------------

NODES, STEPS = 8, 120


def loss(params, batch):
    """Mean squared error of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def batch_of(step):
    """Examples of a function to learn, leading axes [NODES, 16]."""
    x = np.random.default_rng(step).normal(size=(NODES, 16, 10)).astype(np.float32)
    return {"x": x, "y": np.sin(x[..., :4] + x[..., 4:8])}


def train(compressor, nodes, steps=STEPS):
    """The losses, and the state after the last step."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "in": 0.3 * jax.random.normal(keys[0], (10, 64)),
        "bias": jnp.zeros(64),
        "out": 0.1 * jax.random.normal(keys[1], (64, 4)),
    }
    init, step = jgc.make_step(loss, compressor, optax.sgd(0.2), nodes)
    state, losses = init(jax.random.key(1), params), []
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
        losses.append(metrics.loss)
    return [float(x) for x in losses], state


def check_conservation(compressor, nodes):
    """The largest difference between the sum of all gradients and the sum of aggregates and residuals."""
    params, random = {"w": jnp.zeros((7, 5))}, np.random.default_rng(0)
    phase, placement = compressor.schedule[0].value, jgc.State(jgc.SHARED, jgc.LOCAL)
    state = jgc.place(compressor.init(jax.random.key(0), params, nodes), placement, nodes)
    aggregate = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, phase, nodes))
    incoming = outgoing = 0.0
    for i in range(20):
        grads = {"w": random.normal(size=(NODES, 7, 5)).astype(np.float32)}
        mean, state, _ = aggregate(jax.random.key(i), jgc.place(grads, jgc.LOCAL, nodes), state)
        incoming, outgoing = incoming + grads["w"].mean(0), outgoing + np.asarray(mean["w"])
    residual = np.asarray(state.local.memory).mean(0).reshape(7, 5)
    return float(np.abs(incoming - outgoing - residual).max())


if __name__ == "__main__":
    nodes = jgc.make_nodes(NODES)
    for name, compressor in {"dense": jgc.compress.dense(), "turns, 4": turns(4), "turns, 8": turns()}.items():
        losses, state = train(compressor, nodes)
        (sent,) = jgc.bytes_per_step(compressor, state.params, nodes).values()
        print(f"{name:10} loss {np.mean(losses[-10:]):.4f}, {sent.node:6,.0f} bytes a step")
    print(f"gradients lost: {check_conservation(turns(), nodes):.1e}")
