"""Whether one compiled step gives the same bits in 20 calls on the same input: eight nodes emulated on one device.

    python docs/results/gpu/same_bits.py [METHOD ...]

Prints for each method how many of 19 calls differ from the first.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jgc
from jgc import compress
from jgc.compress import step_on_nodes
from jgc.lab.bench.against_pmean import with_phases
from jgc.lab.bench.network.methods import settings
from jgc.training.settings import cli

NODES, CALLS = 8, 20
SHAPES = {"a": (3, 3, 64, 128), "b": (128,), "c": (1024, 512), "d": (512, 10)}
VARIANTS = [
    "topk:alpha=0.01", "topk:value_code=1bit", "learned_topk", "topk:selection=chunks", "qsgd:exchange=ring",
]  # fmt: skip


def gradients() -> dict[str, jax.Array]:
    """Gradients of all nodes, with a common part."""
    rng = np.random.default_rng(0)
    common = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    of_nodes = {name: x + 0.7 * rng.normal(size=(NODES, *x.shape)) for name, x in common.items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in of_nodes.items()}


def differing_calls(name: str) -> int:
    """How many calls give other bits than the first, in the method's last phase."""
    compressor = compress.build(with_phases(settings(name)))
    nodes, phase = jgc.make_nodes(NODES, jax.devices()[:1]), compressor.schedule[-1].value
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state = jax.jit(lambda key: compressor.init(key, params, nodes))(jax.random.key(0))
    step, grads = jax.jit(step_on_nodes(compressor.aggregate, phase, nodes)), gradients()
    state = step(jax.random.key(1), grads, state)[1]
    calls = [[np.asarray(x) for x in jax.tree.leaves(step(jax.random.key(2), grads, state)[:2])] for _ in range(CALLS)]
    return sum(
        any(not np.array_equal(x, y, equal_nan=True) for x, y in zip(calls[0], call, strict=True)) for call in calls[1:]
    )


def main() -> int:
    """Print a line for each method."""
    print(jax.devices()[0].device_kind)
    for name in sys.argv[1:] or [*(name for name in compress.METHODS if name != "silent"), *VARIANTS]:
        print(f"{name:28s} {differing_calls(name)} of {CALLS - 1} calls differ from the first", flush=True)
    return 0


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(__doc__)
    sys.exit(cli.exit_code_of(main))
