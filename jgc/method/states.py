"""A compressor's first state, made group by group, and the check of a later one."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jgc.layout import by_layer, vector
from jgc.method.plan import (
    Design,
    Group,
    Plan,
    assembled,
    check_fits,
    joined_shards,
    make_plan,
    part_of,
    parts_of,
    shard_states,
)  # fmt: skip
from jgc.method.shards import shards_of
from jgc.method.signature import check_like, check_signature
from jgc.method.step import Local
from jgc.nodes.placing import per_node
from jgc.types import Key, Nodes, PyTree, State

FORMS: Any = {"joined": vector, "leaves": vector, "layers": by_layer}  # by `Method.form`


def plan_of(design: Design, params: PyTree, nodes: Nodes, check: bool = True) -> Plan:
    """The plan for parameters, or their shapes; with shardings if they are sharded within a node.

    Raises:
      ValueError: the method does not fit the parameters or their shards.
    """
    if check:
        check_fits(design, parts_of(params, divided=True))
    shards = shards_of(params, nodes)
    if shards is None:
        return make_plan(design, params)
    return make_plan(design, shards.shapes, shards.axes, shards.group_of)


def first_state(plan: Plan, key: Key, nodes: Nodes) -> State:
    """The state of all groups before the first step; shared parts are drawn for each device."""
    if not plan.by_shards:
        return of_shard(plan, 0, nodes, key)
    states = []
    for i, axes in enumerate(plan.axes):
        shard_key, of_device = jax.random.fold_in(key, i), partial(of_shard, plan, i, nodes)
        if not axes:
            states.append(of_device(shard_key))
            continue
        devices = jnp.arange(nodes.size(axes))
        keys = jax.vmap(partial(jax.random.fold_in, shard_key))(devices)
        shared, local = jax.vmap(of_device)(keys)  # local: [F, K, ...]
        states.append(State(shared, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), local)))
    return joined_shards(states, plan.axes, plan.group_of)


def of_shard(plan: Plan, shard: int, nodes: Nodes, key: Key) -> State:
    """The first state of one group of shards."""
    groups = [group for group in plan.groups if group.shard == shard]
    return assembled(plan.design, iter([of_group(group, key, nodes) for group in groups]))


def of_group(group: Group, key: Key, nodes: Nodes) -> State:
    """The first state of one group: shared, and local with the node axis."""
    method, packing = group.method, group.packing
    for i in group.path:
        key = jax.random.fold_in(key, i)
    shared, per_node_state = method.init(key, packing.layers, nodes)
    memory = ()
    if method.form != "leaves":
        memory = FORMS[method.form].first(method.memory, packing, nodes)
    local = Local(memory, per_node_state, group.signature)
    return State(shared, jax.tree.map(lambda x: per_node(x, nodes), local))


def check_states(plan: Plan, made: State, state: State) -> None:
    """Raise ValueError, naming a leaf, for a state of other parameters or a different compressor.

    `made`: the shapes of the state that init makes, with a node axis in its local part.
    """
    shards = shard_states(state)
    for like, shard in zip(shard_states(made), shards, strict=True):
        check_like(like, shard)
    for group in plan.groups:
        check_signature(group.signature, part_of(shards[group.shard], group.path).local.signature)
