"""`--record`: write all nodes' gradients of chosen layers into the run folder, every N-th step.

The gradients are those that enter the compressor: with coupled weight decay, and clipped if the run clips. With
`--record.residuals` a file also has the residuals of those layers before the step. One file a step,
`gradients/step-00000020.npz`; 20 is the number of updates made before. NumPy reads it:

    file = np.load("gradients/step-00000020.npz")
    file["gradient/layer1/conv/kernel"]  # [K, *shape], node first: name and shape of a layer are the parameter's
    file["residual/layer1/conv/kernel"]  # likewise, if residuals are recorded
    file["step"], file["phase"]          # 20 and "dense", say

With `--record.dtype float16` each array has a scale, `file["unit/gradient/layer1/conv/kernel"]`, a power of two to
multiply it by. Values smaller than the array's largest by a factor of 2^39 become 0.

A run whose recording would exceed `--record.max-megabytes` does not start. Process 0 gathers the gradients of all
processes and writes the files. A resumed run deletes the files of steps after its checkpoint and records them again.
"""

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgc.layout.pack import leaf_paths
from jgc.method.diagnose import residual
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL
from jgc.nodes.placing import to_host
from jgc.training.errors import UserError
from jgc.training.run.folder import GRADIENTS, write_whole
from jgc.training.settings.config import RecordConfig
from jgc.training.steps.step import Parts
from jgc.types import Array, Phase, PyTree

GRADIENT, RESIDUAL, UNIT = "gradient", "residual", "unit"
LARGEST = 15  # binary exponent of an array's largest value in float16, which ends below 2^16


class Recording:
    """Writes a run's recording in process 0. All processes must call it."""

    def __init__(self, parts: Parts, params: PyTree, local: PyTree, run_dir: Path):
        self._settings, self._parts, self._folder = parts.config.record, parts, run_dir / GRADIENTS
        self._compute: Any = None
        if self._settings.every:
            self._names = _names(parts, params, local)
            _check_size(parts, params, self._names)

    def begin(self, start: int) -> None:
        """Delete the files of steps from `start` on: an earlier start of the run wrote them."""
        if jax.process_index() == 0:
            for path in files(self._folder):
                if step_of(path) >= start:
                    path.unlink()

    def is_due(self, step: int) -> bool:
        """Whether to record a step, counted from 0."""
        return self._settings.every > 0 and step % self._settings.every == 0

    def run(self, step: int, phase: Phase, local: PyTree, grads: PyTree) -> None:
        """Write what the compressor gets in the coming update: gradients, and its state of the nodes, [K, ...]."""
        if self._compute is None:
            self._compute = _make_record(self._parts, self._names)
        arrays = self._compute(grads, local)
        host = {name: to_host(arrays[name]) for name in self._names}
        if jax.process_index() == 0:
            self._folder.mkdir(exist_ok=True)
            save(self._folder, step, phase.name, host, self._settings.dtype)


def _make_record(parts: Parts, names: list[str]) -> Any:
    """`(grads [K, ...], the compressor's local state [K, ...]) -> {name: [K, ...]}`."""

    def of_node(grads, local):  # one node's, without the axis [K]
        return {name: x for name, x in _everything(parts, grads, local).items() if name in names}

    return jax.jit(on_nodes(of_node, parts.nodes, ins=(LOCAL, LOCAL), outs=LOCAL))


def _everything(parts: Parts, grads: PyTree, local: PyTree) -> dict[str, Array]:
    """A node's gradients, and residuals if recorded, by their names in a file."""
    arrays = {f"{GRADIENT}/{path}": x for path, x in zip(leaf_paths(grads), jax.tree.leaves(grads), strict=True)}
    if parts.config.record.residuals:
        arrays |= {f"{RESIDUAL}/{path}": x for path, x in residual(parts.exchanged, local, grads).items()}
    return arrays


def _names(parts: Parts, params: PyTree, local: PyTree) -> list[str]:
    """The names of the arrays in a file of this run, gradients first."""
    settings: RecordConfig = parts.config.record
    paths = leaf_paths(params)
    chosen = matching(paths, settings.layers, "--record.layers")
    if not chosen:
        some = ", ".join(paths[:: max(1, len(paths) // 6)])
        raise UserError(f"--record.layers {settings.layers!r} matches no parameter; there are {some}, ...")
    if not settings.residuals:
        return [f"{GRADIENT}/{path}" for path in chosen]
    of_node = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), local)
    shapes = jax.eval_shape(lambda grads, local: _everything(parts, grads, local), params, of_node)
    residuals = [name for path in chosen if (name := f"{RESIDUAL}/{path}") in shapes]
    if not residuals:
        raise UserError("--record.residuals: this method has no residual for the recorded layers; leave the option out")
    return [*(f"{GRADIENT}/{path}" for path in chosen), *residuals]


def matching(paths: Iterable[str], pattern: str, option: str) -> list[str]:
    """The paths that a regular expression matches.

    Example:
      >>> matching(["layer1/conv/kernel", "layer1/norm/scale"], "kernel$", "--layer")
      ['layer1/conv/kernel']
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{option} {pattern!r} is no regular expression: {error}") from error
    return [path for path in paths if expression.search(path)]


def _check_size(parts: Parts, params: PyTree, names: list[str]) -> None:
    """Raise UserError if the recording would exceed the limit."""
    config, settings = parts.config, parts.config.record
    sizes = {path: x.size for path, x in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)}
    values = sum(sizes[name.partition("/")[2]] for name in names)
    updates = config.steps // (config.local.every or 1)  # with local steps, exchanges
    steps, width = -(-updates // settings.every), np.dtype(settings.dtype).itemsize
    needed = steps * config.nodes * values * width / 1e6
    if needed > settings.max_megabytes:
        raise UserError(
            f"the recording would take {needed:,.1f} MB ({steps} steps x {config.nodes} nodes x {values:,} values x "
            f"{width} bytes), more than --record.max-megabytes {settings.max_megabytes:g}: record fewer layers "
            "(--record.layers), less often (--record.every), in float16 (--record.dtype), or raise the limit"
        )


def files(folder: Path) -> list[Path]:
    """The recorded files, in the order of steps."""
    return sorted(folder.glob("step-*.npz"), key=step_of)


def step_of(path: Path) -> int:
    """The number of updates made before a file's step."""
    return int(path.stem.partition("-")[2])


def save(folder: Path, step: int, phase: str, arrays: dict[str, np.ndarray], dtype: str = "float32") -> Path:
    """Write one step's file atomically: arrays [K, *shape] by name; `step`: updates made before."""
    out = {"step": np.array(step), "phase": np.array(phase)}
    for name, x in arrays.items():
        if dtype == "float16":
            unit = _unit(x)
            out[f"{UNIT}/{name}"], x = np.array(unit), x / unit
        out[name] = x.astype(dtype)
    data, path = io.BytesIO(), folder / f"step-{step:08d}.npz"
    np.savez(data, allow_pickle=False, **out)
    write_whole(path, data.getvalue())
    return path


def _unit(x: np.ndarray) -> np.float32:
    """The power of two that scales the largest magnitude just into float16's range."""
    largest = np.abs(x).max(initial=0)
    exponent = np.frexp(largest)[1] - LARGEST if np.isfinite(largest) and largest > 0 else 0
    return np.float32(2.0) ** np.float32(max(exponent, -126))
