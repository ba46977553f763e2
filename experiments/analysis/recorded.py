"""Read the recording of a run (`train.py --record.every`): gradients and residuals by step, layer and node."""

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jgc.training.errors import FAILED, UserError
from jgc.training.models import Model, make_model
from jgc.training.output.recording import GRADIENT, RESIDUAL, UNIT, files, matching, step_of
from jgc.training.run.folder import CONFIG, GRADIENTS, read_object
from jgc.training.settings.saved_config import completed


class Recorded(NamedTuple):
    """A run with a recording.

    Attributes:
      folder: of the run.
      config: the run's, as plain data.
      steps: the recorded steps: updates made before each.
      layers: paths in the model's order.
      ends: paths of its first and its last layer, if both were recorded.
      shapes: of the layers.
      nodes: their number, from the first file.
      with_residuals: the layers with residuals.
    """

    folder: Path
    config: dict[str, Any]
    steps: tuple[int, ...]
    layers: tuple[str, ...]
    ends: tuple[str, str] | None
    shapes: dict[str, tuple[int, ...]]
    nodes: int
    with_residuals: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """The dtype of the recording."""
        return str(self.config["record"]["dtype"])

    @property
    def title(self) -> str:
        """The run in words."""
        config, every = self.config, self.config.get("local", {}).get("every")
        what = f", pseudo-gradients of {every} local steps" if every else ""
        return f"{config['workload']}, {self.nodes} nodes, batch {config['batch_size']}, {config['method']}{what}"

    @property
    def unit(self) -> str:
        """What `record.every` counts."""
        return "exchanges" if self.config.get("local", {}).get("every") else "steps"


class Step(NamedTuple):
    """One recorded step.

    Attributes:
      step: updates made before it.
      phase: the method's.
      gradients: f32[K, n] by layer.
      residuals: likewise, for layers that have them.
    """

    step: int
    phase: str
    gradients: dict[str, np.ndarray]
    residuals: dict[str, np.ndarray]


def find(folder: Path, layers: str = "") -> Recorded:
    """A run and the contents of its recording.

    Args:
      folder: of the run.
      layers: regular expression for `re.search` in the layers' paths; empty for all.

    Raises:
      UserError: it is no run, or has no recording of such layers.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is no run folder: it has no {CONFIG}")
    config, recordings = completed(read_object(folder / CONFIG)), files(folder / GRADIENTS)
    if not recordings:
        raise UserError(f"{folder} has recorded no gradients: train with --record.every N")
    arrays = _read(recordings[0])
    names = [name for name in arrays if name.startswith(f"{GRADIENT}/")]
    shapes = {name.partition("/")[2]: arrays[name].shape[1:] for name in names}
    model = _model_of(config)
    chosen = matching(in_order(model, list(shapes)), layers, "--layers")
    if not chosen:
        raise UserError(f"--layers {layers!r} matches nothing that {folder} has recorded: {', '.join(shapes)}")
    residuals = tuple(path for path in chosen if f"{RESIDUAL}/{path}" in arrays)
    nodes = len(arrays[names[0]])
    return Recorded(
        folder, config, tuple(map(step_of, recordings)), tuple(chosen), ends(model, chosen), shapes, nodes, residuals
    )


def read(run: Recorded) -> Iterator[Step]:
    """The recorded steps, one by one.

    Raises:
      UserError: a file cannot be read, holds non-finite values, or is of a different number of nodes than the first.
    """
    for path in files(run.folder / GRADIENTS):
        arrays = _read(path)
        gradients, residuals = (
            {layer: _flat(arrays, f"{kind}/{layer}", path) for layer in layers}
            for kind, layers in ((GRADIENT, run.layers), (RESIDUAL, run.with_residuals))
        )
        nodes = len(gradients[run.layers[0]])
        if nodes != run.nodes:
            raise UserError(f"{path} is of {nodes} nodes, and the files before it of {run.nodes}: the run went on with "
                            "a different number of nodes; move the files of one number elsewhere", FAILED)  # fmt: skip
        yield Step(int(arrays["step"]), str(arrays["phase"]), gradients, residuals)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read the recording {path}: {error}", FAILED) from error


def _flat(arrays: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in arrays:
        raise UserError(f"{path} has no {name}: files of two recordings lie together", FAILED)
    x = arrays[name].reshape(len(arrays[name]), -1).astype(np.float32)
    if f"{UNIT}/{name}" in arrays:
        x = x * arrays[f"{UNIT}/{name}"]
    if not np.isfinite(x).all():
        raise UserError(f"{path}: {name} is not finite; the run diverged there", FAILED)
    return x


def _model_of(config: dict[str, Any]) -> Model | None:
    """The run's model, for the order of its layers; None if this version does not have it."""
    try:
        return make_model(config["model"]["name"], 10)
    except ValueError:
        return None


def in_order(model: Model | None, paths: Sequence[str]) -> list[str]:
    """Paths in the order of the model's layers, which is that of making its parameters; without a model as given.

    Example:
      >>> in_order(make_model("convnet5", 10), ["head/kernel", "layer1/conv/kernel", "layer2/conv/kernel"])
      ['layer1/conv/kernel', 'layer2/conv/kernel', 'head/kernel']
    """
    if model is None:
        return list(paths)
    places = {path: place for place, path in enumerate(_made_by(model))}
    return sorted(paths, key=lambda path: places.get(path, len(places)))


def _made_by(model: Model) -> list[str]:
    """The paths of a model's parameters in the order of making them: JAX's transformations would sort them."""
    window = jnp.zeros((1, 4), jnp.int32)
    inputs = (window, jnp.zeros(1, bool)) if model.kind == "text" else jnp.zeros((1, 64, 64, 3))
    made: list[str] = []

    def init(key):
        made.extend(map("/".join, flatten_dict(model.module.init(key, inputs, train=False)["params"])))
        return key

    jax.eval_shape(init, jax.random.key(0))
    return made


def ends(model: Model | None, paths: Sequence[str]) -> tuple[str, str] | None:
    """The first path of the model's first layer, and of its last; None if one is missing."""
    if model is None or not model.first_layer:
        return None
    layers = [next((path for path in paths if re.search(layer, path)), None)
             for layer in (model.first_layer, model.last_layer)]  # fmt: skip
    return (layers[0], layers[1]) if layers[0] and layers[1] else None
