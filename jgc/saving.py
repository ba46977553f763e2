"""The state of a training loop as arrays alone, which every checkpoint library can save."""

import json
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgc.local_steps import LocalState
from jgc.make_step import LoopState
from jgc.method.phases import as_json, from_json

S = TypeVar("S", LoopState, LocalState)

NOTES = 8192  # bytes; of fixed size, so that a fresh state has the shapes of a saved one


def as_arrays(state: S) -> S:
    """The state with arrays alone: its phases and the kind of its key are bytes, its key is its numbers.

    Save this, and restore it into that of a fresh state, which says where arrays lie (docs/your_loop.md, Checkpoints).

    Args:
      state: of `jgc.make_step` or `jgc.local_steps`.

    Raises:
      TypeError: something else.
      ValueError: phases whose description takes more than 8,192 bytes.

    Example:
      >>> import jgc, optax
      >>> nodes, method = jgc.make_nodes(2, devices=jax.devices()[:1]), jgc.compress.topk(alpha=0.5, warmup_steps=3)
      >>> init, _ = jgc.make_step(lambda w, x: jnp.sum(w * x), method, optax.sgd(0.1), nodes)
      >>> from_arrays(as_arrays(init(jax.random.key(0), jnp.zeros(4)))).phase.name
      'dense'
    """
    field = _field(state)
    typed = jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
    phases = getattr(state, field) if field == "phases" else [getattr(state, field)]
    notes = [str(jax.random.key_impl(state.key)) if typed else "", [as_json(phase) for phase in phases]]
    text = json.dumps(notes).encode()
    if len(text) > NOTES:
        raise ValueError(f"the phases' description takes {len(text):,} bytes, and there is room for {NOTES:,}")
    own: dict[str, Any] = {
        "step": np.array(state.step),
        "key": jax.random.key_data(state.key) if typed else state.key,
        field: np.frombuffer(text.ljust(NOTES), np.uint8),
    }
    return state._replace(**own)


def from_arrays(arrays: S) -> S:
    """The inverse of `as_arrays`.

    Raises:
      TypeError: something else than `as_arrays` returns.
    """
    field = _field(arrays)
    notes = getattr(arrays, field)
    if not hasattr(notes, "dtype"):
        raise TypeError("from_arrays takes what as_arrays returned, saved and restored")
    kind, saved = json.loads(np.asarray(notes).astype(np.uint8).tobytes())
    phases = tuple(from_json(phase) for phase in saved)
    own: dict[str, Any] = {
        "step": int(arrays.step),
        "key": jax.random.wrap_key_data(arrays.key, impl=kind) if kind else arrays.key,
        field: phases if field == "phases" else phases[0],
    }
    return arrays._replace(**own)


def _field(state: Any) -> str:
    """The field that holds a state's phase, or phases."""
    if not isinstance(state, LoopState | LocalState):
        raise TypeError(f"expected the state of jgc.make_step or jgc.local_steps, got a {type(state).__name__}")
    return "phases" if isinstance(state, LocalState) else "phase"
