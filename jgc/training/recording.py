"""`--record`: chosen layers' gradients of all nodes, kept in the run folder as the run goes.

What is kept is what the compressor gets: each node's gradient of every N-th step, with coupled weight decay and clipped
where the run clips, and with `--record.residuals` what the method keeps back of those layers before the step. One file
a step, `gradients/step-00000020.npz`, in which 20 is the number of updates made before. No jgc is needed to read it:

    file = np.load("gradients/step-00000020.npz")
    file["gradient/layer1/conv/kernel"]  # [K, *shape], node first: name and shape of a layer are the parameter's
    file["residual/layer1/conv/kernel"]  # likewise, where residuals are recorded
    file["step"], file["phase"]          # 20 and "dense", say

With `--record.dtype float16` an array is in units of its own, `file["unit/gradient/layer1/conv/kernel"]`, a power of
two to multiply it by; what is smaller than the array's largest value by a factor of 2^39 becomes 0.

How large a recording will be is known before the first step: a run whose recording would exceed
`--record.max-megabytes` does not start. Where a run has several processes, each node's part is fetched from the process
that computed it, and process 0 writes them all. A resumed run drops what was recorded after its checkpoint and does
those steps again.
"""

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgc.layout.pack import leaf_paths
from jgc.method.guard import residual
from jgc.nodes import LOCAL, SHARED, on_nodes, to_host
from jgc.training.config import RecordConfig
from jgc.training.errors import UserError
from jgc.training.rundir import GRADIENTS, write_whole
from jgc.training.step import Gradients, Parts, TrainState, before_compression
from jgc.types import Array, Phase, PyTree

GRADIENT, RESIDUAL, UNIT = "gradient", "residual", "unit"
LARGEST = 15  # binary exponent of an array's largest value in float16, which ends below 2^16


class Recording:
    """Writes the files of a run, in process 0; all processes take part.

    Args:
      parts: of the run.
      state: before its first step, for shapes.
      run_dir: its folder.

    Raises:
      UserError: the layers' pattern matches none or is none, there are no residuals, or it would all be too large.
    """

    def __init__(self, parts: Parts, state: TrainState, run_dir: Path):
        self._settings, self._parts, self._folder = parts.config.record, parts, run_dir / GRADIENTS
        self._compute: Any = None
        if self._settings.every:
            self._names = _names(parts, state)
            _check_size(parts, state.params, self._names)

    def begin(self, start: int) -> None:
        """Drop what an earlier start recorded of steps that are still to come."""
        if jax.process_index() == 0:
            for path in files(self._folder):
                if step_of(path) >= start:
                    path.unlink()

    def is_due(self, step: int) -> bool:
        """Whether that step is recorded; it counts from 0."""
        return self._settings.every > 0 and step % self._settings.every == 0

    def run(self, step: int, phase: Phase, state: TrainState, gradients: Gradients) -> None:
        """Write down what the update that comes next will get.

        Raises:
          UserError: a full or read-only disk.
        """
        if self._compute is None:
            self._compute = jax.jit(_make_record(self._parts, self._names))
        arrays = self._compute(state.params, gradients.grads, state.compressor.local)
        host = {name: to_host(arrays[name]) for name in self._names}
        if jax.process_index() == 0:
            self._folder.mkdir(exist_ok=True)
            save(self._folder, step, phase.name, host, self._settings.dtype)


def _make_record(parts: Parts, names: list[str]) -> Any:
    """`(params, grads [K, ...], the compressor's local state [K, ...]) -> {name: [K, ...]}`."""

    def one(params, grads, local):  # one node's, without the axis [K]
        grads = before_compression(grads, params, parts)
        return {name: x for name, x in _everything(parts, grads, local).items() if name in names}

    return on_nodes(one, parts.nodes, ins=(SHARED, LOCAL, LOCAL), outs=LOCAL)


def _everything(parts: Parts, grads: PyTree, local: PyTree) -> dict[str, Array]:
    """A node's gradients and, where they are wanted, residuals by the names that they have in a file."""
    found = {f"{GRADIENT}/{path}": x for path, x in zip(leaf_paths(grads), jax.tree.leaves(grads), strict=True)}
    if parts.config.record.residuals:
        found |= {f"{RESIDUAL}/{path}": x for path, x in residual(parts.compressor, local, grads).items()}
    return found


def _names(parts: Parts, state: TrainState) -> list[str]:
    """What a file of this run holds, gradients first."""
    settings: RecordConfig = parts.config.record
    paths = leaf_paths(state.params)
    chosen = matching(paths, settings.layers, "--record.layers")
    if not chosen:
        some = ", ".join(paths[:: max(1, len(paths) // 6)])
        raise UserError(f"--record.layers {settings.layers!r} matches no parameter; there are {some}, ...")
    if not settings.residuals:
        return [f"{GRADIENT}/{path}" for path in chosen]
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.compressor.local)
    kept = jax.eval_shape(lambda grads, local: _everything(parts, grads, local), state.params, own)
    residuals = [name for path in chosen if (name := f"{RESIDUAL}/{path}") in kept]
    if not residuals:
        raise UserError("--record.residuals: this method keeps nothing back of the layers recorded; leave it out")
    return [*(f"{GRADIENT}/{path}" for path in chosen), *residuals]


def matching(paths: Iterable[str], pattern: str, option: str) -> list[str]:
    """The paths in which a pattern is found.

    Raises:
      UserError: it is no regular expression; `option` is what the user gave it with.

    Example:
      >>> matching(["layer1/conv/kernel", "layer1/norm/scale"], "kernel$", "--layer")
      ['layer1/conv/kernel']
    """
    try:
        return [path for path in paths if re.search(pattern, path)]
    except re.error as error:
        raise UserError(f"{option} {pattern!r} is no regular expression: {error}") from error


def _check_size(parts: Parts, params: PyTree, names: list[str]) -> None:
    """Raise UserError where the whole recording would exceed the limit."""
    config, settings = parts.config, parts.config.record
    sizes = {path: x.size for path, x in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)}
    values = sum(sizes[name.partition("/")[2]] for name in names)
    steps, width = -(-config.steps // settings.every), np.dtype(settings.dtype).itemsize
    needed = steps * config.nodes * values * width / 1e6
    if needed > settings.max_megabytes:
        raise UserError(
            f"the recording would take {needed:,.1f} MB ({steps} steps x {config.nodes} nodes x {values:,} values x "
            f"{width} bytes), more than --record.max-megabytes {settings.max_megabytes:g}: record fewer layers "
            "(--record.layers), less often (--record.every), in float16 (--record.dtype), or raise the limit"
        )


def files(folder: Path) -> list[Path]:
    """The recorded steps' files in the order of the steps."""
    return sorted(folder.glob("step-*.npz"), key=step_of)


def step_of(path: Path) -> int:
    """The number of updates made before the step that a file holds.

    Example:
      >>> step_of(Path("gradients/step-00000020.npz"))
      20
    """
    return int(path.stem.partition("-")[2])


def save(folder: Path, step: int, phase: str, arrays: dict[str, np.ndarray], dtype: str = "float32") -> Path:
    """Write a step's file, whole.

    Args:
      folder: of the files.
      step: updates made before it.
      phase: its name.
      arrays: by name, [K, *shape].
      dtype: to write them in.

    Returns:
      The file.
    """
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
    """The power of two by which to divide so that the largest magnitude lies just within float16's range."""
    largest = np.abs(x).max(initial=0)
    exponent = np.frexp(largest)[1] - LARGEST if np.isfinite(largest) and largest > 0 else 0
    return np.float32(2.0) ** np.float32(max(exponent, -126))
