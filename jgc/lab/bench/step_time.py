"""What compression costs in a training step, for every method and phase, and where the time goes.

    python -m jgc bench step --workload cifar10_resnet20

All phases are measured in turn in one process; each is compared with the dense step of the same run. Gradients are
those of random images: no data set is needed, and top-k takes the same time on any values without ties.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgc import compress
from jgc.compress.lgc import autoencoder as ae
from jgc.lab.bench.timing import interleaved
from jgc.lab.report import paper
from jgc.lab.report.tables import table
from jgc.layout.pack import Packing, make_packing
from jgc.layout.select import Sparse, counts_per_layer, scatter, top_positions
from jgc.memory import make_memory
from jgc.nodes import make_nodes, place
from jgc.training.config import Config, resolve
from jgc.training.data import Dataset, Labelled, Scenes, Source, Text, source_of
from jgc.training.data.loader import EVALUATED_IMAGES
from jgc.training.data.scenes import EVALUATED_AT_ONCE, shrunk
from jgc.training.data.streamed import EVALUATED
from jgc.training.data.text import EVALUATED_STREAMS
from jgc.training.program import compile_gradients, compile_update
from jgc.training.setup import init_model, make_parts, model_of
from jgc.training.step import Batch, Gradients, Parts, TrainState, init_state
from jgc.types import PyTree

SHAPES = {
    "digits": ((8, 8, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
    "food101": ((224, 224, 3), 101),
    "imagenet": ((224, 224, 3), 1000),
    "tiny_imagenet": ((64, 64, 3), 200),
}
TEXTS = {"ptb": (10_000, 20)}  # different words, words in a window
SCENES = {"camvid": ((360, 480), 11, 473)}  # pixels of an image, classes, crop
DECODED_IN_TRAINING = ("imagenet", "food101")


class Row(NamedTuple):
    """Times of one phase of one method, in seconds."""

    method: str
    phase: str
    update: float  # everything after the gradients: compressor and optimiser
    step: float  # gradients and update
    ratio: float  # of the dense step


class StepTimes(NamedTuple):
    """Outcome of the benchmark."""

    workload: str
    nodes: int
    gradients: float  # seconds
    rows: tuple[Row, ...]
    parts: dict[str, float]  # seconds of the pieces of lgc_ps


def measure(workload: str, nodes: int, repeats: int, alpha: float) -> StepTimes:
    """Time gradients, then every phase's update of every method, then the pieces of `lgc_ps`.

    Args:
      workload: a name in `jgc.training.workloads`.
      nodes: K.
      repeats: rounds; medians are taken.
      alpha: share selected, for the methods that select.
    """
    work: dict[str, Callable[[], Any]] = {}
    names: list[tuple[str, str]] = []
    for name, method in compress.METHODS.items():
        settings = method.settings(alpha=alpha) if hasattr(method.settings, "alpha") else method.settings()
        config = resolve(Config(compressor=settings, workload=workload, nodes=nodes))
        parts, state, batch = parts_of(config)
        gradients_of = compile_gradients(parts, state, batch)
        gradients = gradients_of(state.params, state.own, batch)
        if not work:
            work["gradients"] = partial(gradients_of, state.params, state.own, batch)
            packing = make_packing(state.params)
        for phase in parts.compressor.schedule:
            names.append((name, phase.name))
            work[f"{name} {phase.name}"] = updater(parts, phase.value, state, gradients)
    work |= {f"part {name}": run for name, run in _pieces(packing, nodes, alpha).items()}
    seconds = interleaved(work, repeats)
    dense = seconds["gradients"] + seconds[f"{names[0][0]} {names[0][1]}"]
    rows = []
    for name, phase_name in names:
        update = seconds[f"{name} {phase_name}"]
        step = seconds["gradients"] + update
        rows.append(Row(name, phase_name, update, step, step / dense))
    pieces = {name.removeprefix("part "): s for name, s in seconds.items() if name.startswith("part ")}
    return StepTimes(workload, nodes, seconds["gradients"], tuple(rows), pieces)


def parts_of(config: Config, variables: PyTree = None) -> tuple[Parts, TrainState, Batch]:
    """The parts of a run on random data, the state before its first step, and a batch.

    Args:
      config: of the run, resolved.
      variables: of the model, from `variables_of`; made if not given.
    """
    nodes, source = make_nodes(config.nodes), random_source(config)
    key = jax.random.key(config.seed)
    parts = make_parts(config, nodes, model_of(config, source), source, key)
    state = init_state(parts, variables_of(config) if variables is None else variables, key)
    return parts, state, place(source.batch(0, 0, nodes.count, config.batch_size), "batch", nodes)


def variables_of(config: Config) -> PyTree:
    """A run's model before its first step. Compiling this takes seconds; it is the same for all methods."""
    source = random_source(config)
    inputs = source.inputs(config.batch_size // config.nodes)
    return init_model(model_of(config, source), jax.random.key(config.seed), inputs)


def evaluated_at_once(config: Config, source: Source) -> int:
    """Images or streams of text of a batch in evaluation."""
    if config.data.name in DECODED_IN_TRAINING:
        return EVALUATED
    return {"images": EVALUATED_IMAGES, "scenes": EVALUATED_AT_ONCE, "text": EVALUATED_STREAMS}[source.kind]


def random_source(config: Config) -> Source:
    """A batch of noise in the shapes of a config's data set, which need not be there."""
    name, count, rng = config.data.name, config.batch_size, np.random.default_rng(0)
    if name in TEXTS:
        words, window = TEXTS[name][0], config.data.window or TEXTS[name][1]
        text = rng.integers(0, words, count * (window + 1), np.int32)
        return source_of(Text(name, text, text, text, tuple(map(str, range(words))), window))
    if name in SCENES:
        (height, width), classes, crop = SCENES[name]
        images = rng.integers(0, 256, (count, height, width, 3), np.uint8)
        split = Labelled(images, rng.integers(0, classes, (count, height, width), np.uint8))
        names, colours = zip(*((str(i), (i, i, i)) for i in range(classes)), strict=True)
        mean, std = np.full((2, 3), 128, np.float32)
        scenes = Scenes(name, split, split, split, names, colours, mean, std, config.data.crop or crop)
        return source_of(shrunk(scenes, config.data.shrink or 1))
    shape, classes = SHAPES[name]
    if config.data.crop:
        shape = (config.data.crop, config.data.crop, shape[-1])
    images = rng.standard_normal((count, *shape), np.float32)
    labels = rng.integers(0, classes, count, np.int32)
    no, one = np.zeros(shape[-1:], np.float32), np.ones(shape[-1:], np.float32)
    return source_of(Dataset(name, images, labels, images, labels, classes, no, one))


def updater(parts: Parts, phase: Any, state: TrainState, gradients: Gradients) -> Callable[[], Any]:
    """One update after the other."""
    return chained(compile_update(parts, phase, state, gradients).run, state, gradients, np.int32(0))


def chained(run: Callable, state: Any, *args: Any) -> Callable[[], Any]:
    """One call of `run(state, *args) -> (state, other)` after the other: each gives its state's buffers to the next."""
    held = [jax.tree.map(jnp.copy, state)]

    def step():
        held[0], other = run(held[0], *args)
        return held[0], other

    return step


def _pieces(packing: Packing, nodes: int, alpha: float) -> dict[str, Callable[[], Any]]:
    """The pieces of `lgc_ps` on all K nodes of one device, each compiled by itself."""
    counts = counts_per_layer(packing.layers, alpha)
    mu, n = sum(counts), packing.size
    key = jax.random.key(0)
    v = jax.random.normal(key, (nodes, n))
    positions = jax.vmap(lambda v: top_positions(v, packing.layers, counts))(v)
    x = jax.random.normal(key, (nodes, mu))
    z = jnp.pad(x, ((0, 0), (0, ae.padded(mu) - mu)))
    weights = ae.init(key, mu, nodes)
    optimiser = optax.adam(1e-3)
    trained = ae.Trained(weights, optimiser.init(weights))
    code = ae.encode(weights.encoder, z[0])
    memory = make_memory(True, 0.9)
    local = jax.vmap(lambda v: memory.init(n))(v)

    def remember(local, g, positions):
        v, local = memory.compensate(memory.accumulate(local, g, False), g, False)
        return memory.update(local, v, Sparse(positions, v[positions]), False)

    pieces: dict[str, tuple[Callable, tuple]] = {
        "memory (accumulate, update), all nodes": (jax.vmap(remember), (local, v, positions)),
        "selection (top-k per layer), all nodes": (
            jax.vmap(lambda v: top_positions(v, packing.layers, counts)),
            (v,),
        ),
        "encoder, one node": (ae.encode, (weights.encoder, z[0])),
        "decoders, all nodes": (jax.vmap(ae.decode, in_axes=(0, None, 0)), (weights.decoders, code, z)),
        "scatter of the mean": (lambda p, x: scatter(Sparse(p, x), n), (positions, x)),
        "one training step of the autoencoder": (
            lambda trained, z: ae.train(trained, optimiser, z, z, jnp.int32(0), 1.0, 0.5),
            (trained, z),
        ),
    }
    return {name: partial(jax.jit(fn), *args) for name, (fn, args) in pieces.items()}


def markdown(times: StepTimes, machine: str) -> str:
    """The outcome as a page."""
    lines = [
        f"`{times.workload}`, {times.nodes} nodes; {machine}.",
        "",
        f"Gradients of all nodes: {1e3 * times.gradients:.0f} ms.",
        "",
        "| method | phase | after the gradients, ms | whole step, ms | of the dense step |",
        "|---|---|---|---|---|",
        *(
            f"| {row.method} | {row.phase} | {1e3 * row.update:.1f} | {1e3 * row.step:.0f} | {row.ratio:.2f} |"
            for row in times.rows
        ),
        "",
        "Where the time of `lgc_ps` goes, each piece compiled by itself:",
        "",
        "| piece | ms |",
        "|---|---|",
        *(f"| {name} | {1e3 * seconds:.1f} |" for name, seconds in times.parts.items()),
        "",
        "The LGC paper's Table V (ResNet50 on ImageNet, 8 nodes on four RTX 2080 Ti, sending included) beside ours "
        "(nothing sent):",
        "",
        _table_v(times),
    ]
    return "\n".join(lines) + "\n"


def _table_v(times: StepTimes) -> str:
    """Phases that the paper timed, in multiples of its own dense step and of ours."""
    rows = []
    for row in times.rows:
        theirs = paper.SECONDS.get(row.method, {})
        if row.phase in theirs:
            seconds = theirs[row.phase]
            ratios = [f"{row.ratio:.2f}", f"{seconds / theirs['dense']:.2f}"]
            rows.append([row.method, row.phase, f"{row.step:.3f}", f"{seconds:.1f}", *ratios])
    head = ["method", "phase", "ours, s", "paper, s", "ours, of the dense step", "paper, of its dense phase"]
    return table(head, rows)
