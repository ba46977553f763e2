"""Checkpoints by Orbax, which no other file knows of.

A checkpoint is the train state as a flat dict of named host arrays (StandardSave) and plain data (JsonSave): the
step, the resolved config, versions, and a checksum of every array, so that a damaged file is found out whatever
the storage format notices. Saving is synchronous: the next step donates the buffers that are being saved.
The state saved after step N belongs to the phase of step N - 1; a transition at N runs when the loop goes on.
"""

import logging
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jgc.nodes import to_host
from jgc.training.errors import FAILED, NonFinite, UserError, cannot_write
from jgc.training.step import TrainState
from jgc.types import PyTree

KEEP = 2
FOLDER, DAMAGED = "checkpoints", "damaged"


class Restored(NamedTuple):
    """A checkpoint that was read back whole.

    Attributes:
      step: updates made.
      arrays: by name, as saved.
      host: the plain data saved beside them.
      damaged: newer checkpoints that could not be used, each with the reason.
    """

    step: int
    arrays: dict[str, np.ndarray]
    host: dict[str, Any]
    damaged: tuple[str, ...]


def open_manager(run_dir: Path) -> ocp.CheckpointManager:
    """The manager of a run's checkpoints; half-written ones of a killed process are cleared away.

    Where there are several processes, process 0's alone writes and clears; none waits for another inside of Orbax.
    """
    process = jax.process_index()
    only_here = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEEP if process == 0 else None,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=process == 0,
        read_only=process != 0,
        create=False,
        multiprocessing_options=only_here,
    )
    try:
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager((run_dir / FOLDER).absolute(), options=options)
    except Exception as error:
        raise cannot_write(run_dir / FOLDER, error) from error


def save(manager: ocp.CheckpointManager, step: int, state: TrainState, host: dict[str, Any]) -> None:
    """Write a checkpoint; nothing to do where that step has one already.

    Raises:
      NonFinite: the parameters are not finite.
      UserError: the disk is full or read-only. Older checkpoints stay.
    """
    arrays = flatten(state)
    if not all(np.all(np.isfinite(x)) for name, x in arrays.items() if name.startswith("params.")):
        raise NonFinite(step, "a parameter has become NaN or infinite", kept(manager))
    if jax.process_index() != 0 or manager.latest_step() == step:
        return
    needed, free = sum(x.nbytes for x in arrays.values()), shutil.disk_usage(manager.directory).free
    what = f"checkpoint {step} to {manager.directory}"
    if free < needed:
        reason = f"it may need {needed:,} bytes, and {free:,} are free on the disk; {kept(manager)}"
        raise UserError(f"cannot write {what}: {reason}", FAILED)
    host = {**host, "step": step, "arrays": {name: label(x) for name, x in arrays.items()}}
    try:
        with _silent():
            manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host))
            )
    except Exception as error:  # tensorstore reports a full disk as a ValueError
        for half_written in Path(manager.directory).glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(half_written, ignore_errors=True)
        raise UserError(f"{cannot_write(what, error)}; {kept(manager)}", FAILED) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Orbax logs a traceback for each thread that failed, beside the exception that it raises."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def kept(manager: ocp.CheckpointManager) -> str:
    """What is left of a run that has to stop."""
    newest = manager.latest_step()
    if newest is None:
        return "no checkpoint had been made yet"
    return f"the last good checkpoint is that of step {newest} in {manager.directory}"


def restore(manager: ocp.CheckpointManager) -> Restored | None:
    """The newest whole checkpoint, or None where there never was one. Damaged ones are put aside, not deleted.

    Raises:
      UserError: there are checkpoints, and all are damaged.
    """
    damaged: list[str] = []
    steps = sorted(manager.all_steps(), reverse=True)
    for step in steps:
        try:
            with _silent():
                arrays, host = _read(manager, step)
        except Exception as error:  # whatever a damaged file makes Orbax raise
            damaged.append(f"checkpoint {step} is damaged ({type(error).__name__}: {str(error)[:120]})")
            continue
        if jax.process_index() == 0:
            _put_aside(manager, [s for s in steps if s > step])
        return Restored(step, arrays, host, tuple(damaged))
    if damaged:
        raise UserError(f"no whole checkpoint in {manager.directory}: {'; '.join(damaged)}")
    return None


