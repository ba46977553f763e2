"""A compressor's step as a function of whole arrays: what is compiled, counted and timed.

`jgc.on_nodes` runs one node's code on the node axis. Here it runs `aggregate`, with the placements of its arguments.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax

from jgc.method.shards import Shards, first_state, shards_of
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL, SHARED, ByShards, Stacked, locally, placed_shapes, placements_of
from jgc.types import Compressor, Nodes, PyTree, State

PLACEMENTS = State(SHARED, LOCAL)


def step_on_nodes(
    aggregate: Callable, phase: Hashable, nodes: Nodes, params: PyTree = SHARED, state: PyTree = PLACEMENTS
) -> Callable:
    """`aggregate` on whole arrays: (key, grads [K, ...], state) -> (aggregated, state, info [K]).

    `params` and `state` are the placements of the parameters and of the compressor's state (`jgc.placements_of`). Where
    devices of a node divide the parameters, `info` is that of each device, [K, F].
    """

    def one(key, grads, state):
        return aggregate(phase, key, grads, state, nodes)

    info = Stacked(LOCAL, nodes.fast) if isinstance(state.shared, ByShards) else LOCAL
    return on_nodes(one, nodes, ins=(SHARED, locally(params), state), outs=(params, state, info))


def step_of_shapes(compressor: Compressor, phase: Hashable, shapes: PyTree, nodes: Nodes) -> tuple[Callable, tuple]:
    """A step on whole arrays, and the shapes of its arguments as they lie on the devices: nothing is computed.

    Args:
      compressor: any of `jgc.compress`.
      phase: value of the phase.
      shapes: a tree like the parameters; with shardings, where devices of a node divide them.
      nodes: the layout; its devices need not be here.

    Returns:
      `(key, grads [K, ...], state) -> (aggregated, state, info)`, see `step_on_nodes`, and the arguments' shapes.

    Raises:
      ValueError: the method does not fit the parameters or their shards.
    """
    key, init = jax.eval_shape(lambda: jax.random.key(0)), compressor.core.init
    divided = checked_shards(compressor.core, shapes, nodes)
    if divided is None:
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        state = jax.eval_shape(partial(init, nodes=nodes), key, whole)
    else:
        state = jax.eval_shape(partial(first_state, init, shards=divided, nodes=nodes), key)
    of_params, of_state = placements_of(shapes), placements_of(state)
    step = step_on_nodes(compressor.aggregate, phase, nodes, of_params, of_state)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((nodes.count, *x.shape), x.dtype), shapes)
    # Explicit axes take shapes only with their shardings
    placed = zip((key, grads, state), (SHARED, locally(of_params), of_state), strict=True)
    return step, tuple(placed_shapes(tree, placements, nodes) for tree, placements in placed)


def checked_shards(core: Any, params: PyTree, nodes: Nodes) -> Shards | None:
    """How parameters are divided inside a node; None if no leaf is.

    Raises:
      ValueError: the method of this core does not fit them.
    """
    if core.check is not None:
        core.check(params)
    divided = shards_of(params, nodes)
    if divided is not None and core.next_phase is not None:
        raise ValueError(
            "this method, like gradiveq, finds the sizes of its phases in whole vectors during the run, and cannot "
            "compress shards: use a method with a fixed schedule, or parameters that no device of a node divides"
        )
    return divided
