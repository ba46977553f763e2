"""`python -m jgc bench methods --model gpt25m`: every method's compression, next to a plain `pmean` of the tree.

Random gradients have the shapes of a model's parameters; every node is a device, on CPU a virtual one. Each phase of a
method is compiled by itself and timed in turn with plain `lax.pmean`, so that a drifting machine changes both alike.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jgc import compress
from jgc.compress import step_on_nodes
from jgc.lab.bench.costs import shown
from jgc.lab.bench.network.methods import settings
from jgc.lab.shared.progress import each
from jgc.lab.shared.tables import table
from jgc.lab.shared.timing import Times, rounds
from jgc.nodes.layouts import NODE, from_mesh
from jgc.nodes.placement import LOCAL, SHARED
from jgc.nodes.placing import place
from jgc.training.errors import UserError
from jgc.training.models import MODELS, make_model
from jgc.types import Compressor, Nodes, Phase, PyTree, State

TOKENS = 64  # different ones, of models of text
IMAGE = (32, 32, 3)
CLASSES = 10
STEPS_OF_RAMP = 20  # for a method whose phases take no steps by default
PMEAN = "plain pmean"


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      call: runs it once.
      compile_seconds: to trace, lower and compile it.
      temporary: bytes that it allocates on a device, besides arguments and results.
    """

    call: Callable[[], Any]
    compile_seconds: float
    temporary: int


class Row(NamedTuple):
    """One phase of one method: f64[repeats] seconds, and the seconds of `pmean` in the same rounds."""

    method: str
    phase: str
    seconds: Times
    pmean: Times
    compile_seconds: float
    temporary: int


class Outcome(NamedTuple):
    """Outcome of the benchmark. The first row is plain `pmean`'s."""

    model: str
    values: int
    leaves: int
    devices: int
    repeats: int
    rows: tuple[Row, ...]


def measure(model: str, devices: int, repeats: int, methods: Sequence[str] = (), phases: bool = True) -> Outcome:
    """Time and compile methods on random gradients, each in turn with plain `pmean`.

    Args:
      model: a name in `jgc.training.models.MODELS`.
      devices: nodes, one on each device.
      repeats: rounds.
      methods: names, with settings after colons (powersgd:rank=4); all that are registered if there are none.
      phases: whether all phases of a method are measured; if not, the last one.

    Raises:
      UserError: an unknown model, method or setting, or fewer devices.
    """
    nodes, shapes = nodes_on(devices), shapes_of(model)
    names = list(methods) or list(compress.METHODS)
    chosen = {name: with_phases(settings(name)) for name in names}
    grads = random_gradients(shapes, nodes)
    plain = pmean_program(nodes, grads)
    alone = rounds({PMEAN: plain.call}, repeats)[PMEAN]
    rows = [Row(PMEAN, "", alone, alone, plain.compile_seconds, plain.temporary)]
    built = {name: compress.build(config) for name, config in chosen.items()}
    wanted = [
        (name, phase)
        for name, compressor in built.items()
        for phase in (compressor.schedule if phases else compressor.schedule[-1:])
    ]

    def row(compressor: tuple[str, Phase]) -> Row:
        name, phase = compressor
        program = method_program(built[name], phase.value, nodes, shapes, grads)
        seconds = rounds({PMEAN: plain.call, name: program.call}, repeats)
        return Row(name, phase.name, seconds[name], seconds[PMEAN], program.compile_seconds, program.temporary)

    rows += each(wanted, row, lambda compressor: f"{compressor[0]}, {compressor[1].name}")
    leaves = jax.tree.leaves(shapes)
    return Outcome(model, sum(math.prod(x.shape) for x in leaves), len(leaves), devices, repeats, tuple(rows))


def nodes_on(devices: int) -> Nodes:
    """One node on each of `devices` devices."""
    return from_mesh(Mesh(np.array(devices_for(devices)), (NODE,)), (NODE,))


def devices_for(count: int) -> list[jax.Device]:
    """`count` devices; on CPU virtual ones, if JAX has not started yet.

    Raises:
      UserError: there are fewer devices.
    """
    if count < 1:
        raise UserError(f"the number of devices must be at least 1, got {count}")
    with suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if count > len(devices):
        raise UserError(f"asked for {count} devices; there are {len(devices)}")
    return devices[:count]


def shapes_of(model: str) -> PyTree:
    """The shapes of a model's parameters.

    Raises:
      UserError: an unknown model.
    """
    if model not in MODELS:
        raise UserError(f"unknown model {model!r} (one of {', '.join(MODELS)})")
    text = make_model(model, TOKENS).kind == "text"
    built = make_model(model, TOKENS if text else CLASSES)
    inputs: Any = (jnp.zeros((1, 3), jnp.int32), jnp.ones(1, bool)) if text else jnp.zeros((1, *IMAGE))
    return jax.eval_shape(lambda: built.module.init(jax.random.key(0), inputs, train=False))["params"]


