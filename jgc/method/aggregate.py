"""The one skeleton: it runs the plan of a step, whatever the methods of its groups are.

    flag       if any node's gradient is not usable, all nodes skip the step
    clip       each node clips its whole gradient
    begin      per group: v from residual and gradient
    step       per group: the method; groups with the same exchange share one collective
    finish     per group: the residual, `Info`, and the mean as leaves

A skipped step returns zeros, the unchanged state and an `Info` of zeros. The flag costs one small
collective, field "flag": see `jgc.comm.any_true`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.layout.devices import cut, unusable
from jgc.layout.leaves import mean_of_leaves
from jgc.layout.pack import leaf_paths
from jgc.layout.vector import unless
from jgc.method.exchange import encoded
from jgc.method.memory import clip_local
from jgc.method.phases import DENSE
from jgc.method.plan import Group, Plan, check_phase, layers_of_leaf, shard_states
from jgc.method.shards import key_of, sum_of
from jgc.method.states import FORMS, check_states
from jgc.method.step import Local, Step
from jgc.nodes.placement import ByShards
from jgc.selection.entries import Sparse, SparseSum
from jgc.types import Array, Info, Key, Nodes, PyTree, State


class Job(NamedTuple):
    """A group's part of a step."""

    group: Group
    phase: Any
    key: Key
    grads: PyTree  # the group's leaves by path
    state: State


class Result(NamedTuple):
    """A group after the step: the mean's leaves, the state, this node's `Info`."""

    leaves: Sequence[Array]
    state: State
    info: Info


def aggregate(
    planned: Callable[..., tuple[Plan, State]],
    phase: Any, key: Key, grads: PyTree, state: State, nodes: Nodes,
) -> tuple[PyTree, State, Info]:  # fmt: skip
    """One step of the plan on one node. See `jgc.types.Aggregate`."""
    plan = plan_of_step(planned, phase, grads, state, nodes)
    leaves: Sequence[Any] = jax.tree.leaves(grads)
    if nodes.slow:
        check_local(leaves, nodes)
    if nodes.fast:
        leaves = means_inside(plan, leaves, nodes)
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    skip = comm.any_true(unusable(floats), nodes)
    if plan.design.clip_norm:
        leaves = clip_local(leaves, plan.design.clip_norm, nodes)
    results = run(jobs_of(plan, phase, key, leaves, state), nodes, skip)
    info = results[0].info
    if len(results) > 1 or plan.by_shards:
        info = info_of(plan, [result.info for result in results], nodes)
    info = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), info)
    after = zip(*(result.state for result in results), strict=True)  # all shared, all local
    return (
        tree_of(plan, [result.leaves for result in results], grads),
        jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(tuple(after))),
        info._replace(finite=~skip),
    )


def plan_of_step(
    planned: Callable[..., tuple[Plan, State]],
    phase: Any, grads: PyTree, state: State, nodes: Nodes,
) -> Plan:  # fmt: skip
    """The plan that `init` made. Raise ValueError for a different phase, gradient or state."""
    leaves, treedef = jax.tree.flatten(grads)
    axes, group_of = None, ()
    if isinstance(getattr(state, "shared", None), ByShards):
        axes, group_of = state.shared.axes, state.shared.group_of
        if len(group_of) != len(leaves):
            raise ValueError(
                f"the gradients have {len(leaves)} leaves ({', '.join(leaf_paths(grads))}), "
                f"and the parameters had {len(group_of)} at init")
    forms = tuple((x.shape, x.dtype) for x in leaves)
    plan, made = planned(treedef, forms, axes, group_of, nodes)
    if phase not in [known.value for known in plan.design.schedule]:
        check_phase(plan.design, phase)
    shared = len(jax.tree.leaves(made.shared))
    like: Any = jax.tree.structure(made)
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(state), strict=False)
    if like != jax.tree.structure(state) or not all(
        a.dtype == b.dtype and (i >= shared or a.shape == b.shape) for i, (a, b) in enumerate(pairs)
    ):
        check_states(plan, made, state)  # says which leaf differs
    return plan


