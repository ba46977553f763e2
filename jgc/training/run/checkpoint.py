"""Checkpoints. Only this file uses Orbax.

A checkpoint holds the train state as a flat dict of named host arrays (StandardSave) and plain data (JsonSave): the
step, the resolved config, versions, a checksum of every array and of the plain data, because Orbax does not detect
damaged values. The two newest are kept, and the last good one (`proof`). Orbax writes in the background; `check` and
`finish` raise its errors. The state saved after step N belongs to the phase of step N - 1: the transition at N runs
after a resume.
"""

import json
import logging
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jgc.checks.misuse import is_key, leaves_by_path
from jgc.loops.with_nodes import redistributed
from jgc.nodes.placement import placed_leaves
from jgc.nodes.placing import to_host
from jgc.training.errors import FAILED, NonFinite, UserError, cannot_write
from jgc.training.run.sane import Proof
from jgc.training.steps.step import TrainState, arrays_by_name, placements_by_name, with_arrays
from jgc.types import PyTree

KEEP = 2  # the newest, and one to fall back on
FOLDER, DAMAGED = "checkpoints", "damaged"
CHECKSUM = "checksum"  # of the plain data


class Restored(NamedTuple):
    """A checkpoint that passed its checksums."""

    step: int  # updates made
    arrays: dict[str, np.ndarray]  # by name, as saved
    host: dict[str, Any]  # the plain data
    damaged: tuple[str, ...]  # one message for each newer checkpoint that could not be read


def open_manager(run_dir: Path) -> ocp.CheckpointManager:
    """The manager of a run's checkpoints. Process 0 deletes half-written ones; only process 0 writes."""
    process = jax.process_index()
    logging.getLogger("absl").disabled = True  # Orbax logs a traceback of each failed thread, which it also raises
    # without this the managers of several processes would wait for each other inside Orbax
    only_here = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    options = ocp.CheckpointManagerOptions(  # `save` deletes: Orbax does not know which is good
        max_to_keep=None, cleanup_tmp_directories=process == 0, read_only=process != 0, create=False,
        multiprocessing_options=only_here,
    )  # fmt: skip
    try:
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager((run_dir / FOLDER).absolute(), options=options)
    except Exception as error:
        raise cannot_write(run_dir / FOLDER, error) from error


def save(manager: ocp.CheckpointManager, step: int, state: TrainState, host: dict[str, Any], proof: Proof) -> None:
    """Begin to write a checkpoint, unless the step already has one, after the one before is complete."""
    arrays = flatten(arrays_by_name(state))
    if not all(np.all(np.isfinite(x)) for name, x in arrays.items() if name.startswith("params.")):
        raise NonFinite(step, "a parameter has become NaN or infinite", kept(manager, proof))
    finish(manager, proof)
    before = kept(manager, proof)
    proof.saved(step)
    if jax.process_index() != 0 or manager.latest_step() == step:
        return
    needed, free = sum(x.nbytes for x in arrays.values()), shutil.disk_usage(manager.directory).free
    if free < needed:
        reason = f"it may need {needed:,} bytes, and {free:,} are free on the disk; {before}"
        raise UserError(f"cannot write checkpoint {step} to {manager.directory}: {reason}", FAILED)
    host = {**host, "step": step, "arrays": {name: label(x) for name, x in arrays.items()}}
    host |= {"first_loss": proof.first, "good": proof.good}
    host[CHECKSUM] = checksum(host)
    args = ocp.args.Composite(state=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host))
    with _failures(manager, proof):
        manager.save(step, args=args)


def check(manager: ocp.CheckpointManager, proof: Proof) -> None:
    """`finish`, if that needs no waiting: a failure is raised at the next step."""
    if not manager.is_saving_in_progress():  # Orbax's check_for_errors misses errors that its thread has seen first
        finish(manager, proof)


def finish(manager: ocp.CheckpointManager, proof: Proof) -> None:
    """Wait until the newest checkpoint is complete; delete all but the newest and the last good one."""
    with _failures(manager, proof):
        manager.wait_until_finished()
    if jax.process_index() == 0:
        for step in sorted(manager.all_steps())[:-KEEP]:
            if step != proof.good:
                manager.delete(step)


@contextmanager
def completed(manager: ocp.CheckpointManager, proof: Proof) -> Iterator[None]:
    """After the block, wait for the newest checkpoint; also after an error, whose message may name it."""
    try:
        yield
    except BaseException:
        with suppress(UserError):
            finish(manager, proof)
        raise
    finish(manager, proof)
    manager.close()


@contextmanager
def _failures(manager: ocp.CheckpointManager, proof: Proof) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # tensorstore reports a full disk as a ValueError
        _delete_half_written(Path(manager.directory), proof.newest)
        failed = cannot_write(f"checkpoint {proof.newest} to {manager.directory}", error)
        proof.lost()
        raise UserError(f"{failed}; {kept(manager, proof)}", FAILED) from error


