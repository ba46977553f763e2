"""Compile every method's step for a target, and read bytes, memory and time from the program."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jgc.compress import step_of_shapes
from jgc.lab.plan.cycles import Cycles, cycles_of
from jgc.lab.plan.kernels import Kernels, kernels_of
from jgc.lab.plan.targets import GPU, Target, compiled_for, versions
from jgc.lab.shared.hlo import Collective, UnknownCollectiveError, collectives
from jgc.lab.shared.progress import left
from jgc.nodes.placement import SHARED, spec
from jgc.types import Compressor, Nodes, PyTree

READ = "one read"  # the row of a program that reads every gradient once


class Program(NamedTuple):
    """A step of one phase of a method. Figures are of one device; a step that was only traced has just bytes.

    Attributes:
      method, phase: their names.
      inside: bytes sent in a step inside a host or slice, by collective.
      across: bytes sent in a step between hosts or slices, by collective.
      temporary: bytes of temporary memory.
      arguments: bytes of arguments: gradients, the method's state, and the key.
      seconds: to trace and compile; `cpu_seconds` are the processors', which others on the machine do not change.
      cycles: the compiler's estimate; None where it makes none.
      collectives: how many a step runs, by kind.
      kernels: launched in a step, on GPUs; None elsewhere.
      key: a hash of the program, the target and the versions; "" for a step that was only traced.
    """

    method: str
    phase: str
    inside: dict[str, float]
    across: dict[str, float]
    temporary: int | None
    arguments: int | None
    seconds: float | None
    cpu_seconds: float | None
    cycles: Cycles | None
    collectives: dict[str, int]
    kernels: Kernels | None
    key: str


class Refusal(NamedTuple):
    """A method that cannot run on the target, and why: it takes no shards, or needs more memory than a device has."""

    method: str
    reason: str


Row = Program | Refusal


def rows_of(
    methods: dict[str, Compressor],
    shapes: PyTree,
    target: Target,
    told: Callable[[str], None] = lambda line: None,
    *,
    last: bool = False,
    traced: bool = False,
    known: Mapping[str, Program] | None = None,
    compiled: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Compile every phase of every method.

    Args:
      methods: by the name of their rows.
      shapes: of the parameters, with shardings where they are sharded within a node (`divided`).
      target: the devices.
      told: called with a line after each program.
      last: only the last phase of every method.
      traced: compile nothing; the nodes must hold whole parameters.
      known: programs that were compiled before, by their keys: they are not compiled again.
      compiled: called with the rows so far after each program that was compiled.
    """
    nodes = target.nodes()
    make = partial(_compiled, target=target, known=known or {})
    rows: list[Row] = [] if traced else [read_program(shapes, nodes, make)]
    phases = {name: method.schedule[-1:] if last else method.schedule for name, method in methods.items()}
    total, done, begun = sum(map(len, phases.values())), 0, perf_counter()
    for name, method in methods.items():
        for i, phase in enumerate(phases[name], start=1):
            done += 1
            try:
                if traced:
                    row: Row = traced_step(name, method, phase.name, phase.value, shapes, target, nodes)
                else:
                    row = program(name, method, phase.name, phase.value, shapes, nodes, make)
            except ValueError as error:  # a method that does not take shards
                row = Refusal(name, " ".join(str(error).split()))
            except jax.errors.JaxRuntimeError as error:
                row = Refusal(name, too_large(error))
            reused = isinstance(row, Program) and row.key in (known or {})
            rest = "" if done == total else left(done, total, perf_counter() - begun)
            told(f"[{done}/{total}{rest}] {target.name}: {name}, {phase.name}: {said(row, reused)}")
            rows.append(row)
            if not reused:
                compiled(rows)
            if isinstance(row, Refusal):
                done += len(phases[name]) - i
                break
    return rows


def too_large(error: jax.errors.JaxRuntimeError) -> str:
    """Why a program does not fit into a device's memory.

    Raises:
      JaxRuntimeError: the error itself, if it is a different one.

    Example:
      >>> memory = "RESOURCE_EXHAUSTED: memory required for HLO temporaries (16.90G) exceeds available HBM (15.75G)."
      >>> too_large(jax.errors.JaxRuntimeError(memory))
      'needs 16.90G of temporary memory, and a device has 15.75G'
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    if match := re.search(r"temporaries \(([\d.]+\w*)\) exceeds available \w+ \(([\d.]+\w*)\)", str(error)):
        return f"needs {match[1]} of temporary memory, and a device has {match[2]}"
    return "needs more memory than a device has: " + str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")


def said(row: Row, reused: bool) -> str:
    """A row's progress line."""
    if isinstance(row, Refusal):
        return f"refused: {row.reason}"
    if row.seconds is None:
        return "traced"
    return "compiled in an earlier call" if reused else f"compiled in {row.seconds:.1f} s"


