"""Messages as values: a node's step without collectives, for messages that travel by other means.

    message, state, usable = encode(...)        on each node
    mean = decode(...)                          of the same messages in the same order, on any node
    state = unsend(...)                         of a message that no `decode` got

Inside the node axis, `compressor.aggregate` is these with an all-gather between them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgc.backend import plain_operations
from jgc.checks.misuse import check_compressor
from jgc.comm.collectives import from_words, to_words
from jgc.layout import vector
from jgc.layout.devices import as_flat, cut, filled, unusable
from jgc.layout.pack import unpack
from jgc.layout.vector import stored
from jgc.method.aggregate import jobs_of, tree_of
from jgc.method.exchange import Codec, Exchange, Payload, vector_of
from jgc.method.memory import clip_local
from jgc.method.phases import DENSE
from jgc.method.plan import Plan, check_phase, make_plan, phases_of
from jgc.nodes.placement import ByShards
from jgc.selection.entries import Sparse, as_vector, nonzero
from jgc.types import Array, Compressor, Key, Nodes, PyTree, State


def encode(
    compressor: Compressor,
    phase: Any,
    key: Key,
    grads: PyTree,
    state: State,
    node: int | Array,
    count: int,
) -> tuple[Array, State, Array]:
    """This node's message, and its state once the message counts as sent. No collectives.

    Args:
      compressor: a method that `compose` built, or a combination of such.
      phase: value of the phase.
      key: the same on all nodes.
      grads: this node's gradients, or the difference of parameters.
      state: the state of this node; its local leaves have no axis [K].
      node: this node's number, from which its random key is derived.
      count: K, the number of nodes; only a method that clips gradients uses it.

    Returns:
      The message u32[m], whose length follows from the shapes; the state after the step; whether
      the gradients are usable, bool[]. If not (NaN, Inf, a norm of 1e15 and more), the state is
      unchanged, and the message must not be decoded.

    Raises:
      TypeError: `compressor` is not a Compressor, or a `Phase` instead of its value.
      ValueError: the method communicates before its message is complete; the state is of shards;
        a phase that the method does not have.

    Example:
      >>> import jgc
      >>> params, topk = {"w": jnp.zeros(100)}, jgc.compress.topk(alpha=0.02)
      >>> state = topk.init(jax.random.key(0), params, jgc.make_nodes(1))
      >>> state = jgc.State(state.shared, jax.tree.map(lambda x: x[0], state.local))
      >>> grads = {"w": jnp.arange(100.0)}
      >>> message, state, usable = encode(topk, "top-k", jax.random.key(1), grads, state, node=0,
      ...     count=1)
      >>> decode(topk, "top-k", [message], params)["w"][-4:]
      Array([ 0.,  0., 98., 99.], dtype=float32)
    """
    plan, stages = _stages(compressor, phase, grads, state)
    leaves: Sequence[Array] = jax.tree.leaves(grads)
    skip = unusable([x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact) and x.size])
    if plan.design.clip_norm:
        leaves = clip_local(leaves, plan.design.clip_norm, Nodes(count, count))
    fields: Payload = {}
    after = []
    for i, job in enumerate(jobs_of(plan, phase, key, leaves, state)):
        group, _, group_key, grads, (shared, local) = job
        (codec, _), memory, packing = stages[i], group.method.memory, group.packing
        complete, node_key = job.phase == DENSE, jax.random.fold_in(group_key, node)
        v, begun = vector.compensated(memory, local.memory, grads, packing, complete, skip)
        if codec.encode_with_sent is not None:
            payload, sent = codec.encode_with_sent(node_key, v, packing.layers)
        else:
            payload = codec.encode(node_key, cut(v, packing.size), packing.layers)
            sent = codec.decode(payload, packing.layers)
        none = jnp.zeros((packing.size,), jnp.float32)
        settled = vector.settled(
            memory, local.memory, begun, v, none, sent, None, packing, complete, skip, node_key
        )
        fields |= _numbered(i, payload)
        after.append(State(shared, local._replace(memory=settled.memory)))
    with plain_operations():  # a TPU's order of narrow values is read by no other device
        message = to_words(fields) if fields else jnp.zeros((0,), jnp.uint32)
    return message, _like(state, after), ~skip


def decode(
    compressor: Compressor, phase: Any, messages: Sequence[Array] | Array, shapes: PyTree
) -> PyTree:
    """The mean of the nodes' decoded messages, a tree like the parameters. No collectives.

    Equal messages in equal order give equal bits, on devices of one kind.

    Args:
      compressor, phase: as in `encode`.
      messages: u32[K, m], or K messages; K may be any number of nodes.
      shapes: a tree like the parameters.

    Raises:
      ValueError: no messages, or messages of a different length than the shapes have; see `encode`.
    """
    plan, stages = _stages(compressor, phase, shapes)
    like = _payloads(plan, stages)
    if not len(messages):
        raise ValueError("messages must hold at least one message, got none")
    words = jnp.stack([jnp.asarray(x) for x in messages])
    if words.shape[1:] != (_length(like),) or words.dtype != jnp.uint32:
        raise ValueError(
            f"messages must be u32[{_length(like)}], got {words.dtype}{list(words.shape[1:])}: "
            "were they encoded by the same compressor, in the same phase, for the same parameters?")
    with plain_operations():
        payloads = jax.vmap(lambda row: from_words(row, like))(words)
    results = []
    for i, group in enumerate(plan.groups):
        codec, exchange = stages[i]
        layers = group.packing.layers
        mean = as_vector(exchange.mean(codec, _of_group(i, payloads), layers), layers)
        results.append(jax.tree.leaves(unpack(mean, group.packing)))
    return tree_of(plan, results, shapes)


def unsend(
    compressor: Compressor,
    phase: Any,
    key: Key,
    message: Array,
    state: State,
    shapes: PyTree,
    node: int | Array,
) -> State:
    """The state of a node whose message was not counted: the message returns to its residual.

    The residual becomes the one before the step plus the gradient, up to rounding. A method without
    residual loses the message. With factor masking, velocities stay cleared.

    Args:
      compressor, phase, key, node: as in `encode`.
      message: of `encode`.
      state: the state that `encode` returned, or a later one.
      shapes: a tree like the parameters.

    Raises:
      ValueError: the memory sends all that it has in this phase, and cannot take it back; see
        `encode`.
    """
    plan, stages = _stages(compressor, phase, shapes, state)
    with plain_operations():
        payloads = from_words(message, _payloads(plan, stages))
    after = []
    for i, job in enumerate(jobs_of(plan, phase, key, jax.tree.leaves(shapes), state)):
        group, _, group_key, _, (shared, local) = job
        memory, packing, (codec, _) = group.method.memory, group.packing, stages[i]
        before = jax.tree.map(as_flat, local.memory)
        residual = memory.residual(before)
        if residual is not None:
            sent = codec.decode(_of_group(i, payloads), packing.layers)
            minus: Array | Sparse
            if isinstance(sent, Sparse):
                minus = nonzero(sent._replace(values=-sent.values), residual.size)
            else:
                minus = filled(-sent, residual.size)
            new = memory.update(before, residual.astype(jnp.float32), minus, job.phase == DENSE)
            if new is before:
                raise ValueError(
                    f"the memory takes nothing back in the phase {phase!r}, which sends all that "
                    "it has")
            new = stored(jax.random.fold_in(group_key, node), new, before)
            local = local._replace(
                memory=jax.tree.map(lambda x, a: x.reshape(a.shape), new, local.memory)
            )
        after.append(State(shared, local))
    return _like(state, after)


def _stages(
    compressor: Compressor, phase: Any, tree: PyTree, state: State | None = None
) -> tuple[Plan, list[tuple[Codec, Exchange]]]:
    """The plan for a tree, and the codec and exchange of every group."""
    check_compressor(compressor)
    design = compressor.method
    check_phase(design, phase)
    if state is not None and isinstance(state.shared, ByShards):
        raise ValueError(
            "the state is of shards: messages of sharded parameters are not "
            "values")
    plan = make_plan(design, tree)
    stages: list[tuple[Codec, Exchange]] = []
    for group, value in zip(plan.groups, phases_of(design, phase), strict=True):
        name, stage = group.method.schedule[-1].name, (group.method.stages or {}).get(value)
        if stage is None or stage[0].agree is not None:
            raise ValueError(
                f"the method with the phase {name!r} communicates before its messages are "
                "complete, so they are not values: use one that sends in one go, such as topk, "
                "qsgd(exchange='gather') or onebit(exchange='gather')")
        stages.append(stage)
    return plan, stages


def _payloads(plan: Plan, stages: Sequence[tuple[Codec, Exchange]]) -> dict[str, Any]:
    """The shapes of the fields of a message."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    fields: dict[str, Any] = {}
    for i, (group, (codec, _)) in enumerate(zip(plan.groups, stages, strict=True)):
        layers = group.packing.layers
        shapes = jax.eval_shape(
            lambda key, v, c=codec, of=layers: c.encode(key, v, of), key, vector_of(layers)
        )
        fields |= _numbered(i, shapes)
    return fields


def _like(state: State, groups: Sequence[State]) -> State:
    """The state of all groups, in the structure of `state`."""
    leaves = jax.tree.leaves(tuple(zip(*groups, strict=True)))  # all shared, then all local
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _numbered(i: int, payload: Payload) -> Payload:
    return {f"{i:03d} {field}": x for field, x in payload.items()}


def _of_group(i: int, payloads: Payload) -> Payload:
    return {name[4:]: x for name, x in payloads.items() if name[:3] == f"{i:03d}"}


def _length(fields: dict[str, Any]) -> int:
    """Words of a message."""
    return sum(-(-int(np.prod(x.shape)) * x.dtype.itemsize // 4) for x in fields.values())
