"""The state of a training loop as arrays, for Orbax, Equinox or pickle (Flax's msgpack: leaves).

The array of the phases holds notes: JSON in the first 8,192 bytes; for each array of the state
three u32, a checksum of its values, one of its dtype and shape, and the axes of length 0, a bit
each; a CRC-32.
"""

import json
import math
import warnings
import zlib
from typing import Any, TypeVar

import jax
import numpy as np

from jgc.checks.loop_states import check_not_donated, check_phases
from jgc.checks.misuse import is_key, path_of
from jgc.loops.buffers import of_each_node, with_arrays
from jgc.loops.checksums import checksums
from jgc.loops.local_loop import LocalState
from jgc.loops.step_loop import LoopState
from jgc.method.phases import as_json, from_json

S = TypeVar("S", LoopState, LocalState)

NOTES = 8192  # bytes; of fixed size, so that a fresh state has the shapes of a saved one
DAMAGED = "the file is damaged, or the array has changed. Restore an older checkpoint"
FIRST = 2  # leaves before those with a checksum: the step and the notes


def as_arrays(state: S) -> S:
    """Convert a loop's state to arrays for a checkpoint; `from_arrays` checks their checksums.

    Phases and the types of random keys become bytes, and keys become their data. Orbax saves no
    empty arrays, so an axis of length 0 becomes one of length 1 (longer where it is sharded).
    Save the result, and restore it into the `as_arrays` of a fresh state, which determines the
    placement (docs/your_loop.md, Checkpoints); its `jax.eval_shape` also works.

    The result shares buffers with the state, which the next step donates. To keep it in memory,
    copy it before: `best = jax.tree.map(jnp.copy, jgc.as_arrays(state))`, to the host `np.array`.

    Checksums take a core about a second per GB; each process reads its shards. Collective: with
    several processes all must call this function.

    Raises:
      TypeError: not a state of `jgc.make_step` or `jgc.local_steps`.
      ValueError: a step has donated the state; or phases whose description takes more than 8,192
        bytes.

    Example:
      >>> import jgc, jax.numpy as jnp, optax
      >>> nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
      >>> method = jgc.compress.topk(alpha=0.5, warmup_steps=3)
      >>> init, _ = jgc.make_step(lambda w, x: jnp.sum(w * x), method, optax.sgd(0.1), nodes)
      >>> arrays = as_arrays(init(jax.random.key(0), jnp.zeros(4)))
      >>> from_arrays(arrays).phase.name
      'dense'
      >>> from_arrays(arrays._replace(params=jnp.ones(4)))
      Traceback (most recent call last):
      ValueError: the array 'params' has other values than as_arrays saved, by its checksum: ...
    """
    field = _field(state)
    check_phases(state)
    check_not_donated(state)
    phases = getattr(state, field) if field == "phases" else [getattr(state, field)]
    noted: dict[str, Any] = {"step": np.array(state.step), field: np.zeros(NOTES, np.uint8)}
    leaves, structure = jax.tree.flatten(of_each_node(with_arrays(state._replace(**noted))))
    kinds = {i: str(jax.random.key_impl(x)) for i, x in enumerate(leaves) if is_key(x)}
    leaves = [jax.random.key_data(x) if i in kinds else x for i, x in enumerate(leaves)]
    items = [list(kinds.items()), [as_json(phase) for phase in phases], int(state.step)]
    text = json.dumps(items).encode()
    if len(text) > NOTES:
        raise ValueError(f"the phases' description takes {len(text):,} bytes, more than {NOTES:,}")
    notes = text.ljust(NOTES) + _table(leaves[FIRST:]).tobytes()
    notes += zlib.crc32(notes).to_bytes(4, "little")
    arrays = jax.tree.unflatten(structure, [_filled(x) for x in leaves])
    return arrays._replace(**{field: np.frombuffer(notes, np.uint8)})