def _read(manager: ocp.CheckpointManager, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    host = manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
    labels = host["arrays"]
    like = {name: np.empty(shape, jnp.dtype(dtype)) for name, (dtype, shape, _) in labels.items()}
    arrays = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    wrong = [name for name in labels if label(arrays[name]) != labels[name]]
    if wrong:
        raise ValueError(f"wrong checksum of {wrong[0]}")
    return arrays, host


def _put_aside(manager: ocp.CheckpointManager, steps: list[int]) -> None:
    folder = Path(manager.directory)
    for step in steps:
        target = folder.parent / DAMAGED
        target.mkdir(exist_ok=True)
        number = len(list(target.glob(f"{step}-*")))
        (folder / str(step)).rename(target / f"{step}-{number}")
    if steps:
        manager.reload()


def label(x: np.ndarray) -> list[Any]:
    """Dtype, shape and CRC-32 of an array, as JSON has them."""
    return [str(x.dtype), list(x.shape), zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)]


def _named(state: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def is_key(x: Any) -> bool:
    """Whether an array holds random keys, which are saved and compared by their data."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def flatten(state: PyTree) -> dict[str, np.ndarray]:
    """A tree as named host arrays, one by one; random keys as their bits, empty ones left out (Orbax cannot save them).

    Parts that other processes hold are fetched from them, into every process: for process 0 to write.
    """
    plain = {name: jax.random.key_data(x) if is_key(x) else x for name, x in _named(state).items()}
    return {name: to_host(x) for name, x in plain.items() if x.size}


def fit(state: TrainState, restored: Restored, nodes: int) -> TrainState:
    """The restored arrays in the structure of a freshly made state, shared out anew where the nodes are others.

    Each node of a changed number gets the mean over the old nodes of what is local (residuals, momentum, batch
    statistics), which keeps their mean; what is shared but has one entry a node (an LGC decoder) is dealt out in turn.
    Carried states go with their streams: in the order of the nodes these are the same streams for any number of them.

    Raises:
      UserError: the checkpoint has not the arrays that this state needs.
    """
    before = int(restored.host["config"]["nodes"])
    leaves, out = _named(state), []
    for name, like in leaves.items():
        data = jax.random.key_data(like) if is_key(like) else like
        x = restored.arrays.get(name) if data.size else np.zeros(data.shape, data.dtype)
        if x is not None and x.shape != data.shape and before != nodes:
            x = x.reshape(data.shape) if _is_by_stream(name, x, data) else _share_out(x, before, nodes, _is_local(name))
        if x is None or x.shape != data.shape or x.dtype != data.dtype:
            found = "absent" if x is None else f"{x.dtype}{list(x.shape)}"
            raise UserError(
                f"checkpoint {restored.step} does not fit this run: {name} should be "
                f"{data.dtype}{list(data.shape)} and is {found}"
            )
        out.append(jax.random.wrap_key_data(jnp.asarray(x)) if is_key(like) else x)
    return jax.tree.unflatten(jax.tree.structure(state), out)


def _is_by_stream(name: str, x: np.ndarray, like: Any) -> bool:
    return name.startswith("carry.") and x.size == like.size


def _is_local(name: str) -> bool:
    return name.startswith(("batch_stats.", "compressor.local"))


def _share_out(x: np.ndarray, before: int, nodes: int, local: bool) -> np.ndarray:
    if x.ndim == 0 or x.shape[0] != before:
        return x
    if local and jnp.issubdtype(x.dtype, jnp.inexact):  # NumPy does not take bfloat16 for a number
        return np.broadcast_to(x.mean(axis=0, dtype=np.float64).astype(x.dtype), (nodes, *x.shape[1:]))
    return x[np.arange(nodes) % before]
