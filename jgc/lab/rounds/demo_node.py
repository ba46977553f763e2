"""A node of `jgc rounds demo`: a small network on digits, AdamW inside, in a loop of `jgc.rounds`.

Prints a line of JSON for each round. Goes on until the file `last` in its folder names the last round.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

import jgc.rounds
from jgc import compress
from jgc.training.data import load_digits

STEPS, EXAMPLES = 20, 32  # of a round
PAUSE = 0.02  # seconds after a step, so that rounds last long enough to be looked at
QUORUM, GRACE = 2, 3.0


class Network(nn.Module):
    """One hidden layer."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


def loss(params: Any, x: Any, labels: Any) -> Any:
    """The mean cross-entropy."""
    logits = Network().apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(folder: Path, node: str, nodes: int) -> None:
    """Take part until the last round."""
    digits = load_digits()
    images, labels = np.asarray(digits.train_images, np.float32) / 16, digits.train_labels
    optimizer = optax.adamw(3e-3)

    @jax.jit
    def step(params, state, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = Network().init(jax.random.key(0), images[:1])
    state = optimizer.init(params)
    step(params, state, images[:EXAMPLES], labels[:EXAMPLES])  # compile before joining
    rounds = jgc.rounds.join(
        folder / "bucket", node=node, params=params, folder=folder / f"disk-{node}", quorum=QUORUM, start=nodes,
        grace=GRACE, checkpoint_every=5, outer=jgc.rounds.Sgd(1.0, momentum=0.0), settings={"steps": STEPS},
        compressor=compress.topk(alpha=0.1, strategy="fixed", value_code="2bit"),
    )  # fmt: skip
    counts = rounds.bucket.counts
    resumed = any(x.any() for x in rounds.member.memory.values())  # a residual from its disk
    say(joined=rounds.number, requests=sum(counts[:4]), down=counts.down, resumed=resumed)
    params, last = rounds.params, folder / "last"
    while not last.exists() or rounds.number < int(last.read_text()):
        dice = np.random.default_rng([rounds.number, *node.encode()])
        for _ in range(STEPS):
            batch = dice.integers(0, len(labels), EXAMPLES)
            params, state, value = step(params, state, images[batch], labels[batch])
            time.sleep(PAUSE)
        params, outcome = rounds.exchange(params, tokens=STEPS * EXAMPLES)
        said = {name: getattr(outcome, name) for name in ("round", "members", "counted", "reason", "waited", "digest",
                                                          "number")}  # fmt: skip
        say(**said, loss=float(value))
    rounds.leave()


def say(**line: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
