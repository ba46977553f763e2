"""Compare an aggregate with the true mean over the nodes, and show residuals. Not part of a step.
"""

import math
from collections.abc import Sequence
from functools import partial, reduce
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.checks.misuse import check_compressor
from jgc.layout.pack import joined, leaf_paths, pack
from jgc.method.ages import ages
from jgc.method.aggregate import Job, jobs_of, means_inside, method_step, run
from jgc.method.exchange import exchanged
from jgc.method.memory import clip_local
from jgc.method.phases import DENSE
from jgc.method.plan import Plan, check_phase, layers_of_leaf, make_plan
from jgc.method.shards import whole
from jgc.method.states import FORMS, of_shard
from jgc.nodes.placement import ByShards, sharding_spec
from jgc.selection.entries import Sparse, as_vector
from jgc.types import Array, Compressor, Key, Nodes, PyTree, State


def cosine(a: Array, b: Array) -> Array:
    """Cosine of the angle between two vectors, f32[]; 0 where one of them is zero."""
    norms = jnp.linalg.norm(a) * jnp.linalg.norm(b)
    return jnp.where(norms > 0, jnp.vdot(a, b) / jnp.where(norms > 0, norms, 1), 0.0)


def relative_error(got: Array, true: Array) -> Array:
    """L2 norm of the error over that of the true vector, f32[]; 0 where the true vector is zero."""
    norm = jnp.linalg.norm(true)
    return jnp.where(norm > 0, jnp.linalg.norm(got - true) / jnp.where(norm > 0, norm, 1), 0.0)


def compare(
    got: Array, v: Array, g: Array, nodes: Nodes, everything: bool = False
) -> dict[str, Array]:
    """The diagnostics that every method has, f32[] each, of the aggregate `got` f32[n].

    `reconstruction_cosine` and `relative_error` compare it with the mean over nodes of v f32[n],
    gradient plus residual, but only where `got` is not zero, unless a code of `everything` was
    sent. `true_cosine` compares it with the whole mean of the gradients g f32[n].
    """
    mean = comm.pmean(v, nodes, "diagnose")
    true = mean if everything else jnp.where(got != 0, mean, 0.0)
    return {
        "reconstruction_cosine": cosine(got, true),
        "relative_error": relative_error(got, true),
        "true_cosine": cosine(got, comm.pmean(g, nodes, "diagnose")),
    }


def diagnose(
    compressor: Compressor, phase: Any, key: Key, grads: PyTree, state: State, nodes: Nodes
) -> dict[str, Array]:
    """Compare the aggregate of a step with the true mean over the nodes.

    Call it inside the node axis. It runs a step and sends whole gradients, so `aggregate` never
    calls it.

    Args:
      compressor: any of `jgc.compress`.
      phase, key, grads, state, nodes: see `Aggregate`.

    Returns:
      f32[] each: `reconstruction_cosine` and `relative_error` against the mean over nodes of
      v, gradient plus residual; `true_cosine` against the mean of the gradients. Also the method's
      diagnostics; a sparse method has `positions`, i32[mu]. A combination has the figures of the
      default's leaves, but `true_cosine` of all leaves. If gradients are sharded within a node,
      the figures are means over its devices, for their shards in the largest group of leaves.

    Raises:
      TypeError: `compressor` is not a Compressor, or a `Phase` instead of its value.
      ValueError: a phase that the method does not have.
    """
    check_compressor(compressor)
    design = compressor.method
    check_phase(design, phase)
    axes = group_of = None
    if isinstance(state.shared, ByShards):
        axes, group_of = state.shared.axes, state.shared.group_of
    plan = make_plan(design, grads, axes, group_of or ())
    leaves: Sequence[Array] = jax.tree.leaves(grads)
    if nodes.fast:
        leaves = means_inside(plan, leaves, nodes)
    if design.clip_norm:
        leaves = clip_local(leaves, design.clip_norm, nodes)
    jobs = jobs_of(plan, phase, key, leaves, state)
    if not plan.by_shards:
        return figures(jobs, nodes)
    sizes = [0] * len(plan.axes)
    for job in jobs:
        sizes[job.group.shard] += sum(x.size for x in job.grads.values())
    largest = sizes.index(max(sizes))
    size = nodes.size(plan.axes[largest])
    of_device = figures([job for job in jobs if job.group.shard == largest], nodes)
    return {
        name: comm.sum_inside(x, plan.axes[largest], nodes, "diagnose") / size
        for name, x in of_device.items() if x.ndim == 0
    }  # fmt: skip


