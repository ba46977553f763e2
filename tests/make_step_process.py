"""A small loop of `jgc.make_step`; as a program, one of two real processes that run it.

python tests/make_step_process.py FOLDER PORT PROCESS
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

PARAMS = {"w": np.zeros((6, 4), np.float32), "b": np.zeros(4, np.float32)}
STEPS = 6


@contextmanager
def compilations(program: str = "") -> Iterator[list[str]]:
    """The names of the programs that XLA compiles inside the block, of those whose name has `program` in it."""
    found: list[str] = []
    counting = [True]  # a listener cannot be taken away

    def listen(event, duration, **about):
        name = about.get("fun_name", "")
        if counting and "backend_compile" in event and program in name:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    counting.clear()


def loss(params, batch):
    """Mean squared error of a linear model."""
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def looped_loss(params, batch):
    """The same, by a loop that begins with a constant."""
    errors = jax.lax.scan(lambda s, of_one: (s + loss(params, of_one), None), jax.numpy.float32(0), batch)[0]
    return errors / len(batch["x"])


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Five examples for each of eight nodes."""
    random = np.random.default_rng(step)
    x = random.normal(size=(8, 5, 6)).astype(np.float32)
    w = np.random.default_rng(99).normal(size=(6, 4)).astype(np.float32)
    return {"x": x, "y": x @ w}


def train(nodes) -> dict[str, np.ndarray]:
    """The first state's checksums; parameters and loss after some steps in two phases, saved and restored between."""
    import optax

    import jgc

    compressor = jgc.compress.topk(alpha=0.2, warmup_steps=3)
    init, step = jgc.make_step(looped_loss, compressor, optax.adamw(0.1), nodes)
    state = init(jax.random.key(0), PARAMS)
    notes = jgc.as_arrays(state).phase
    for i in range(STEPS):
        state = jgc.from_arrays(jgc.as_arrays(state))
        batch = batch_of(i)
        if i % 2:  # each process makes the part of its own nodes
            batch = jgc.place_parts(lambda of, batch=batch: jax.tree.map(lambda x: x[of], batch), nodes)
        state, metrics = step(state, batch)
    return {**jax.tree.map(np.asarray, state.params), "loss": np.asarray(metrics.loss), "notes": notes}


def train_on_fewer(nodes, fewer) -> dict[str, np.ndarray]:
    """What all share after local steps on eight nodes and, from the middle of a round on, on four."""
    import optax

    import jgc

    def loop(nodes):
        steps = jgc.local_steps(optax.adam(0.1), optax.sgd(0.5, momentum=0.9), jgc.compress.topk(alpha=0.5), 2, nodes)
        return steps.make_step(loss)

    (init, step), (init_of_4, step_of_4) = loop(nodes), loop(fewer)
    state = init(jax.random.key(0), PARAMS)
    for i in range(3):
        state, _ = step(state, batch_of(i))
    state = jgc.with_nodes(state, init_of_4(jax.random.key(0), PARAMS))
    state, _ = step_of_4(state, jax.tree.map(lambda x: x.reshape(4, 10, -1), batch_of(3)))
    return jax.tree.map(np.asarray, state.params)


def main(folder: str, port: str, process: str) -> None:
    """What the module says."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    import jgc

    with compilations("update") as compiled:
        found = train(jgc.make_nodes(8))
    fewer = {f"{name}_of_4": x for name, x in train_on_fewer(jgc.make_nodes(8), jgc.make_nodes(4)).items()}
    np.savez(Path(folder) / f"{process}.npz", compiled=len(compiled), **found, **fewer)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
