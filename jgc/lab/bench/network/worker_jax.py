"""One host's JAX process: it holds the model, compiles methods and takes steps on the parent's request.

    python -m jgc.lab.bench.network.worker_jax '{"host": 0, "hosts": 4, "coordinator": "10.77.0.1:9000", ...}'

A step is three programs, as in jgc's training: this node's gradients, a method's aggregate, the optimiser's update
(SGD with momentum). All methods share parameters and momentum: only times and bytes count here. Methods with local
steps have separate arrays, and a round of them counts as one step here.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jgc.lab.bench.network import channel, framing
from jgc.lab.bench.network.jax_local import Rounds, build_rounds, take_round
from jgc.lab.bench.network.jax_methods import Built, build, copied, local
from jgc.lab.bench.network.methods import split
from jgc.lab.bench.network.models import (
    LEARNING_RATE,
    MOMENTUM,
    POOL,
    Task,
    module_of,
    random_batch,
    shapes_of,
    task_named,
)
from jgc.lab.bench.network.namespaces import INTERFACE
from jgc.nodes.gradients import node_grads
from jgc.nodes.layouts import NODE, make_nodes
from jgc.types import PyTree

NO_HEARTBEAT = 10**6  # seconds: heartbeats would be counted with a method's bytes; the parent sees a dead host itself


@dataclass
class Session:
    """State of a host between steps.

    Attributes:
      loss: `(params, batch) -> f32[]`.
      gradients: `(params, batch) -> (losses [K], grads [K, ...])`, compiled.
      update: `(params, velocity, aggregated) -> (params, velocity)`, compiled.
      params, velocity: replicated.
      batches: each (images f32[K, b, 32, 32, 3], labels i32[K, b]), or tokens of a text.
      nothing: zeros in the shapes of the parameters, an aggregate for steps without one.
      nodes: one per host.
      built: compiled methods; rounds: those with local steps.
      own: by method, this host's state for steps with local copies.
      bare: by kind and size, programs of a single collective.
      step: number of steps taken.
    """

    loss: Callable[..., Any]
    gradients: Any
    update: Any
    params: PyTree
    velocity: PyTree
    batches: list[tuple[jax.Array, jax.Array]]
    nothing: PyTree
    nodes: Any
    built: dict[str, Built] = field(default_factory=dict)
    rounds: dict[str, Rounds] = field(default_factory=dict)
    own: dict[str, PyTree] = field(default_factory=dict)
    bare: dict[str, Callable[[], None]] = field(default_factory=dict)
    step: int = 0


def start(task: Task, batch: int, hosts: int, host: int) -> Session:
    """Compile gradients and update, and place the arrays."""
    nodes = make_nodes(hosts)
    assert nodes.mesh is not None, "every host has a device"
    module, shapes = module_of(task), shapes_of(task)
    everywhere, apart = NamedSharding(nodes.mesh, P()), NamedSharding(nodes.mesh, P(NODE))
    params = placed(first_params(shapes), everywhere)
    velocity, nothing = (placed(jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes), everywhere)
                         for _ in range(2))  # fmt: skip

    def loss(params, examples):
        logits = module.apply({"params": params}, examples[0], train=True)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), examples[1][..., None], axis=-1)
        return -jnp.mean(chosen)

    def update(params, velocity, aggregated):
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, aggregated)
        return jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity), velocity

    random = np.random.default_rng(host)
    batches = [placed(jax.tree.map(lambda x: x[None], random_batch(task, batch, random)), apart) for _ in range(POOL)]
    gradients = jax.jit(node_grads(loss, nodes)).lower(params, batches[0]).compile()
    updated = jax.jit(update, donate_argnums=(0, 1), out_shardings=everywhere)
    return Session(loss, gradients, updated.lower(params, velocity, nothing).compile(), params, velocity, batches,
                   nothing, nodes)  # fmt: skip


def first_params(shapes: PyTree) -> PyTree:
    """He's initialisation by NumPy, equal on all hosts: compiling JAX's for each tensor takes long."""
    random = np.random.default_rng(0)

    def leaf(path, x):
        if path[-1].key not in ("kernel", "embedding"):
            return np.full(x.shape, path[-1].key == "scale", np.float32)
        return random.standard_normal(x.shape, np.float32) * np.float32((2 / np.prod(x.shape[:-1])) ** 0.5)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def placed(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Global arrays from this process's part of them: all, or [1, ...]."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def next_batch(session: Session) -> tuple[jax.Array, jax.Array]:
    """This step's batch."""
    session.step += 1
    return session.batches[session.step % POOL]


