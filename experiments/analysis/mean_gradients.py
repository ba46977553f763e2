"""The mean gradient of one convolution over consecutive steps of an uncompressed run, in one .npz.

`experiments.record` records all nodes' gradients of the whole model, 12 MB a step for a small one. Here it is the mean
of one layer over hundreds of steps, 0.3 MB a step. Both record a compressor's input: each node's gradient with coupled
weight decay, clipped if the run clips.
"""

import io
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.record import training_gradients, uncompressed_run
from jgc.lab.shared.machine import describe
from jgc.layout.pack import leaf_paths
from jgc.training.errors import FAILED, NonFinite, UserError
from jgc.training.output.recording import matching
from jgc.training.run.folder import write_whole
from jgc.types import PyTree

NAME = "recording.npz"


class MeanGradients(NamedTuple):
    """The mean over nodes of a layer's gradient, in S consecutive steps.

    Attributes:
      flat: f32[S, n], the kernel (H, W, D, F) ravelled in C order: the F filters' values together, then depth, width,
        height, as in GradiVeQ's Figure 3a.
      shape: (H, W, D, F).
      layer: path of the kernel.
      start: number of the first step.
      config: the run's, as plain data.
      machine: of the recording.
    """

    flat: np.ndarray
    shape: tuple[int, ...]
    layer: str
    start: int
    config: dict[str, Any]
    machine: str


def choose(params: PyTree, pattern: str) -> str:
    """The path of the convolution that matches a pattern; without one, of a 3x3 convolution in the middle of the model.

    Args:
      params: arrays, or anything with a shape; kernels of convolutions have four dimensions.
      pattern: a regular expression for `re.search`, or "".

    Raises:
      UserError: it matches no convolution, or several.

    Example:
      >>> params = {f"layer{i}": np.zeros((3, 3, 2, 2)) for i in (1, 2, 3)} | {"head": np.zeros((2, 10))}
      >>> choose(params, ""), choose(params, "r3")
      ('layer2', 'layer3')
    """
    leaves = zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves if len(leaf.shape) == 4}
    layers = matching(shapes, pattern, "--layer")
    if not pattern:
        threes = [path for path, shape in shapes.items() if shape[:2] == (3, 3)]
        layers = threes[len(threes) // 2 :][:1]
    if len(layers) != 1:
        what = f"{len(layers)} convolutions ({', '.join(layers[:4])}, ...)" if layers else "no convolution"
        raise UserError(f"--layer {pattern!r} matches {what}; there are {', '.join(shapes) or 'none'}")
    return layers[0]


def record(
    workload: str, nodes: int, seed: int, start: int, steps: int, layer: str = "", data_dir: str | None = None
) -> MeanGradients:
    """Train without compression and record a layer's mean gradient in steps `start` to `start + steps - 1`.

    Args:
      workload: a name in `jgc.training.settings.workloads`; its learning rate schedule does not stretch with `steps`.
      nodes: K.
      seed: of the run.
      start: uncompressed steps before the first that is recorded.
      steps: S, how many are recorded.
      layer: see `choose`.
      data_dir: folder of prepared data sets.

    Raises:
      UserError: a setting is wrong, or the data set is missing.
      NonFinite: the run diverged.
    """
    config, setup, settings = uncompressed_run(workload, nodes, seed, start, steps, data_dir)
    path = choose(setup.state.params, layer)
    at = leaf_paths(setup.state.params).index(path)
    gradients, shape = [], jax.tree.leaves(setup.state.params)[at].shape
    for step, grads in training_gradients(config, setup):
        if step >= start:
            nodes_own = np.asarray(jax.tree.leaves(grads)[at])  # [K, H, W, D, F]
            gradients.append(nodes_own.mean(0, dtype=np.float64).astype(np.float32).ravel())
            if not np.isfinite(gradients[-1]).all():
                raise NonFinite(step + 1, f"a gradient of {path} is not finite", "nothing was recorded")
    return MeanGradients(np.stack(gradients), shape, path, start, settings, describe())


def save(path: Path, recording: MeanGradients) -> None:
    """Write a recording, whole."""
    about = recording._asdict()
    flat = about.pop("flat")
    file = io.BytesIO()
    np.savez(file, flat=flat, about=np.array(json.dumps(about)))
    write_whole(path, file.getvalue())


def load(path: Path) -> MeanGradients:
    """Read what `save` wrote.

    Raises:
      UserError: there is no such file, or it is no such recording.
    """
    if not path.is_file():
        raise UserError(f"no recording {path}: without --from-recording the command makes one, {NAME} in its output")
    try:
        with np.load(path, allow_pickle=False) as file:
            flat, about = file["flat"], json.loads(str(file["about"]))
        return MeanGradients(flat=flat, **about | {"shape": tuple(about["shape"])})
    except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no recording of mean gradients: {error}", FAILED) from error