def with_phases(config: Any) -> Any:
    """The settings, with steps for a ramp that has none by default."""
    if getattr(config, "strategy", "") == "exponential" and not config.warmup_steps:
        return dataclasses.replace(config, warmup_steps=STEPS_OF_RAMP)
    return config


def random_gradients(shapes: PyTree, nodes: Nodes) -> PyTree:
    """Normally distributed values, [K, ...], different on each node."""
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    made = [rng.standard_normal((nodes.count, *x.shape), np.float32).astype(x.dtype) for x in leaves]
    return place(jax.tree.unflatten(tree, made), LOCAL, nodes)


# --- programs -------------------------------------------------------------------------------------------------------


def compiled(run: Callable, *args: Any, **options: Any) -> tuple[Any, float, int]:
    """A function compiled for arguments; the seconds that it took; its temporary memory on a device, in bytes."""
    started = perf_counter()
    program = jax.jit(run, **options).lower(*args).compile()
    seconds = perf_counter() - started
    memory: Any = program.memory_analysis()
    return program, seconds, memory.temp_size_in_bytes


def pmean_program(nodes: Nodes, grads: PyTree) -> Program:
    """Plain `lax.pmean` of a tree of gradients [K, ...]."""

    def mean(grads):
        return lax.pmean(jax.tree.map(lambda g: g[0], grads), NODE)

    program, seconds, temporary = compiled(jax.shard_map(mean, mesh=nodes.mesh, in_specs=P(NODE), out_specs=P()), grads)
    return Program(partial(program, grads), seconds, temporary)


def method_program(compressor: Compressor, phase: Any, nodes: Nodes, shapes: PyTree, grads: PyTree) -> Program:
    """A phase of a method. A call takes one step from the state in which the call before ended, in its buffers."""
    on_axis = step_on_nodes(compressor.aggregate, phase, nodes)

    def run(state, key, grads):
        mean, state, info = on_axis(key, grads, state)
        return state, mean, info

    state = place_state(compressor.init(jax.random.key(1), shapes, nodes), nodes)
    key = place(jax.random.key(2), SHARED, nodes)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    program, seconds, temporary = compiled(
        run, state, key, grads, donate_argnums=0, out_shardings=(shardings, None, None)
    )
    held = [state]

    def call():
        held[0], mean, info = program(held[0], key, grads)
        return mean, info

    return Program(call, seconds, temporary)


def place_state(state: State, nodes: Nodes) -> State:
    """The state on the devices, in new buffers."""
    placed = State(place(state.shared, SHARED, nodes), place(state.local, LOCAL, nodes))
    return jax.tree.map(jnp.copy, placed)


# --- the page -------------------------------------------------------------------------------------------------------


def markdown(measured: Outcome, machine: str) -> str:
    """The page."""
    gradient = 4 * measured.values
    nodes = "one node" if measured.devices == 1 else f"{measured.devices} nodes, one on each device"
    rounds = "one round" if measured.repeats == 1 else f"{measured.repeats} rounds"
    spread = "; after ± half the distance between the quartiles" if measured.repeats > 1 else ""
    return "\n\n".join([
        f"`{measured.model}`, {measured.values:,} parameters in {measured.leaves} leaves, {nodes}; "
        f"all layers alike; {machine}.",
        f"Only the compression, on random gradients of the model's shapes: medians of {rounds}, each "
        f"method in turn with plain `lax.pmean` of the tree{spread}. The ratio is the median of the ratios of the "
        "rounds. Temporary memory is the compiled program's on one device, and its share of the gradient of "
        f"{megabytes(gradient)} MB. Compiling includes tracing.",
        table(["method", "phase", "ms", "pmean, ms", "of pmean", "compile, s", "temporary, MB", "of the gradient"],
              [cells(row, gradient) for row in measured.rows]),
        *ramps(measured),
    ]) + "\n"  # fmt: skip


def cells(row: Row, gradient: int) -> list[str]:
    """A row of the table."""
    times = [shown(1e3 * x) for x in (row.seconds, row.pmean)]
    ratio = shown(row.seconds / row.pmean, 2) if row.method != PMEAN else "1"
    share = f"{row.temporary / gradient:.2f}"
    return [row.method, row.phase, *times, ratio, f"{row.compile_seconds:.1f}", megabytes(row.temporary), share]


def ramps(measured: Outcome) -> list[str]:
    """A sentence on the time to compile all phases of the methods that have several."""
    seconds: dict[str, list[float]] = {}
    for row in measured.rows:
        seconds.setdefault(row.method, []).append(row.compile_seconds)
    several = [f"{name} {sum(x):.1f} s ({len(x)})" for name, x in seconds.items() if len(x) > 1]
    return [f"Compiling all phases of a method: {', '.join(several)}."] if several else []


def megabytes(size: float) -> str:
    """Bytes as MB.

    Example:
      >>> megabytes(25_200_000)
      '25'
    """
    return f"{size / 1e6:.0f}"
