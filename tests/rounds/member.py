"""A node of test_processes: local steps of SGD on batches that follow from node and round, written down.

Usage: member.py BUCKET NODE COUNT ROUNDS OUTPUT
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc
import jgc.rounds

EVERY, BATCH = 5, 8
INNER, RATE, MOMENTUM = 0.05, 0.7, 0.6


def compressor():
    return jgc.compress.topk(alpha=0.25, strategy="fixed")


def params():
    draw = np.random.default_rng(0)
    return {"w": jnp.asarray(draw.normal(size=(16, 8)), jnp.float32), "b": jnp.zeros(8)}


def batch(node, step):
    """f32[BATCH, 16]; the same on every machine."""
    draw = np.random.Generator(np.random.PCG64([node, step])).integers(-(2**20), 2**20, (BATCH, 16))
    return jnp.asarray(draw / 2**20, jnp.float32)


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - jnp.sin(3 * x[:, :8])) ** 2)


@jax.jit
def local_step(theta, x):
    return jax.tree.map(lambda p, g: p - INNER * g, theta, jax.grad(loss)(theta, x))


def as_local_steps(count, rounds):
    """The parameters after as many rounds of `jgc.local_steps` in one process."""
    local = jgc.local_steps(
        optax.sgd(INNER), optax.sgd(RATE, momentum=MOMENTUM, nesterov=True), compressor(), every=EVERY,
        nodes=jgc.make_nodes(count, jax.devices()[:1]),
    )  # fmt: skip
    init, step = local.make_step(loss)
    state = init(jax.random.key(0), params())
    for i in range(rounds * EVERY):
        state, _ = step(state, jnp.stack([batch(k, i) for k in range(count)]))
    return state.params


def main(bucket, name, count, rounds, output):
    count, rounds = int(count), int(rounds)
    local_step(params(), batch(0, 0))
    run = jgc.rounds.join(
        bucket, node=name, params=params(), compressor=compressor(), quorum=count, grace=300.0,
        outer=jgc.rounds.Sgd(RATE, MOMENTUM), settings={"every": EVERY},
    )  # fmt: skip
    theta, lines, began = run.params, [], time.monotonic()
    while run.number < rounds:
        for i in range(EVERY):
            theta = local_step(theta, batch(int(name[1:]), run.number * EVERY + i))
        theta, outcome = run.exchange(theta, tokens=EVERY * BATCH)
        lines.append([outcome.round, outcome.digest, outcome.counted, len(outcome.members)])
    counts, seconds = run.bucket.counts, time.monotonic() - began
    run.leave()
    facts = {"jax": jax.__version__, "python": sys.version.split()[0], "seconds": seconds, **counts._asdict()}
    with open(output, "w") as file:
        json.dump({"rounds": lines, "theta": {k: np.asarray(x).tolist() for k, x in theta.items()}, **facts}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
