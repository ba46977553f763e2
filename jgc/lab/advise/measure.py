"""The measurements of `jgc advise` on this device: a host's gradients and update, and each method's computation.

A host is one node of K. Its gradients are of its share of the batch, on random data. A method's time is that of
its aggregate with local copies instead of collectives (`comm.local_copies`): it encodes one message and decodes K. With
local steps it is that of an exchange, whose pseudo-gradients have the gradients' shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm, compress
from jgc.comm.ledger import bytes_sent
from jgc.compress import Dense
from jgc.lab.advise.evidence import ALTERNATE
from jgc.lab.advise.model import BUCKET, Row
from jgc.lab.bench.against_pmean import random_gradients
from jgc.lab.bench.network.jax_methods import alone_on
from jgc.lab.bench.network.twenty_lines import psum
from jgc.lab.bench.pieces import aggregated, updated
from jgc.lab.shared.programs import compile_gradients
from jgc.lab.shared.progress import each
from jgc.lab.shared.random_data import parts_of, random_source
from jgc.lab.shared.timing import interleaved
from jgc.layout.pack import make_packing
from jgc.nodes.layouts import as_one_per_device, make_nodes
from jgc.nodes.placement import LOCAL, SHARED
from jgc.nodes.placing import place
from jgc.rounds.coder import CompressorCoder
from jgc.training.errors import UserError, say, values_of_the_user
from jgc.training.run.setup import make_compressor, model_of
from jgc.training.settings.config import Config, LayersConfig, check, method_name, resolve
from jgc.training.settings.local_config import LocalConfig
from jgc.training.steps.step import Parts
from jgc.types import Compressor, Nodes, Phase, PyTree, Sent, State

BASELINES = {"psum_f32": jnp.float32, "psum_f16": jnp.float16}
GRADIENTS, OPTIMIZER = "gradients", "optimizer"


class Measured(NamedTuple):
    """The parts of a step.

    Attributes:
      rows: the baselines and every method.
      values: numbers in the gradient, n.
      batch: examples of a host in a step.
      failed: by method, why it has no row.
    """

    rows: tuple[Row, ...]
    values: int
    batch: int
    failed: dict[str, str]


def measure(
    chosen: Config, hosts: int, methods: Sequence[str], repeats: int, computation: float | None = None,
    bucket: bool = False, parameters: int | None = None,
) -> Measured:  # fmt: skip
    """Time one host's part of a step for the baselines and methods, in turn: all together may not fit.

    Ctrl-C keeps the methods that are done.

    Args:
      chosen: the config of a file, not yet resolved. Its compressor's settings count for that method, the workload's
        for the others.
      hosts: K; they divide the batch.
      methods: registered names.
      repeats: rounds; medians are taken.
      computation: seconds of gradients and update, instead of measuring them.
      bucket: hosts meet in a bucket (`jgc.rounds`), not by collectives.
      parameters: size of a transformer whose shapes replace the workload's; needs `computation`.

    Raises:
      UserError: a batch that the hosts do not divide, or an unknown workload.
    """
    config = resolve(dataclasses.replace(chosen, compressor=Dense(), nodes=hosts))
    check(config)
    config = dataclasses.replace(config, local=LocalConfig())  # a host's gradients and update are the same
    count = config.batch_size // hosts
    with values_of_the_user():
        parts, state, batch = parts_of(dataclasses.replace(config, nodes=1, batch_size=count))
    if parameters is None:
        say(f"compiling the gradients of {config.model.name}, {count} examples")
        gradients_of = compile_gradients(parts, state, batch)
        params, grads = state.params, gradients_of(state.params, state.model_state, batch).grads
    else:
        shapes, alone = transformer(parameters), make_nodes(1)
        chosen = dataclasses.replace(chosen, layers=LayersConfig(dense="", top_k=""))
        params = place(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), SHARED, alone)
        grads = random_gradients(shapes, alone)
    if computation is None:
        say("timing gradients and update")
        parts_of_step: dict[str, Callable[[], Any]] = {
            GRADIENTS: partial(gradients_of, state.params, state.model_state, batch),
            OPTIMIZER: updated(parts, state, grads),
        }
        computation = sum(interleaved(parts_of_step, repeats).values(), 0.0)
        del parts_of_step  # its buffers
    failed: dict[str, str] = {}
    nodes = alone_on(Nodes(hosts, 1))

    def row(name: str) -> Row | None:
        try:
            work, sent = _method(name, chosen, parts, params, grads, nodes, bucket)
        except (ValueError, UserError) as error:
            failed[name] = " ".join(str(error).split())[:300]
            return None
        every = 1 if name in BASELINES else chosen.local.every or 1
        return Row(name_of(name, chosen), seconds_of_host, interleaved({name: work}, repeats)[name], sent, every)

    seconds_of_host, names = computation, (*BASELINES, *methods)
    rows = each(names, row)
    failed |= dict.fromkeys(names[len(rows) :], "not measured, interrupted")
    return Measured(tuple(row for row in rows if row), make_packing(params).size, count, failed)


def _method(
    name: str, chosen: Config, parts: Parts, params: PyTree, grads: PyTree, nodes: Nodes, bucket: bool
) -> tuple[Callable[[], Any], tuple[Sent, ...]]:
    """A method's compiled work on this host, and its collectives."""
    hosts = nodes.count
    if name in BASELINES:
        sent = baseline_message(name, params) if bucket else baseline_sent(name, params, hosts)
        return _baseline(BASELINES[name], hosts, grads), sent
    registered = compress.METHODS[name]
    settings = chosen.compressor if method_name(chosen.compressor) == name else registered.settings()
    config = resolve(dataclasses.replace(chosen, compressor=settings, nodes=hosts))
    compressor = make_compressor(config, model_of(config, random_source(config)))
    if config.local.every is not None and compressor.owns_momentum:
        raise UserError("its memory owns a momentum, and with local steps the outer optimiser does")
    if config.local.fragments > 1:
        raise UserError("local.fragments must be 1 here: an exchange of all fragments is measured")
    # P and Q in turn: a step takes as long in both phases, but may send other bytes
    phases = compressor.schedule[-2:] if alternates(settings) else compressor.schedule[-1:]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    sent = through_bucket(compressor, shapes) if bucket else collectives(compressor, phases, shapes, nodes)
    alone = parts._replace(nodes=nodes, compressor=compressor)
    with comm.local_copies():
        return aggregated(alone, phases[-1].value, _first(alone, params), grads), sent