def grads_of(session: Session) -> PyTree:
    """This step's gradients, [K, ...]."""
    return session.gradients(session.params, next_batch(session))[1]


def take(session: Session, method: str, part: str) -> None:
    """One step; with local steps one round.

    Args:
      session: changed in place.
      method: its name; not used for "computation".
      part: "full", "alone" (local copies instead of collectives) or "computation" (gradients and update).
    """
    if method in session.rounds and part == "full":
        session.rounds[method] = take_round(session.rounds[method], lambda: next_batch(session), session.step)
        return
    grads, aggregated = grads_of(session), session.nothing
    if part == "full":
        built = session.built[method]
        state, aggregated = built.run(built.state, np.int32(session.step), grads)
        session.built[method] = built._replace(state=state)
    elif part == "alone":
        run = session.built[method].alone
        session.own[method], alone = run(session.own[method], np.int32(session.step), local(grads))
        jax.block_until_ready(alone)
    session.params, session.velocity = session.update(session.params, session.velocity, aggregated)
    jax.block_until_ready((grads, session.params, session.velocity))


def prepare(session: Session, method: str, part: str) -> None:
    """Before a block of steps with local copies: give the host a separate state, or the hosts would diverge."""
    if part == "alone":
        session.own[method] = jax.block_until_ready(copied(session.built[method].state))


def main() -> None:
    """Join the other hosts and serve the parent."""
    answers = channel.open_channel()
    options = json.loads(sys.argv[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(options["coordinator"], options["hosts"], options["host"],
                               heartbeat_timeout_seconds=NO_HEARTBEAT)  # fmt: skip
    jax.devices()  # all processes exchange their devices before they compile in turn
    sessions: list[Session] = []

    def begin() -> dict[str, Any]:
        sessions.append(start(task_named(options["model"]), options["batch"], options["hosts"], options["host"]))
        leaves = jax.tree.leaves(sessions[0].params)
        return {"tensors": len(leaves), "parameters": sum(x.size for x in leaves), "version": f"jax {jax.__version__}"}

    def compiled(method: str) -> dict[str, Any]:
        started, session = time.monotonic(), sessions[0]
        built: Built | Rounds
        if split(method)[1] is not None:
            batch = next_batch(session)
            built = session.rounds[method] = build_rounds(method, session.nodes, session.params, session.loss, batch)
        else:
            built = session.built[method] = build(method, session.nodes, session.params, grads_of(session))
        jax.clear_caches()  # traces are not needed again
        channel.give_back_memory()
        return {"physical": built.physical, "compiled": built.compiled, "audit": built.audit,
                "collectives": built.collectives, "seconds": time.monotonic() - started}  # fmt: skip

    def ready(name: str) -> float:
        sessions[0].bare[name], sent = framing.make(name, sessions[0].nodes)
        return sent

    def digest() -> float:
        """A number that is equal on all hosts if their parameters are."""
        trees = sessions[0].params, [rounds.arrays.params for rounds in sessions[0].rounds.values()]
        return float(sum(np.abs(np.asarray(x.addressable_data(0), np.float64)).sum()
                         for x in jax.tree.leaves(trees)))  # fmt: skip

    channel.serve(answers, {
        "begin": begin,
        "build": compiled,
        "prepare": lambda method, part: prepare(sessions[0], method, part),
        "step": lambda method, part, at: channel.timed(lambda: take(sessions[0], method, part), at),
        "finish": lambda method: sessions[0].own.clear(),
        "ready": ready,
        "bare": lambda name: sessions[0].bare[name](),
        "counters": lambda: channel.counters(INTERFACE),
        "digest": digest,
    })  # fmt: skip


if __name__ == "__main__":
    main()
