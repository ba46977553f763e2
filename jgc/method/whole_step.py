"""A compressor's step as a function of whole arrays: `aggregate` run by `jgc.on_nodes`."""

from collections.abc import Callable, Hashable

import jax

from jgc.method.states import first_state, plan_of
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL, SHARED, ByShards, Stacked, locally, placements_of
from jgc.nodes.placing import placed_shapes
from jgc.types import Compressor, Nodes, PyTree, State

PLACEMENTS = State(SHARED, LOCAL)


def step_on_nodes(
    aggregate: Callable,
    phase: Hashable,
    nodes: Nodes,
    params: PyTree = SHARED,
    state: PyTree = PLACEMENTS,
) -> Callable:
    """`aggregate` on whole arrays: (key, grads [K, ...], state) -> (aggregated, state, info [K]).

    `params` and `state` are placements (`jgc.placements_of`). Where parameters are sharded
    within a node, `info` is [K, F], of each device.
    """

    def one(key, grads, state):
        return aggregate(phase, key, grads, state, nodes)

    info = Stacked(LOCAL, nodes.fast) if isinstance(state.shared, ByShards) else LOCAL
    return on_nodes(one, nodes, ins=(SHARED, locally(params), state), outs=(params, state, info))


def step_of_shapes(
    compressor: Compressor, phase: Hashable, shapes: PyTree, nodes: Nodes
) -> tuple[Callable, tuple]:
    """A step on whole arrays, and the shapes of its arguments on the devices. Computes nothing.

    Args:
      compressor: any of `jgc.compress`.
      phase: value of the phase.
      shapes: a tree like the parameters; with shardings, where they are sharded within a node.
      nodes: the layout; its devices need not be present.

    Returns:
      `(key, grads [K, ...], state) -> (aggregated, state, info)`, see `step_on_nodes`, and the
      arguments' shapes.

    Raises:
      ValueError: the method does not fit the parameters or their shards.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    plan = plan_of(compressor.method, shapes, nodes)
    state = jax.eval_shape(lambda key: first_state(plan, key, nodes), key)
    of_params, of_state = placements_of(shapes), placements_of(state)
    step = step_on_nodes(compressor.aggregate, phase, nodes, of_params, of_state)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((nodes.count, *x.shape), x.dtype), shapes)
    # Explicit axes take shapes only with their shardings
    placed = zip((key, grads, state), (SHARED, locally(of_params), of_state), strict=True)
    return step, tuple(placed_shapes(tree, placements, nodes) for tree, placements in placed)