def transformer(parameters: int) -> PyTree:
    """Shapes of the kernels of 12 layers of a transformer that has about so many parameters.

    Example:
      >>> sum(x.size for x in jax.tree.leaves(transformer(85_000_000)))
      84934656
    """
    width = max(8, round((parameters / 144) ** 0.5 / 8) * 8)
    wide = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in wide.items()}
    return {f"layer_{i}": layer for i in range(12)}


def collectives(
    compressor: Compressor, phases: Sequence[Phase], shapes: PyTree, nodes: Nodes
) -> tuple[Sent, ...]:
    """The collectives of a step, each with its mean bytes over these phases."""
    of_phases = [compressor.wire(phase.value, shapes, as_one_per_device(nodes)).physical for phase in phases]
    by_collective = zip(*of_phases, strict=True)
    return tuple(same[0]._replace(bytes=sum(x.bytes for x in same) / len(same)) for same in by_collective)


def alternates(settings: Any) -> bool:
    """Whether a method's last two phases come in turn."""
    return getattr(settings, "alternate", False)


def name_of(name: str, chosen: Config) -> str:
    """A method's name, with the chosen setting that has a separate accuracy on record."""
    return f"{name}:{ALTERNATE}" if method_name(chosen.compressor) == name and alternates(chosen.compressor) else name


def through_bucket(compressor: Compressor, shapes: PyTree) -> tuple[Sent, ...]:
    """The message of a method's last phase, as `jgc.rounds` writes it into a bucket, without its header.

    Raises:
      ValueError: a method that communicates while it encodes.
    """
    return (Sent(BUCKET, "message", Fraction(4 * CompressorCoder(compressor, shapes, 0).lengths[-1])),)


def _first(parts: Parts, params: PyTree) -> State:
    """This host's part of a compressor's first state, without making the other hosts' parts."""

    def start(params):
        state = parts.compressor.init(jax.random.key(1), params, parts.nodes)
        return State(state.shared, jax.tree.map(lambda x: x[:1], state.local))

    return place(jax.jit(start)(params), State(SHARED, LOCAL), parts.nodes)


def _baseline(dtype: Any, hosts: int, grads: PyTree) -> Callable[[], Any]:
    """The mean of all hosts' gradients as one vector, without the sum itself."""

    def run(grads):
        return psum(jax.tree.map(lambda g: g[0], grads), dtype, hosts, jax.lax.optimization_barrier)

    return partial(jax.jit(run).lower(grads).compile(), grads)


def baseline_message(name: str, shapes: PyTree) -> tuple[Sent, ...]:
    """All values as one message.

    Example:
      >>> baseline_message("psum_f16", {"w": jnp.zeros((10, 10))})[0].bytes
      Fraction(200, 1)
    """
    size = sum(x.size for x in jax.tree.leaves(shapes)) * jnp.dtype(BASELINES[name]).itemsize
    return (Sent(BUCKET, "message", Fraction(size)),)


def baseline_sent(name: str, shapes: PyTree, hosts: int) -> tuple[Sent, ...]:
    """The collective of a baseline: one all-reduce of all values.

    Example:
      >>> baseline_sent("psum_f16", {"w": jnp.zeros((10, 10))}, 4)[0].bytes
      Fraction(300, 1)
    """
    size = sum(x.size for x in jax.tree.leaves(shapes)) * jnp.dtype(BASELINES[name]).itemsize
    return (Sent("all-reduce", "dense", bytes_sent("all-reduce", size, hosts)),)
