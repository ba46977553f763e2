"""Runs on noise in the shapes of a data set, to find times, memory and bytes without the data."""

import jax
import numpy as np

from jgc.nodes.layouts import make_nodes
from jgc.nodes.placing import place
from jgc.training.data import Dataset, Labelled, Scenes, Source, Text, source_of
from jgc.training.data.loader import EVALUATED_IMAGES
from jgc.training.data.scenes import EVALUATED_AT_ONCE, shrunk
from jgc.training.data.streamed import EVALUATED
from jgc.training.data.text import EVALUATED_STREAMS
from jgc.training.run.setup import init_model, make_parts, model_of
from jgc.training.settings.config import Config
from jgc.training.steps.step import Batch, Parts, TrainState, init_state
from jgc.types import PyTree

SHAPES = {
    "digits": ((8, 8, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
    "food101": ((224, 224, 3), 101),
    "imagenet": ((224, 224, 3), 1000),
    "tiny_imagenet": ((64, 64, 3), 200),
}
TEXTS = {"ptb": (10_000, 20), "ptb_characters": (51, 128)}  # different words, words in a window
SCENES = {"camvid": ((360, 480), 11, 473)}  # pixels of an image, classes, crop
DECODED_IN_TRAINING = ("imagenet", "food101")


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
    """A run's model before its first step. Compiling takes seconds, and the result is the same for all methods."""
    source = random_source(config)
    inputs = source.inputs(config.batch_size // config.nodes)
    return init_model(model_of(config, source), jax.random.key(config.seed), inputs)


def evaluated_at_once(config: Config, source: Source) -> int:
    """Images or streams of text in a batch of evaluation."""
    if config.data.name in DECODED_IN_TRAINING:
        return EVALUATED
    return {"images": EVALUATED_IMAGES, "scenes": EVALUATED_AT_ONCE, "text": EVALUATED_STREAMS}[source.kind]


def random_source(config: Config, examples: int | None = None) -> Source:
    """Noise in the shapes of a config's data set: a batch of text, or `examples` images or scenes (or a batch)."""
    name, count, rng = config.data.name, examples or config.batch_size, np.random.default_rng(0)
    if name in TEXTS:
        words, window = TEXTS[name][0], config.data.window or TEXTS[name][1]
        text = rng.integers(0, words, config.batch_size * (window + 1), np.int32)
        return source_of(Text(name, text, text, text, tuple(map(str, range(words))), window, name != "ptb"))
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
    no, ones = np.zeros(shape[-1:], np.float32), np.ones(shape[-1:], np.float32)
    return source_of(Dataset(name, images, labels, images, labels, classes, no, ones))
