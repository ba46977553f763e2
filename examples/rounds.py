"""A loop with AdamW; its nodes meet in a bucket or a folder. Start it several times, with different names:

    python examples/rounds.py bucket a &
    python examples/rounds.py bucket b

Kill one and start it again: the other waits once, and the killed node comes back with its residual.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jgc
import jgc.rounds

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("bucket", help="s3://..., gs://..., az://... or a folder")
parser.add_argument("node", help="this node's name")
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--steps", type=int, default=10, help="local steps a round")
parser.add_argument("--quorum", type=int, default=2)
args = parser.parse_args()


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(64)(x)))


def loss(params, x, y):
    return jnp.mean((Model().apply(params, x)[:, 0] - y) ** 2)


@jax.jit
def step(params, state, key):
    x = jax.random.normal(key, (32, 8))
    error, grads = jax.value_and_grad(loss)(params, x, jnp.sin(x).sum(1))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, error


optimizer = optax.adamw(3e-3)
params = Model().init(jax.random.key(0), jnp.zeros((1, 8)))
state = optimizer.init(params)
key = jax.random.key(sum(args.node.encode()))  # every node draws different batches
step(params, state, key)  # compile before joining: from then on the others wait for this node

rounds = jgc.rounds.join(
    args.bucket, node=args.node, params=params, compressor=jgc.compress.topk(alpha=0.1, strategy="fixed"),
    outer=jgc.rounds.Sgd(1.0, momentum=0.0), quorum=args.quorum, total=args.rounds, grace=20,
    folder=f"{args.bucket}-disks" if "://" not in args.bucket else "rounds-disks", settings={"every": args.steps},
)  # fmt: skip
params = rounds.params
while rounds.number < args.rounds:
    for i in range(args.steps):
        params, state, error = step(params, state, jax.random.fold_in(key, rounds.number * args.steps + i))
    params, outcome = rounds.exchange(params, tokens=32 * args.steps)
    print(f"round {outcome.round}: loss {error:.4f}, members {' '.join(outcome.members)}, "
          f"{'counted' if outcome.counted else outcome.reason}, {outcome.digest[:12]}", flush=True)  # fmt: skip
rounds.leave()
counts = rounds.bucket.counts
print(f"bytes up {counts.up:,}, down {counts.down:,}; requests {sum(counts[:4])}")
