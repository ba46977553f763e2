"""One loop in several processes, one on each host.

    python examples/several_hosts.py                    # the same run in one process
    python examples/several_hosts.py host-a:5555 2 0    # on host-a, which the others connect to
    python examples/several_hosts.py host-a:5555 2 1    # on host-b

Every process runs the same program, and makes only the batches of its nodes. Gradients are compressed between the
processes, and all processes hold the same parameters, bit for bit. Process 0 prints.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

NODES, EXAMPLES, STEPS = 4, 32, 60
COMPRESSOR = jgc.compress.topk(alpha=0.25)


def loss(params, batch):
    """A node's mean loss over its examples."""
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def examples_of(node, step):
    """The batch of one node; each node has different data."""
    x = np.random.default_rng((step, node)).normal(size=(EXAMPLES, 16)).astype("float32")
    return {"x": x, "y": x.sum(-1, keepdims=True)}


def batch_of(step, nodes):
    """Leaves f32[NODES, EXAMPLES, ...] on the devices of all processes; this process makes only its part."""

    def part(of):
        parts = [examples_of(node, step) for node in range(*of.indices(NODES))]  # `of` is a slice of the nodes
        return jax.tree.map(lambda *x: np.stack(x), *parts)

    return jgc.place_parts(part, nodes)


def train(nodes):
    """The state after all steps, and each step's loss, the mean over all nodes."""
    init, step = jgc.make_step(loss, COMPRESSOR, optax.adam(0.1), nodes)
    state = init(jax.random.key(0), {"w": jnp.zeros((16, 1))})  # the same key and parameters in all processes
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, batch_of(i, nodes))
        losses.append(float(metrics.loss))
    return state, losses


def main():
    """Connect, train, print."""
    words = argparse.ArgumentParser()
    words.add_argument("coordinator", nargs="?", help="HOST:PORT of process 0")
    words.add_argument("processes", nargs="?", type=int, default=1, help="how many there are")
    words.add_argument("process", nargs="?", type=int, default=0, help="which of them this is")
    asked = words.parse_args()
    if asked.coordinator:  # before anything else of JAX; on CPU the collectives are Gloo's, which is JAX's default
        jax.distributed.initialize(asked.coordinator, asked.processes, asked.process)
    nodes = jgc.make_nodes(NODES)
    state, losses = train(nodes)
    sent = jgc.bytes_per_step(COMPRESSOR, state.params, nodes)
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes: loss {losses[0]:.3f} to {losses[-1]:.5f}")
        print("bytes of a step:", *sent.values())


if __name__ == "__main__":
    main()
