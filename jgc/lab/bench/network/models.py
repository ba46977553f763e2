"""The benchmark's models and random batches, the same sizes in both frameworks."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jgc.lab.shared.random_data import TEXTS
from jgc.training.models import make_model
from jgc.training.settings.workloads import workload_named
from jgc.types import PyTree

IMAGES = ("resnet18", "resnet20", "convnet5")
MODELS = (*IMAGES, "ptb_gpt", "ptb_gpt_3m")
MOMENTUM, LEARNING_RATE = 0.9, 1e-3  # of SGD, for all models
POOL = 4  # batches, used in turn


class Task(NamedTuple):
    """A model and its examples.

    Attributes:
      name: of `MODELS`.
      model: its name in `jgc.training.models.MODELS`.
      classes: its outputs.
      window: tokens of a window; 0 for images of 32 x 32.
      batch: examples of a host in a step, unless the command line says otherwise.
    """

    name: str
    model: str
    classes: int = 10
    window: int = 0
    batch: int = 2

    @property
    def examples(self) -> str:
        """For people."""
        return f"windows of {self.window} tokens" if self.window else "images"

    @property
    def unit(self) -> str:
        """The unit that seconds and bytes are divided by."""
        return "a token" if self.window else "an image"

    def units(self, batch: int) -> int:
        """Tokens or images of `batch` examples."""
        return batch * (self.window or 1)


def task_named(name: str) -> Task:
    """The task of that name: a model for images, or a workload of a GPT.

    Example:
      >>> task_named("ptb_gpt")
      Task(name='ptb_gpt', model='gpt800k', classes=51, window=128, batch=8)
    """
    if name in IMAGES:
        return Task(name, name)
    workload = workload_named(name)
    batch = workload.batch_size // workload.nodes
    return Task(name, workload.model, TEXTS[workload.dataset][0], workload.window, batch)


def module_of(task: Task) -> Any:
    """The model in Flax. Images: no statistics between steps, and a stem for 32 x 32."""
    settings: dict[str, Any] = {"context": task.window} if task.window else {"norm": "group"}
    if task.model.startswith("resnet"):
        settings["stem"] = "cifar"
    return make_model(task.model, task.classes, **settings).module


def shapes_of(task: Task) -> PyTree:
    """The shapes of the model's parameters."""
    module, (inputs, _) = module_of(task), random_batch(task, 1, np.random.default_rng(0))
    return jax.eval_shape(lambda: module.init(jax.random.key(0), inputs, train=False)["params"])


def random_batch(task: Task, batch: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images f32[b, 32, 32, 3] and labels i32[b], or tokens and next tokens, i32[b, T] both."""
    if task.window:
        tokens = random.integers(0, task.classes, (batch, task.window + 1)).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    images = random.standard_normal((batch, 32, 32, 3), np.float32)
    return images, random.integers(0, task.classes, batch).astype(np.int32)