def check_local(leaves: Sequence[Any], nodes: Nodes) -> None:
    """Raise ValueError for gradients that are equal on all nodes."""
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    varying = (set(nodes.slow) & set(jax.typeof(x).mat.varying) for x in floats)
    if floats and not any(varying):
        comm.node_index(nodes)  # raises outside the node axis
        raise ValueError(
            "the gradients are equal on all nodes, so nothing is left to compress. Are they a mean "
            "that a compressor made? Or of jax.grad inside jgc.on_nodes, which for parameters that "
            "nodes share gives the sum over nodes: take them by jgc.node_grads, or with respect to "
            "jgc.comm.vary(params, nodes)")


def means_inside(plan: Plan, leaves: Sequence[Array], nodes: Nodes) -> Sequence[Array]:
    """Each leaf's mean over the fast axes of a node over which it is not sharded."""
    if not plan.by_shards:
        return [comm.exact_mean(x, nodes) for x in leaves]
    others = [tuple(a for a in nodes.fast if a not in axes) for axes in plan.axes]
    pairs = zip(leaves, plan.group_of, strict=True)
    return [comm.exact_mean(x, nodes._replace(fast=others[i])) for x, i in pairs]


def jobs_of(plan: Plan, phase: Any, key: Key, leaves: Sequence[Any], state: State) -> list[Job]:
    """The jobs of all groups."""
    jobs = []
    shards = shard_states(state) if plan.by_shards else [state]
    for group in plan.groups:
        group_key = key_of(key, group.shard, plan.axes[group.shard]) if plan.by_shards else key
        group_state, group_phase = shards[group.shard], phase
        for i in group.path:
            group_key, group_phase = jax.random.fold_in(group_key, i), group_phase[i]
            group_state = State(group_state.shared[i], group_state.local[i])
        grads = OrderedDict(
            (path, leaves[part.leaf][part.at] if part.at else leaves[part.leaf])
            for path, part in group.parts.items()
        )
        jobs.append(Job(group, group_phase, group_key, grads, group_state))
    return jobs


def run(jobs: Sequence[Job], nodes: Nodes, skip: Array) -> list[Result]:
    """The steps of all groups. If `skip`, means are zeros and states do not change."""
    sharing: dict[Any, list[int]] = {}  # jobs by exchange
    by_leaf = [job.group.method.form == "leaves" for job in jobs]
    for i, (group, phase, _, grads, _) in enumerate(jobs):
        # Leaves of two bytes travel as such, not in a vector of f32 values.
        narrow = by_leaf[i] and any(
            jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype != jnp.float32 for x in grads.values()
        )
        if group.method.stages is not None and not narrow:
            exchange = group.method.stages[phase][1]
            sharing.setdefault((group.shard, group.path[:-1], exchange.name), []).append(i)
    for i in (i for members in sharing.values() if len(members) > 1 for i in members):
        by_leaf[i] = False
    # v, which may end in zeros (`jgc.layout.devices`), and the memory's state before `finish`
    begun: dict[int, tuple[Any, PyTree]] = {
        i: FORMS[group.method.form].compensated(
            group.method.memory, state.local.memory, grads, group.packing, phase == DENSE,
            # without a state a bad gradient spoils nothing, and `finish` discards the rest
            skip if jax.tree.leaves(state.local.memory) else False,
        )
        for i, (group, phase, _, grads, state) in enumerate(jobs) if not by_leaf[i]
    }  # fmt: skip
    steps: dict[int, Step] = {}
    for members in sharing.values():
        if by_leaf[members[0]]:
            continue
        items = []
        for i in members:
            (group, phase, key, *_), v = jobs[i], begun[i][0]
            codec, exchange = (group.method.stages or {})[phase]
            items.append(encoded(codec, key, v, group.packing.layers, nodes))
        for i, item, mean in zip(members, items, exchange.run(items, nodes), strict=True):
            steps[i] = Step(mean, item.sent, elements=item.codec.elements(item.layers))
    results = []
    for i, job in enumerate(jobs):
        if by_leaf[i]:
            results.append(mean_leaf_by_leaf(job, nodes, skip))
            continue
        step = steps[i] if i in steps else method_step(job, begun[i][0], nodes)
        results.append(finish(job, *begun[i], step, nodes, skip))
    return results