def from_arrays(arrays: S) -> S:
    """The inverse of `as_arrays`. With several processes all must call this function.

    Raises:
      TypeError: not a result of `as_arrays`.
      ValueError: an array, which the message names, differs in values, dtype or shape: a file is
        damaged, or the array was restored into a target of a different dtype; or a step has
        donated the arrays.

    Warns:
      UserWarning: an earlier version of jgc saved the arrays, without checksums.
    """
    field = _field(arrays)
    if not isinstance(getattr(arrays, field), np.ndarray | jax.Array):
        raise TypeError("from_arrays takes what as_arrays returned, saved and restored")
    cure = "before the step, copy what as_arrays returned, jax.tree.map(jnp.copy, arrays)"
    check_not_donated(arrays, cure)
    notes = np.asarray(getattr(arrays, field)).astype(np.uint8).tobytes()
    keys, saved, *step = _read(notes)
    leaves, structure = jax.tree.flatten(arrays)
    if step:
        table = np.frombuffer(notes[NOTES:-4], "<u4").reshape(-1, 3)
        if len(table) != (count := len(leaves) - FIRST):
            raise ValueError(
                f"as_arrays saved a state of {len(table)} arrays, and this one has {count}: "
                "restore into jgc.as_arrays(init(...)) of the same loop"
            )
        if step != [now := int(arrays.step)]:
            raise ValueError(
                f"the array 'step' is {now}, and as_arrays saved {step[0]}: {DAMAGED}"
            )
        empty = zip(leaves[FIRST:], table[:, 2].tolist(), strict=True)
        leaves[FIRST:] = [_emptied(x, axes) if axes else x for x, axes in empty]
        _check(jax.tree.unflatten(structure, leaves), table)
    else:
        warnings.warn("these arrays were saved without checksums", stacklevel=2)
    kinds, phases = dict(keys), tuple(from_json(phase) for phase in saved)
    for i, kind in kinds.items():
        leaves[i] = jax.random.wrap_key_data(leaves[i], impl=kind)
    fields: dict[str, Any] = {field: phases if field == "phases" else phases[0]}
    return jax.tree.unflatten(structure, leaves)._replace(step=int(arrays.step), **fields)


def _field(state: Any) -> str:
    """The field that holds a state's phase, or phases."""
    if not isinstance(state, LoopState | LocalState):
        cure = ": restore into jgc.as_arrays(init(...))" if isinstance(state, dict | list) else ""
        raise TypeError(
            "expected the state of jgc.make_step or jgc.local_steps, got a "
            f"{type(state).__name__}{cure}"
        )
    return "phases" if isinstance(state, LocalState) else "phase"


def _read(notes: bytes) -> list[Any]:
    """The JSON of the notes: two items in those without checksums."""
    try:
        items = json.loads(notes[:NOTES])
        if len(items) == 2 or zlib.crc32(notes[:-4]) == int.from_bytes(notes[-4:], "little"):
            return items
    except ValueError:
        pass
    raise ValueError(f"the notes that as_arrays writes with the phases have changed: {DAMAGED}")


def _table(leaves: list[Any]) -> np.ndarray:
    """For each array its two checksums and the axes of length 0, u32[number of arrays, 3]."""
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)  # by jax.eval_shape
    sums = np.zeros(len(leaves), np.uint32) if traced else checksums(leaves)
    axes = [sum(1 << axis for axis, size in enumerate(np.shape(x)) if size == 0) for x in leaves]
    return np.stack([sums, [_form(x) for x in leaves], axes], axis=1).astype("<u4")


def _form(x: Any) -> int:
    return zlib.crc32(f"{x.dtype}{list(x.shape)}".encode())


def _check(arrays: Any, table: np.ndarray) -> None:
    """Raise ValueError, naming the array, unless all have the checksums of the table."""
    named = jax.tree_util.tree_flatten_with_path(arrays)[0][FIRST:]
    sums = checksums([x for _, x in named])
    checked = zip(named, sums.tolist(), table.tolist(), strict=True)
    for (path, x), value, (right, form, _) in checked:
        if _form(x) != form:
            raise ValueError(
                f"the array {path_of(path)!r} is {x.dtype}{list(x.shape)}, and as_arrays saved "
                "a different dtype or shape: restore into jgc.as_arrays(init(...)) of the same "
                "loop (Orbax casts to the dtype that it is asked for)"
            )
        if value != right:
            raise ValueError(
                f"the array {path_of(path)!r} has other values than as_arrays saved, by its "
                f"checksum: {DAMAGED}"
            )


def _filled(x: Any) -> Any:
    """Zeros with elements for an array without, sharded alike; any other array unchanged."""
    if math.prod(np.shape(x)):
        return x
    pieces = [1] * x.ndim
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        count = x.sharding.num_devices
        pieces = [count // size for size in x.sharding.shard_shape((count,) * x.ndim)]
    return _zeros(x, tuple(size or piece for size, piece in zip(x.shape, pieces, strict=True)))


def _emptied(x: Any, axes: int) -> Any:
    """The inverse of `_filled`, given the axes of length 0, a bit each."""
    return _zeros(x, tuple(0 if axes >> axis & 1 else n for axis, n in enumerate(x.shape)))


def _zeros(x: Any, shape: tuple[int, ...]) -> Any:
    """Zeros of the given shape, with the dtype and the sharding of x."""
    zeros = np.zeros(shape, x.dtype)
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return zeros
    return jax.make_array_from_callback(shape, x.sharding, lambda index: zeros[index])
