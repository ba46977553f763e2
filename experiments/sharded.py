"""`python -m experiments sharded`: compression where parameters are sharded within a node (FSDP).

Nothing is run: each method's programs are compiled for virtual devices and weighed, the compression by its
temporary memory, and a whole training step by the seconds that it takes to compile, in turn with the same step with
plain `pmean`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from jgc import compress
from jgc.compress import step_on_nodes
from jgc.lab.bench.against_pmean import PMEAN, TOKENS, devices_for, megabytes, shapes_of
from jgc.lab.bench.network.methods import settings
from jgc.lab.shared.choices import words
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import check_repeats, publish
from jgc.lab.shared.progress import each
from jgc.lab.shared.tables import table
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.layouts import from_mesh
from jgc.nodes.placement import BATCH, locally, placements_of
from jgc.nodes.placing import place, placed_shapes
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.models import make_model
from jgc.training.steps.step import sharded
from jgc.types import Compressor, Nodes, PyTree

SLOW, FAST = "nodes", "shards"
LENGTH = 32  # tokens in an example
RATE = 0.1  # of plain SGD


@dataclass(frozen=True)
class Shards:
    """Memory and compile time of every method where parameters are sharded within a node (FSDP).

    Programs are compiled and weighed, not run.

        python -m experiments sharded --model gpt25m --shards 4 --methods dense,topk,powersgd

        | method | temporary, MB | of the shard | step, compile s | of the step with pmean |
        | topk | 2 | 0.09 | 4.4 | 1.58 |
    """

    model: str = "gpt25m"
    """a model of text in jgc.training.models"""
    methods: tuple[str, ...] = ()
    """names separated by commas or spaces; all if not given"""
    nodes: int = 2
    """data-parallel nodes"""
    shards: int = 4
    """devices of each node, over which the parameters are sharded"""
    repeats: int = 3
    """how often a whole step is compiled; medians are shown"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Compile, and print the page."""
        check_repeats(self.repeats)
        if self.shards < 2:
            raise UserError(f"--shards must be at least 2, got {self.shards}")
        with values_of_the_user():
            measured = measure(self.model, self.nodes, self.shards, self.repeats, words(self.methods))
        publish("Every method on shards", markdown(measured, describe()), self.output, line)


class Row(NamedTuple):
    """A method's last phase.

    Attributes:
      method: its name.
      temporary: bytes that the compression allocates on a device.
      step: seconds to compile a whole training step, one for each repeat.
      plain: seconds of the step with `pmean`, compiled just after.
    """

    method: str
    temporary: int
    step: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the repeats' ratios of seconds."""
        return statistics.median(seconds / plain for seconds, plain in zip(self.step, self.plain, strict=True))


class Sharded(NamedTuple):
    """Outcome of the benchmark. The first row is plain `pmean`'s."""

    model: str
    values: int
    shard: int
    nodes: int
    shards: int
    rows: tuple[Row, ...]


class Case(NamedTuple):
    """A model's parameters, sharded over the devices of each node, and its loss."""

    nodes: Nodes
    params: PyTree
    placements: PyTree
    loss: Callable[[PyTree, jax.Array], jax.Array]


def measure(model: str, nodes: int, shards: int, repeats: int, methods: Sequence[str] = ()) -> Sharded:
    """Compile methods for nodes within which parameters are sharded.

    Args:
      model: a name in `jgc.training.models.MODELS`, of a model of text.
      nodes: how many.
      shards: devices of each node, at least 2.
      repeats: how often a whole step is compiled.
      methods: names, with settings after colons (powersgd:rank=4); all that can compress shards if there are none.

    Raises:
      UserError: an unknown model, method or setting, a model of images, or fewer devices.
    """
    names = list(methods) or [name for name in compress.METHODS if name != "gradiveq"]
    chosen = {name: compress.build(settings(name)) for name in names}
    case = case_of(model, nodes, shards)
    plain_of, plain = compression(case, None)
    seconds_to_compile(case, plain_of)  # not counted: the model is traced for the first time
    rows = [Row(PMEAN, temporary(plain), (1.0,), (1.0,))]

    def row(name: str) -> Row:
        aggregate, program = compression(case, chosen[name])
        seconds = [(seconds_to_compile(case, aggregate), seconds_to_compile(case, plain_of)) for _ in range(repeats)]
        return Row(name, temporary(program), *zip(*seconds, strict=True))

    rows += each(list(chosen), row)
    leaves = jax.tree.leaves(case.params)
    shard = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    return Sharded(model, sum(x.size for x in leaves), shard, nodes, shards, tuple(rows))