def method_step(job: Job, v: Any, nodes: Nodes) -> Step:
    """The step of a method that `from_step` made."""
    (method, *_, packing, _), phase, key, _, state = job
    assert method.step is not None
    whole = v
    if method.form == "joined" and not method.takes_filled:
        v = cut(v, packing.size)
    step = method.step(phase, key, v, state, packing.layers, nodes)
    check_step(step, whole, packing.size, state)
    return step


def finish(job: Job, v: Any, begun: PyTree, step: Step, nodes: Nodes, skip: Array) -> Result:
    """The rest of a group's step. If `skip`, the mean is zeros and the state does not change."""
    (method, *_, packing, _), phase, key, _, state = job
    settled = FORMS[method.form].settled(
        method.memory, state.local.memory, begun, v, step.mean, step.sent, step.onto, packing,
        phase == DENSE, skip, comm.node_key(key, nodes),
    )  # fmt: skip
    before = state.shared
    if step.onto is not None:
        step, before = step._replace(shared=settled.total), settled.total
    shared, per_node = unless(
        skip, (before, state.local.per_node), (step.shared, step.per_node)
    )
    info = Info(settled.norm, jnp.float32(step.elements), jnp.int32(step.overflow), jnp.bool_(True))
    after = State(shared, Local(settled.memory, per_node, state.local.signature))
    return Result(jax.tree.leaves(settled.leaves), after, info)


def mean_leaf_by_leaf(job: Job, nodes: Nodes, skip: Array) -> Result:
    """The step of `dense`: the exact mean of every leaf."""
    mean = mean_of_leaves(list(job.grads.values()), job.group.packing, nodes, skip)
    sent = jnp.float32(job.group.packing.size)
    return Result(mean, job.state, Info(jnp.float32(0), sent, jnp.int32(0), jnp.bool_(True)))


def check_step(step: Any, v: Any, n: int, state: State) -> None:
    """Raise TypeError or ValueError, naming the part, unless a step returned a valid `Step`."""
    if not isinstance(step, Step):
        raise TypeError("the step of a method must return a jgc.method.from_step.Step, got a "
                        f"{type(step).__name__}")  # fmt: skip
    shapes = [(n,), v.shape] if hasattr(v, "shape") else [x.shape for x in v]
    for name, x in (("mean", step.mean), ("sent", step.sent)):
        if not isinstance(x, SparseSum | Sparse | list | tuple) and jnp.shape(x) not in shapes:
            raise ValueError(
                f"the step's {name} must be f32[{n}], as v is, got the shape {list(jnp.shape(x))}")
    before = {"shared": state.shared, "per_node": state.local.per_node}
    after = {"shared": step.shared, "per_node": step.per_node}
    for name, x in before.items():
        made: Any = jax.tree.structure(x)
        returned: Any = jax.tree.structure(after[name])
        if step.onto is None and made != returned:
            raise ValueError(f"the step's {name} must be like that of init, {made}, got {returned}")


def info_of(plan: Plan, infos: Sequence[Info], nodes: Nodes) -> Info:
    """A device's share of its node's `Info`, from the infos of all groups."""
    totals = []
    for shard in range(len(plan.axes)):
        members = [x for x, group in zip(infos, plan.groups, strict=True) if group.shard == shard]
        norms, elements, overflow, _ = (jnp.stack(x) for x in zip(*members, strict=True))
        norm = jnp.linalg.norm(norms) if len(members) > 1 else norms[0]
        overflow = jnp.sum(overflow, dtype=jnp.int32)
        totals.append(Info(norm, jnp.sum(elements), overflow, members[0].finite))
    return sum_of(totals, plan.axes, nodes) if plan.by_shards else totals[0]


def tree_of(plan: Plan, results: Sequence[Sequence[Any]], like: PyTree) -> PyTree:
    """The tree of all groups' leaves; `like` has its structure and shapes."""
    leaves, treedef = jax.tree.flatten(like)
    parts: list[dict[tuple[int, ...], Any]] = [{} for _ in leaves]
    for group, result in zip(plan.groups, results, strict=True):
        for part, x in zip(group.parts.values(), result, strict=True):
            parts[part.leaf][part.at] = x
    return jax.tree.unflatten(treedef, [
        of_leaf[()] if () in of_leaf else layers_of_leaf(of_leaf, x.shape)
        for of_leaf, x in zip(parts, leaves, strict=True)
    ])  # fmt: skip
