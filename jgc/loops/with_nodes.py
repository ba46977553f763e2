"""The state of a loop for a different number of nodes, or other devices: `with_nodes`."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgc.checks.loop_states import check_not_donated, check_phases
from jgc.checks.misuse import check_arrays, is_key, leaves_by_path
from jgc.checks.optax_states import holds_state
from jgc.checks.states import differing_leaf
from jgc.layout.devices import in_form
from jgc.loops.buffers import of_each_node, with_arrays
from jgc.loops.local_loop import LocalState
from jgc.loops.step_loop import LoopState
from jgc.method.signature import signed
from jgc.nodes.placement import (
    LOCAL,
    Placement,
    Stacked,
    on_node_axis,
    placed_leaves,
    placements_of,
)
from jgc.nodes.placing import place_array, to_host
from jgc.types import Array, PyTree

S = TypeVar("S")

ON_HOST = ("step", "phase", "phases")  # fields that are not arrays
# fields whose leaves have a leading axis [K]
OF_NODES = ("own", "inner", "largest_norm", "model_state")

DIVIDED = (
    "If the parameters are sharded differently than before, residuals cannot be "
    "converted: see docs/your_loop.md, Checkpoints"
)


def with_nodes(state: S, fresh: S) -> S:
    """Convert a loop's state to a different number of nodes K, other devices, or both.

        nodes = jgc.make_nodes(4)
        init, step = jgc.make_step(loss, compressor, optimizer, nodes)
        state = jgc.with_nodes(state, init(key, state.params))      # of 8 nodes before

    Every node starts from the mean over the old nodes, so mean residual and momentum do not
    change:

      - floats of each node, [K, ...], become their mean in float64 over the old nodes: residuals,
        momenta, the model state, and in local steps each node's parameters and inner state;
      - other values of each node, and shared arrays with an entry for each node, are repeated in
        turn; every repeat of a random key is a new key;
      - all other arrays, the step, the phase and the key of the loop stay.

    Collective: with several processes all must call this function. Each host needs memory for one
    whole array at a time.

    Args:
      state: of `jgc.make_step`, `jgc.local_steps` or `jgc.from_arrays`; or the state of an
        optimiser that holds `as_optax`. Its arrays are not donated.
      fresh: a state of the new nodes with the same compressor and optimisers, of which only shapes
        and devices are used: `init(key, state.params)`, with a model state
        `init(key, state.params, jax.tree.map(lambda x: x[0], state.model_state))`, of an
        optimiser's state `jgc.init_optax(tx, params, nodes)`.

    Returns:
      The state in new buffers, on the devices of `fresh`.

    Raises:
      TypeError: the two are not states of one type, or `jgc.as_arrays` made one of them.
      ValueError: the two differ in leaves, shapes or dtypes, parts of `state` have different
        numbers of nodes, a step has donated `state`, or parameters are sharded within a node
        differently than before, because residuals belong to shards.

    Example:
      >>> import jgc, optax
      >>> loss, method = lambda w, x: jnp.sum(w * x), jgc.compress.topk(alpha=0.5)
      >>> def loop(nodes):
      ...     return jgc.make_step(loss, method, optax.sgd(1.0), jgc.make_nodes(nodes,
      ...     devices=jax.devices()[:1]))
      >>> (init, step), (init_of_one, _) = loop(2), loop(1)
      >>> state, _ = step(init(jax.random.key(0), jnp.zeros(2)), jnp.array([[[1.0, 2.0]], [[3.0,
      ...     8.0]]]))
      >>> state.compressor.local.memory.tolist()
      [[1.0, 0.0], [3.0, 0.0]]
      >>> state = jgc.with_nodes(state, init_of_one(jax.random.key(0), state.params))
      >>> state.compressor.local.memory.tolist()
      [[2.0, 0.0]]
    """
    _check(state, fresh)
    leaves, want = leaves_by_path(_arrays(state)), leaves_by_path(_arrays(fresh))
    where = _placements(fresh)
    before, nodes = _count(leaves, where), _count(want, where)
    moved = [_moved(name, leaves[name], x, where[name], before, nodes) for name, x in want.items()]
    tree = jax.tree.unflatten(jax.tree.structure(_arrays(fresh)), moved)
    if isinstance(state, LoopState | LocalState):
        return state._replace(**tree)  # type: ignore[return-value]
    return tree


def redistributed(
    x: np.ndarray, shape: tuple[int, ...], placement: Placement, before: int, nodes: int
) -> np.ndarray:
    """Convert a host array of `before` nodes to `nodes` nodes and a shape; others do not change.

    Example:
      >>> redistributed(np.array([[1.0], [3.0]]), (3, 1), LOCAL, 2, 3).tolist()
      [[2.0], [2.0], [2.0]]
      >>> redistributed(np.array([[1], [3]]), (3, 1), "shared", 2, 3).tolist()
      [[1], [3], [1]]
    """
    # shared ones of shards: [F, K]
    axis = 1 if isinstance(placement, Stacked) and not on_node_axis(placement) else 0
    of_nodes = x.shape[axis : axis + 1] == (before,) and x.shape != shape
    if before != nodes and of_nodes:
        # np.issubdtype does not know bfloat16
        if on_node_axis(placement) and jnp.issubdtype(x.dtype, jnp.inexact):
            x = np.broadcast_to(_mean(x), (nodes, *x.shape[1:]))
        else:
            x = np.take(x, np.arange(nodes) % before, axis)
    return in_form(x, shape) if on_node_axis(placement) and x.shape != shape else x


def _mean(x: np.ndarray) -> np.ndarray:
    """The mean over the first axis, rounded once, and exact for equal values."""
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    return np.where(np.all(x == x[:1], axis=0), x[0], x.mean(axis=0, dtype=wide).astype(x.dtype))


def _moved(name: str, x: Any, like: Any, placement: Placement, before: int, nodes: int) -> Array:
    """One array for the new nodes, placed like the fresh state's array, `like`."""
    if is_key(x):
        keys = _keys(x, nodes) if on_node_axis(placement) and before != nodes else x
        host, impl = to_host(jax.random.key_data(keys)), jax.random.key_impl(x)
        return jax.random.wrap_key_data(_put(host, like), impl=impl)
    host = redistributed(to_host(x), like.shape, placement, before, nodes)
    if name != "key" and (host.shape, host.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"{name!r} is {x.dtype}{list(x.shape)}, and in the fresh state "
            f"{like.dtype}{list(like.shape)}: make that with the same parameters, compressor and "
            f"optimisers. {DIVIDED}"
        )
    return _put(host, like)