def case_of(model: str, count: int, shards: int) -> Case:
    """A model of text on a mesh of `count` nodes of `shards` devices.

    Raises:
      UserError: an unknown model, a model of images, fewer devices.
    """
    devices = np.array(devices_for(count * shards)).reshape(count, shards)
    shapes = shapes_of(model)
    built = make_model(model, TOKENS)
    if built.kind != "text":
        raise UserError(f"--model must be a model of text, such as gpt25m, got {model}")
    nodes = from_mesh(Mesh(devices, (SLOW, FAST)), SLOW, FAST)
    params = place(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), sharded(shapes, nodes), nodes)

    def loss(params, tokens):
        scores = built.module.apply({"params": params}, tokens, train=True)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], tokens[:, 1:]))

    return Case(nodes, params, placements_of(params), loss)


class Aggregation(NamedTuple):
    """`(gradients [K, ...], state) -> (mean, state)`, and the state before the first step."""

    run: Callable[[PyTree, Any], tuple[PyTree, Any]]
    state: Any


def compression(case: Case, compressor: Compressor | None) -> tuple[Aggregation, Any]:
    """The last phase of a method, or `pmean` if it is None, and its program."""
    nodes, placements = case.nodes, case.placements
    if compressor is None:

        def plain(grads):
            return jax.tree.map(lambda x: lax.pmean(x, SLOW), grads)

        mean = on_nodes(plain, nodes, (locally(placements),), placements)
        aggregation = Aggregation(lambda grads, state: (mean(grads), state), ())
    else:
        state = compressor.init(jax.random.key(0), case.params, nodes)
        step = step_on_nodes(
            compressor.aggregate, compressor.schedule[-1].value, nodes, placements, placements_of(state)
        )
        key = jax.random.key(1)
        aggregation = Aggregation(lambda grads, state: step(key, grads, state)[:2], state)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((nodes.count, *x.shape), x.dtype), case.params)
    grads = placed_shapes(grads, locally(placements), nodes)
    return aggregation, jax.jit(aggregation.run, donate_argnums=1).lower(grads, aggregation.state).compile()


def seconds_to_compile(case: Case, aggregation: Aggregation) -> float:
    """Seconds to trace and compile a whole step: gradients of the loss, their mean, and plain SGD."""
    gradients = node_grads(case.loss, case.nodes, placements=case.placements)
    tokens = place(np.zeros((case.nodes.count, case.nodes.size((FAST,)), LENGTH), np.int32), BATCH, case.nodes)

    def step(params, state, tokens):
        mean, state = aggregation.run(gradients(params, tokens)[1], state)
        return jax.tree.map(lambda p, m: p - RATE * m, params, mean), state

    started = perf_counter()
    jax.jit(step, donate_argnums=(0, 1)).lower(case.params, aggregation.state, tokens).compile()
    return perf_counter() - started


def temporary(program: Any) -> int:
    """Bytes that a compiled program allocates on a device, besides arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def markdown(measured: Sharded, machine: str) -> str:
    """The page."""

    def cells(row):
        memory = [megabytes(row.temporary), f"{row.temporary / measured.shard:.2f}"]
        if row.method == PMEAN:
            return [row.method, *memory, "", "1"]
        return [row.method, *memory, f"{statistics.median(row.step):.1f}", f"{row.ratio:.2f}"]

    return "\n\n".join([
        f"`{measured.model}`, {measured.values:,} parameters, {measured.nodes} nodes of {measured.shards} devices, "
        f"parameters sharded within a node; a device's shard of the gradient has {megabytes(measured.shard)} MB; "
        f"{machine}.",
        "Nothing was run. Temporary memory: of the compression, on one device. Compiling: a whole training step of "
        "the method's last phase, tracing included, over the same step with plain `pmean`, compiled in turn; medians.",
        table(["method", "temporary, MB", "of the shard", "step, compile s", "of the step with pmean"],
              [cells(row) for row in measured.rows]),
    ]) + "\n"  # fmt: skip
