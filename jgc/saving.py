"""The state of a training loop as arrays alone, for Orbax, Equinox or pickle; for Flax's msgpack save its leaves."""

import json
from typing import Any, TypeVar

import jax
import numpy as np

from jgc.local_steps import LocalState
from jgc.make_step import LoopState
from jgc.method.phases import as_json, from_json
from jgc.misuse import is_key

S = TypeVar("S", LoopState, LocalState)

NOTES = 8192  # bytes; of fixed size, so that a fresh state has the shapes of a saved one


def as_arrays(state: S) -> S:
    """The state with arrays alone: its phases and the kinds of its keys are bytes, random keys are their numbers.

    Save this, and restore it into that of a fresh state, which says where arrays lie (docs/your_loop.md, Checkpoints).

    Args:
      state: of `jgc.make_step` or `jgc.local_steps`.

    Raises:
      TypeError: something else.
      ValueError: phases whose description takes more than 8,192 bytes.

    Example:
      >>> import jgc, jax.numpy as jnp, optax
      >>> nodes, method = jgc.make_nodes(2, devices=jax.devices()[:1]), jgc.compress.topk(alpha=0.5, warmup_steps=3)
      >>> init, _ = jgc.make_step(lambda w, x: jnp.sum(w * x), method, optax.sgd(0.1), nodes)
      >>> from_arrays(as_arrays(init(jax.random.key(0), jnp.zeros(4)))).phase.name
      'dense'
    """
    field = _field(state)
    phases = getattr(state, field) if field == "phases" else [getattr(state, field)]
    noted: dict[str, Any] = {"step": np.array(state.step), field: np.zeros(NOTES, np.uint8)}
    leaves, structure = jax.tree.flatten(state._replace(**noted))
    kinds = {i: str(jax.random.key_impl(x)) for i, x in enumerate(leaves) if is_key(x)}
    leaves = [jax.random.key_data(x) if i in kinds else x for i, x in enumerate(leaves)]
    text = json.dumps([list(kinds.items()), [as_json(phase) for phase in phases]]).encode()
    if len(text) > NOTES:
        raise ValueError(f"the phases' description takes {len(text):,} bytes, and there is room for {NOTES:,}")
    arrays = jax.tree.unflatten(structure, leaves)
    return arrays._replace(**{field: np.frombuffer(text.ljust(NOTES), np.uint8)})


def from_arrays(arrays: S) -> S:
    """The inverse of `as_arrays`.

    Raises:
      TypeError: something else than `as_arrays` returns.
    """
    field = _field(arrays)
    notes = getattr(arrays, field)
    if not hasattr(notes, "dtype"):
        raise TypeError("from_arrays takes what as_arrays returned, saved and restored")
    keys, saved = json.loads(np.asarray(notes).astype(np.uint8).tobytes())
    kinds, phases = dict(keys), tuple(from_json(phase) for phase in saved)
    leaves, structure = jax.tree.flatten(arrays)
    leaves = [jax.random.wrap_key_data(x, impl=kinds[i]) if i in kinds else x for i, x in enumerate(leaves)]
    own: dict[str, Any] = {"step": int(arrays.step), field: phases if field == "phases" else phases[0]}
    return jax.tree.unflatten(structure, leaves)._replace(**own)


def _field(state: Any) -> str:
    """The field that holds a state's phase, or phases."""
    if not isinstance(state, LoopState | LocalState):
        raise TypeError(f"expected the state of jgc.make_step or jgc.local_steps, got a {type(state).__name__}")
    return "phases" if isinstance(state, LocalState) else "phase"