def traced_step(
    name: str, method: Compressor, phase: str, value: Hashable, shapes: PyTree, target: Target, nodes: Nodes
) -> Program:
    """The bytes of a phase's collectives, which all go between hosts or slices if there are several.

    Raises:
      ValueError: the method does not fit the parameters.
    """
    physical = method.wire(value, shapes, nodes).physical
    times = Counter(message.op for message in physical)
    sent = {op: float(sum(message.bytes for message in physical if message.op == op)) for op in times}
    inside, across = ({}, sent) if target.groups > 1 else (sent, {})
    return Program(name, phase, inside, across, None, None, None, None, None, dict(times), None, "")


def program(
    name: str, method: Compressor, phase: str, value: Hashable, shapes: PyTree, nodes: Nodes, make: Callable
) -> Program:
    """Compile one phase. Its state is donated, as a loop does.

    Raises:
      ValueError: the method does not fit the parameters or their shards.
    """
    step, (key, grads, state) = step_of_shapes(method, value, shapes, nodes)

    def run(key, joined, state):
        return step(key, jax.tree.map(lambda x, like: x.reshape(like.shape), joined, grads), state)

    return make(name, phase, run, (key, jax.tree.map(_joined, grads), state), donate=(2,))


def _joined(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The gradients [K, a, ...] of a parameter as one array [K a, ...].

    So each device has [a, ...], as after its backward pass. Of [1, a, ...] a TPU would have to move biases and norms.
    """
    if x.ndim == 1:
        return x
    assert isinstance(x.sharding, NamedSharding)
    first, second, *rest = tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))
    axes = [axis for of in (first, second) if of is not None for axis in (of if isinstance(of, tuple) else (of,))]
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(tuple(axes), *rest))
    return jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype, sharding=sharding)


def read_program(shapes: PyTree, nodes: Nodes, make: Callable) -> Program:
    """The largest magnitude of a node's whole gradient: one read, to compare cycles with."""

    def run(grads):
        return jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(grads)]))

    def double(x):
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(sharding.shard_shape(x.shape) if sharding else x.shape, x.dtype, sharding=whole)

    whole = NamedSharding(nodes.mesh, spec(SHARED, nodes))  # type: ignore[arg-type]
    return make(READ, "", run, (jax.tree.map(double, shapes),))


def _compiled(
    name: str, phase: str, run: Callable, arguments: Sequence[Any], *, target: Target, known: Mapping[str, Program],
    donate: tuple[int, ...] = (),
) -> Program:  # fmt: skip
    """A program of `known` if it is there, else compiled."""
    started, busy = perf_counter(), _cpu_seconds()
    lowered = jax.jit(run, donate_argnums=donate).lower(*arguments)
    key = key_of(lowered.as_text(), target)
    if key in known:
        return known[key]._replace(method=name, phase=phase)
    compiled = compiled_for(lowered)
    seconds = perf_counter() - started, _cpu_seconds() - busy
    text: Any = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    operations = collectives(text)
    inside, across = by_link(operations, target)
    times = Counter[str]()
    for operation in operations:
        times[operation.op] += operation.times
    sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes
    kernels = kernels_of(text) if target.chip.kind == GPU else None
    return Program(name, phase, inside, across, *sizes, *seconds, cycles_of(text), dict(times), kernels, key)


def _cpu_seconds() -> float:
    return sum(os.times()[:4])  # with processes that have ended: XLA for GPU starts NVIDIA's assembler


def key_of(text: str, target: Target) -> str:
    """A hash of a program before it is compiled, of its target, and of the versions that compile and read it."""
    whole = "\n".join([text, target.name, *map(str, versions([target]).items())])
    return hashlib.sha256(whole.encode()).hexdigest()[:24]


def by_link(operations: Sequence[Collective], target: Target) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that one device sends, by collective: inside a host or slice, and by those that reach others."""
    inside, across = Counter[str](), Counter[str]()
    for operation in operations:
        link = across if leaves_group(operation, target.per_group) else inside
        link[operation.op] += float(operation.sent_bytes)  # type: ignore[assignment]
    return dict(inside), dict(across)


def leaves_group(operation: Collective, per_group: int) -> bool:
    """Whether a collective's devices are of several hosts or slices of `per_group` devices each.

    Raises:
      UnknownCollectiveError: the program does not list the devices.
    """
    if not (operation.groups or operation.between_slices):
        raise UnknownCollectiveError(
            f"cannot tell which devices take part in {operation.op} of {operation.sent_bytes:g} bytes"
        )
    return operation.between_slices or any(len({i // per_group for i in group}) > 1 for group in operation.groups)