def _keys(x: Array, nodes: int) -> Array:
    """Random keys [K, ...] for `nodes` nodes: repeated in turn, and each repeat changed."""
    data = jnp.asarray(to_host(jax.random.key_data(x)))
    old = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    keys = old[np.arange(nodes) % len(old)]
    turn = np.repeat(np.arange(nodes) // len(old), keys.size // nodes)
    again = jax.vmap(jax.random.fold_in)(keys.reshape(-1), turn)
    return jnp.where(turn == 0, keys.reshape(-1), again).reshape(keys.shape)


def _put(host: np.ndarray, like: Any) -> Array:
    """A host array in a new buffer, placed like `like`."""
    host = np.array(host)  # JAX may alias NumPy's memory, which may belong to the old state
    return place_array(host, like.sharding) if isinstance(like, jax.Array) else jnp.asarray(host)


def _arrays(state: Any) -> PyTree:
    """The arrays of a loop's state, by field; any other tree unchanged."""
    if not isinstance(state, LoopState | LocalState):
        return state
    fields = of_each_node(with_arrays(state))._asdict()
    return {name: x for name, x in fields.items() if name not in ON_HOST}


def _placements(state: Any) -> dict[str, Placement]:
    """The placement of every array, by path."""
    arrays = _arrays(state)
    if arrays is state:
        each = placements_of(state)
    else:
        each = {name: LOCAL if name in OF_NODES else placements_of(x) for name, x in arrays.items()}
    return {name: placement for name, placement, _ in placed_leaves(each, arrays)}


def _count(leaves: dict[str, Any], where: dict[str, Placement]) -> int:
    """The number of nodes of a state; 0 where no array tells."""
    counts = {name: (*x.shape, 0)[0] for name, x in leaves.items() if on_node_axis(where[name])}
    first = next(iter(counts), "")
    for name, count in counts.items():
        if count != counts[first]:
            raise ValueError(
                f"the part {name!r} of the state is of {count} nodes, and {first!r} of "
                f"{counts[first]}: give the whole state that the old step returned"
            )
    return counts.get(first, 0)


def _check(state: Any, fresh: Any) -> None:
    """Raise TypeError or ValueError unless both are whole states of a type with the same leaves."""
    for x in (state, fresh):
        if isinstance(x, LoopState | LocalState):
            check_phases(x)
        elif not holds_state(x):
            raise TypeError(
                "with_nodes takes the state of jgc.make_step or jgc.local_steps, or that of an "
                f"optimiser that holds as_optax, got a {type(x).__name__}"
            )
    if type(state) is not type(fresh):
        raise TypeError(
            f"with_nodes takes two states of one type, got a {type(state).__name__} and a "
            f"{type(fresh).__name__}: make the fresh one by the new init, init(key, state.params)"
        )
    have, fragments = (len(getattr(x, "phases", ())) for x in (state, fresh))
    if have != fragments:
        raise ValueError(f"the state has {have} fragments, and the fresh one {fragments}")
    old, new = leaves_by_path(_arrays(state)), leaves_by_path(_arrays(fresh))
    if differs := differing_leaf(old, new):
        verb, name = differs
        cure = "make it with the same compressor and optimisers"
        if name.startswith("model_state") and verb == "lacks":
            cure = "give init the model state, jax.tree.map(lambda x: x[0], state.model_state)"
        raise ValueError(f"the fresh state {verb} the leaf {name!r}: {cure}")
    check_arrays(_arrays(state))
    check_not_donated(_arrays(state))
    made_for, before = signed(_arrays(fresh)), signed(_arrays(state))
    for path, shape, dtype in sorted(before - made_for):
        raise ValueError(
            f"the state was made for the parameter {path!r} as {dtype}{list(shape)}, and the "
            f"fresh state was not: make that with the same parameters. {DIVIDED}"
        )
