"""What every node trains: a GPT on the characters of Penn Treebank, or on random ones."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.rounds.cells import Cell
from jgc.compress import Dense
from jgc.lab.bench.network.models import Task, module_of, task_named
from jgc.training.data import MissingDataError, Text, load_ptb_characters
from jgc.training.data.text import text_batch
from jgc.training.settings.config import Config, resolve
from jgc.training.steps.optimizer import make_inner
from jgc.types import PyTree

EVALUATED = 128  # windows of the validation text
RANDOM, SIZES = "random tokens", (500_000, 50_000)
Batch = tuple[np.ndarray, np.ndarray]  # tokens and the next ones, i32[b, T] both


class Data(NamedTuple):
    """A text.

    Attributes:
      text: with windows of the model's length.
      batch_size: windows of a node in a step.
    """

    text: Text
    batch_size: int

    def batch(self, seed: int, host: int, step: int) -> Batch:
        """A node's batch: a function of the run's seed, the node and its step."""
        chosen = zlib.crc32(f"{seed} {host}".encode())
        window, labels = text_batch(self.text, chosen, step, 1, self.batch_size)
        return window.words[0], labels[0]

    def validation_batches(self) -> list[Batch]:
        """Batches of windows of the validation text, spread over it; the same for all runs."""
        words, length = self.text.validation, self.text.window
        starts = np.linspace(0, len(words) - length - 1, EVALUATED).astype(np.int64)
        windows = words[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        size = self.batch_size
        parts = [windows[i : i + size] for i in range(0, EVALUATED, size)]
        return [(part[:, :-1], part[:, 1:]) for part in parts]

    @property
    def tokens(self) -> int:
        """Of a node's step."""
        return self.batch_size * self.text.window


def data_of(workload: str, data_dir: str | None) -> Data:
    """The text of a workload; random tokens where Penn Treebank is missing."""
    task = task_named(workload)
    try:
        text = load_ptb_characters(data_dir)._replace(window=task.window)
    except MissingDataError:
        random = np.random.default_rng(0)
        train, validation = (random.integers(0, task.classes, n, np.int32) for n in SIZES)
        vocabulary = tuple(map(str, range(task.classes)))
        text = Text(RANDOM, train, validation, validation, vocabulary, task.window, True)
    return Data(text, task.batch)


def config_of(workload: str) -> Config:
    """The workload's optimiser, with a constant rate after its warm-up for runs of any length."""
    return resolve(Config(Dense(), workload=workload, schedule="constant"))


class Training(NamedTuple):
    """A model and its training.

    Attributes:
      data: see `Data`.
      inner: the optimiser of local steps.
      loss: `(params, batch) -> f32[]`.
      params: before the first step; equal on all nodes.
    """

    data: Data
    inner: optax.GradientTransformation
    loss: Callable[[PyTree, Any], Any]
    params: PyTree

    def make_step(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """`(params, state, batch) -> (params, state)`, a local step of one node."""

        @jax.jit
        def step(params, state, batch):
            updates, state = self.inner.update(jax.grad(self.loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return step

    def validation_loss(self) -> Callable[[PyTree], float]:
        """The mean loss of a character, in nats, over a fixed part of the validation text."""
        loss, batches = jax.jit(self.loss), self.data.validation_batches()
        return lambda params: float(np.mean([loss(params, batch) for batch in batches]))


def training_of(cell: Cell, data_dir: str | None) -> Training:
    """The training of a cell."""
    task = task_named(cell.workload)
    module = module_of(task)

    def loss(params, batch):
        logits = module.apply({"params": params}, batch[0], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    data, inner = data_of(cell.workload, data_dir), make_inner(config_of(cell.workload))
    return Training(data, inner, loss, first_params(module, task, cell.seed))


def first_params(module: Any, task: Task, seed: int) -> PyTree:
    """The model's first parameters."""
    tokens = jnp.zeros((1, task.window), jnp.int32)
    start = jax.jit(partial(module.init, train=False))
    return start(jax.random.key(seed), tokens)["params"]