def _delete_half_written(folder: Path, step: int | None) -> None:
    """Delete the folders of a failed checkpoint; a few that stay do no harm: the next start deletes them."""
    for _ in range(20):  # Orbax raises the first file's error while threads still write the other files
        for half_written in folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(half_written, ignore_errors=True)
        time.sleep(0.1)
        if not any(folder.glob(f"{step}.orbax-checkpoint-tmp*")):
            return


def kept(manager: ocp.CheckpointManager, proof: Proof) -> str:
    """Names the last good checkpoint, for the message of a run that must stop."""
    return proof.kept(manager.directory)


def proof_of(manager: ocp.CheckpointManager, found: "Restored | None") -> Proof:
    """The proof of a run that goes on from a checkpoint, or begins."""
    if found is None:
        return Proof()
    good = found.host["good"]
    return Proof(found.host["first_loss"], found.step, good if good in manager.all_steps() else None)


def restore(
    manager: ocp.CheckpointManager, check: Callable[[Restored], object] = lambda found: None
) -> Restored | None:
    """The newest checkpoint that is whole and of this run (`check` raises UserError if not); None without checkpoints.

    Newer ones are moved to the folder `damaged`. Raises UserError: there are checkpoints, and none is whole.
    """
    damaged: list[str] = []
    steps = sorted(manager.all_steps(), reverse=True)
    for step in steps:
        try:
            found = Restored(step, *_read(manager, step), tuple(damaged))
            check(found)
        except UserError as error:
            damaged.append(f"checkpoint {step} is not of this run: {error}")
            continue
        except Exception as error:  # Orbax raises many types for damaged files
            damaged.append(f"checkpoint {step} is damaged ({type(error).__name__}: {str(error)[:120]})")
            continue
        if jax.process_index() == 0:
            _move_aside(manager, [s for s in steps if s > step])
        return found
    if damaged:
        raise UserError(f"no whole checkpoint of this run in {manager.directory}: {'; '.join(damaged)}")
    return None


def _read(manager: ocp.CheckpointManager, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    host = manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
    if host.get(CHECKSUM) != checksum(host):
        raise ValueError("wrong checksum of the plain data")
    if host["step"] != step:
        raise ValueError(f"it belongs to step {host['step']}, not to the step of its folder")
    labels = host["arrays"]
    like = {name: np.empty(shape, jnp.dtype(dtype)) for name, (dtype, shape, _) in labels.items()}
    arrays = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    if wrong := [name for name in labels if label(arrays[name]) != labels[name]]:
        raise ValueError(f"wrong checksum of {wrong[0]}")
    return arrays, host


def _move_aside(manager: ocp.CheckpointManager, steps: list[int]) -> None:
    folder, target = Path(manager.directory), Path(manager.directory).parent / DAMAGED
    for step in steps:
        target.mkdir(exist_ok=True)
        number = len(list(target.glob(f"{step}-*")))
        (folder / str(step)).rename(target / f"{step}-{number}")
    if steps:
        manager.reload()


def checksum(host: dict[str, Any]) -> int:
    """CRC-32 of plain data, without the checksum."""
    rest = {name: value for name, value in host.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def label(x: np.ndarray) -> list[Any]:
    """Dtype, shape and CRC-32 of an array, as JSON has them."""
    return [str(x.dtype), list(x.shape), zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)]


def flatten(state: PyTree) -> dict[str, np.ndarray]:
    """A tree as named host arrays: random keys as their bits, without empty arrays (Orbax cannot save them).

    Collective: shards on other processes are gathered to every process, so all must call this.
    """
    plain = {name: jax.random.key_data(x) if is_key(x) else x for name, x in leaves_by_path(state, ".").items()}
    return {name: to_host(x) for name, x in plain.items() if x.size}


def fit(state: TrainState, restored: Restored, nodes: int) -> TrainState:
    """The restored arrays in the structure of a new state, redistributed if the number of nodes has changed.

    Arrays change as in `jgc.with_nodes`, but carried states keep their order, because the streams of a text do not
    depend on the number of nodes.
    """
    before, out, arrays = int(restored.host["config"]["nodes"]), [], arrays_by_name(state)
    placed = placed_leaves(placements_by_name(state), arrays)
    for (name, like), (_, placement, _) in zip(leaves_by_path(arrays, ".").items(), placed, strict=True):
        data = jax.random.key_data(like) if is_key(like) else like
        x = restored.arrays.get(name) if data.size else np.zeros(data.shape, data.dtype)
        if x is None and name == "local.largest_norm":  # of earlier versions: as before the first step
            x = np.zeros(data.shape, data.dtype)
        if x is not None and name.startswith("carry.") and before != nodes and x.size == data.size:
            x = x.reshape(data.shape)
        elif x is not None:
            x = redistributed(x, data.shape, placement, before, nodes)
        if x is None or x.shape != data.shape or x.dtype != data.dtype:
            want, form = (f"{a.dtype}{list(a.shape)}" if a is not None else "absent" for a in (data, x))
            raise UserError(f"checkpoint {restored.step} does not fit this run: {name} should be {want} and is {form}")
        out.append(jax.random.wrap_key_data(jnp.asarray(x)) if is_key(like) else x)
    return with_arrays(state, jax.tree.unflatten(jax.tree.structure(arrays), out))