def figures(jobs: Sequence[Job], nodes: Nodes) -> dict[str, Array]:
    """The diagnostics of the last group, with `true_cosine` of all of them."""
    job = jobs[-1]
    (group, phase, key, grads, state), packing = job, job.group.packing
    method, layers = group.method, packing.layers
    v, begun = FORMS[method.form].compensated(
        method.memory, state.local.memory, grads, packing, phase == DENSE, False
    )
    if method.stages is None:
        step = method_step(job, v, nodes)
    else:
        codec, exchange = method.stages[phase]
        step = exchanged(exchange, codec, key, v, layers, nodes)
    g = pack(grads, packing)
    if method.form == "layers":
        v, mean = joined(v), joined(step.mean)
    else:
        v, mean = v[: packing.size], as_vector(step.mean, layers)
    out = compare(mean, v, g, nodes, everything=not isinstance(step.sent, Sparse))
    out |= ages(begun, packing, nodes)
    sent = () if phase == DENSE else method.messages(phase, layers, nodes)
    sizes = [m.bytes for m in sent if (m.direction, m.field) == ("up", "positions")]
    size = max(sizes, default=0.0)
    if isinstance(step.sent, Sparse) and size:
        out["position_bytes"] = jnp.float32(size)
        out["positions"] = comm.broadcast(step.sent.positions, jnp.int32(0), nodes, "diagnose")
        out["positions_n"] = jnp.int32(packing.size)
    out |= method.figures(phase, key, v, g, step, state, layers, nodes)
    if len(jobs) > 1:
        pairs = zip(jobs, run(jobs, nodes, jnp.bool_(False)), strict=True)
        got = [x for job, result in pairs for x in floats(job.grads, result.leaves)]
        true = [x for job in jobs for x in floats(job.grads, job.grads.values())]
        mean = comm.pmean(joined(true), nodes, "diagnose")
        out["true_cosine"] = cosine(joined(got), mean)
    return out


def floats(grads: dict[str, Array], values: Any) -> list[Array]:
    """The f32 values of leaves of floats."""
    pairs = zip(grads.values(), values, strict=True)
    return [x.astype(jnp.float32) for g, x in pairs if jnp.issubdtype(g.dtype, jnp.inexact)]


def residual(compressor: Compressor, local: PyTree, shapes: PyTree) -> dict[str, Array]:
    """A node's residual by parameter.

    Args:
      compressor: any of `jgc.compress`.
      local: `state.local` of one node, without the node axis.
      shapes: a tree like the parameters; the parameters themselves where they are sharded
        within a node.

    Returns:
      The residual by parameter path, with the parameter's shape and dtype. Parameters without one
      are left out.

    Raises:
      TypeError: `compressor` is not a Compressor.
      ValueError: `state.local` of all nodes, with their axis.
    """
    check_compressor(compressor)
    paths, leaves = leaf_paths(shapes), jax.tree.leaves(shapes)
    if not isinstance(local, ByShards):
        plan = make_plan(compressor.method, shapes)
        check_of_one_node(plan, 0, local)
        return by_path(residuals(plan, 0, local), paths, leaves)
    pairs = list(zip(paths, leaves, strict=True))
    divided = {path: x.sharding for path, x in pairs if tuple(sharding_spec(x))}
    if any(local.axes) and not divided:
        raise ValueError(
            "the state is of shards: give the parameters themselves, which have shardings")
    of_device = []
    for path, x in pairs:
        shape = divided[path].shard_shape(x.shape) if path in divided else x.shape
        of_device.append(jax.ShapeDtypeStruct(shape, x.dtype))
    tree = jax.tree.unflatten(jax.tree.structure(shapes), of_device)
    plan = make_plan(compressor.method, tree, local.axes, local.group_of)
    out: dict[str, Array] = {}
    for i, (axes, part) in enumerate(zip(local.axes, local.parts, strict=True)):
        check_of_one_node(plan, i, part, devices=int(bool(axes)))
        if not axes:
            out |= by_path(residuals(plan, i, part), paths, of_device)
            continue
        size = math.prod(next(iter(divided.values())).mesh.shape[axis] for axis in axes)
        of_shard = jax.vmap(
            lambda part, i=i: by_path(residuals(plan, i, part), paths, of_device), axis_size=size
        )
        for path, x in of_shard(part).items():
            out[path] = whole(x, divided[path].spec, axes, divided[path].mesh.shape)
    return out


def check_of_one_node(plan: Plan, shard: int, local: PyTree, devices: int = 0) -> None:
    """Raise ValueError for a state with the node axis, behind axes of `devices`."""
    nodes = Nodes(1, 1)
    with_axis = jax.eval_shape(partial(of_shard, plan, shard, nodes), jax.random.key(0)).local
    pairs = zip(jax.tree.leaves(local), jax.tree.leaves(with_axis), strict=False)
    if any(x.ndim - devices >= made.ndim for x, made in pairs):
        raise ValueError(
            "local has the node axis: give one node's, jax.tree.map(lambda x: x[i], state.local)")


def residuals(plan: Plan, shard: int, local: PyTree) -> dict[int, dict[tuple[int, ...], Array]]:
    """The residuals of a group of shards: by leaf, and by layer of a stacked leaf."""
    out: dict[int, dict[tuple[int, ...], Array]] = {}
    for group in plan.groups:
        if group.shard != shard:
            continue
        memory = reduce(getitem, group.path, local).memory
        tree = FORMS[group.method.form].residual(group.method.memory, memory, group.packing)
        for path, part in group.parts.items() if tree is not None else ():
            if jnp.issubdtype(part.array.dtype, jnp.inexact):
                out.setdefault(part.leaf, {})[part.at] = tree[path]
    return out


def by_path(
    by_leaf: dict[int, dict[tuple[int, ...], Array]], paths: Sequence[str], leaves: Sequence[Any]
) -> dict:
    """Whole leaves by path; zeros for a layer without a residual if other layers have one."""
    out = {}
    for leaf, parts in sorted(by_leaf.items()):
        x = leaves[leaf]
        if () in parts:
            out[paths[leaf]] = parts[()]
            continue
        depth = len(next(iter(parts)))
        for index in np.ndindex(*x.shape[:depth]):
            parts.setdefault(index, jnp.zeros(x.shape[depth:], x.dtype))
        out[paths[leaf]] = layers_of_leaf(parts, x.shape)
    return out
