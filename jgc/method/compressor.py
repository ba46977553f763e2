"""A method, or a combination of methods, as a `Compressor`: the pure functions that loops call."""

from functools import lru_cache, partial
from typing import Any

import jax

from jgc import comm
from jgc.backend import traced_for
from jgc.checks.misuse import check_arrays, check_nodes
from jgc.comm.jaxprs import all_sent
from jgc.layout.leaves import sent_as
from jgc.layout.pack import values_of
from jgc.method.aggregate import aggregate
from jgc.method.messages import added, both_ways, scaled
from jgc.method.phases import DENSE
from jgc.method.plan import (
    Design,
    Group,
    assembled,
    check_phase,
    joined_shards,
    make_plan,
    part_of,
    phases_of,
    shard_states,
    walk,
)  # fmt: skip
from jgc.method.shards import placed
from jgc.method.states import first_state, of_shard, plan_of
from jgc.method.whole_step import step_of_shapes
from jgc.nodes.placement import ByShards
from jgc.types import Compressor, Message, Nodes, PyTree, State, Wire


def compressor_of(design: Design) -> Compressor:
    """The compressor of a method or a combination.

    Where devices of a node hold whole gradients, these are averaged first; where gradients are
    sharded, each compresses its shards (`jgc.method.shards`).
    """

    @lru_cache(maxsize=16)
    def planned(treedef, forms, axes, group_of, nodes):
        """The plan for gradients, and the shapes of the state that `init` makes for them."""
        arrays = [jax.ShapeDtypeStruct(*form) for form in forms]
        plan = make_plan(design, jax.tree.unflatten(treedef, arrays), axes, group_of)
        key, shards = jax.eval_shape(lambda: jax.random.key(0)), range(len(plan.axes))
        made = [jax.eval_shape(partial(of_shard, plan, i, nodes), key) for i in shards]
        return plan, joined_shards(made, axes, group_of) if plan.by_shards else made[0]

    def init(key, params, nodes):
        check_nodes(nodes)
        check_arrays(params)
        plan = plan_of(design, params, nodes)
        if plan.by_shards:
            return placed(partial(first_state, plan, key, nodes), nodes)
        leaves, treedef = jax.tree.flatten(params)
        # now, so that no trace of a step has to
        planned(treedef, tuple((x.shape, x.dtype) for x in leaves), None, (), nodes)
        return first_state(plan, key, nodes)

    def transition(old, new, state, nodes):
        check_phase(design, old)
        check_phase(design, new)
        after = [changed(design, old, new, shard, nodes) for shard in shard_states(state)]
        if not isinstance(state.shared, ByShards):
            return after[0]
        return joined_shards(after, state.shared.axes, state.shared.group_of)

    def wire(phase, shapes, nodes):
        check_phase(design, phase)
        step, arguments = step_of_shapes(compressor, phase, shapes, nodes)
        with comm.ledger() as sent:  # from the collectives that tracing a step calls
            traced = jax.make_jaxpr(step)(*arguments)
        physical = all_sent(sent, traced, nodes)
        return logical(compressor, phase, shapes, nodes)._replace(physical=physical)

    compressor = Compressor(
        init, partial(aggregate, planned), transition, wire, design.schedule,
        design.owns_momentum, design.next_phase, design,
    )  # fmt: skip
    return compressor


def changed(design: Design, old: Any, new: Any, state: State, nodes: Nodes) -> State:
    """The state after the transitions of all methods whose phase changes."""
    states = []
    parts = zip(walk(design, {}), phases_of(design, old), phases_of(design, new), strict=True)
    for (method, path, _), before, after in parts:
        part = part_of(state, path)
        if not path or before != after:
            part = method.transition(before, after, part, nodes)
        states.append(part)
    return assembled(design, iter(states))


def logical(compressor: Compressor, phase: Any, shapes: PyTree, nodes: Nodes) -> Wire:
    """`compressor.wire` without the physical bytes, which need a trace of the whole step."""
    plan = plan_of(compressor.method, shapes, nodes, check=False)
    phases = phases_of(plan.design, phase)
    with traced_for(nodes):  # codes fill their last word as the kind of device needs it
        each = [
            messages_of(group, phases[i % len(phases)], nodes)
            for i, group in enumerate(plan.groups)
        ]
    sizes = [nodes.size(plan.axes[group.shard]) for group in plan.groups]
    step, once = (
        added([scaled(m[i], n) for m, n in zip(each, sizes, strict=True)]) for i in (0, 1)
    )
    return Wire(step, (), once, nodes.size(nodes.fast))


def messages_of(
    group: Group, phase: Any, nodes: Nodes
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """A group's messages in a step of a phase, and on entering it."""
    method, layers = group.method, group.packing.layers
    if method.form == "leaves":
        leaves = [x for x in group.packing.leaves if x.start >= 0]
        size = sum(x.size * sent_as(x.dtype).itemsize for x in leaves)
        return both_ways({"dense": float(size)}), ()
    if phase == DENSE:
        step = both_ways({"dense": 4.0 * values_of(layers)})  # an all-reduce of all values
    else:
        step = method.messages(phase, layers, nodes)
    return step, method.sent_once(phase, layers, nodes)
