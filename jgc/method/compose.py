"""Simple methods from three parts: what is sent (codec), what is kept (memory), how it travels (exchange).

    compressor = compose(codec, memory, exchange)

A codec turns v f32[n] into a payload, a dict of arrays named by their kind ("values", "positions", ...). An
exchange turns all nodes' payloads into the mean of what they stand for. All-reduce adds payloads up before they are
decoded, which is right for linear codes alone; anything else is a ValueError when the method is built.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.layout.pack import Layer, Packing, make_packing, pack, unpack, values_of
from jgc.layout.select import Sparse
from jgc.memory import Memory, residual_of, take_in
from jgc.method import phases
from jgc.method.ages import ages
from jgc.method.diagnose import compare
from jgc.method.guard import guard
from jgc.nodes import per_node
from jgc.types import Array, Compressor, Info, Key, Message, Nodes, Phase, PyTree, State, Wire

AGREED = "agreed scales"  # the kind of what `Codec.agree` sends

Payload = dict[str, Array]
Layers = tuple[Layer, ...]


class Codec(NamedTuple):
    """What a node sends for a vector v f32[n] with static layers.

    Attributes:
      name: for error messages.
      linear: whether the mean of payloads is the payload of the mean.
      complete: whether a payload stands for all of v, so that nothing is left to be kept.
      encode: `(key, v, layers) -> payload`; `key` is this node's own.
      decode: `(payload, layers) -> f32[n] or Sparse`, what a payload stands for.
      mean: `(payloads with a leading axis [K], layers) -> f32[n]`, the mean of what they stand for; used by
        exchanges that gather.
      elements: `layers -> int`, how many gradient values a payload stands for.
      sparse: whether a payload is positions and values: `decode` gives `Sparse`, and zeros stand for zeros.
      agree: `(v, layers) -> f32[m]` or None: of what nodes agree on the largest before they encode, by an all-reduce;
        `encode` then takes the outcome as its last argument (TernGrad's shared scales).
    """

    name: str
    linear: bool
    complete: bool
    encode: Callable[..., Payload]
    decode: Callable[[Payload, Layers], Array | Sparse]
    mean: Callable[[Payload, Layers], Array]
    elements: Callable[[Layers], int]
    sparse: bool = False
    agree: Callable[[Array, Layers], Array] | None = None


class Item(NamedTuple):
    """One group of leaves on its way through an exchange."""

    codec: Codec
    layers: Layers
    payload: Payload


class Exchange(NamedTuple):
    """How payloads travel.

    Attributes:
      name: two exchanges of the same name can carry several groups at once.
      needs_linear: whether it adds payloads up before they are decoded.
      run: `(items, nodes) -> [f32[n] per item]`, the mean over nodes, equal on all of them.
      messages: `(bytes by kind of one node's payload, nodes) -> logical messages`.
    """

    name: str
    needs_linear: bool
    run: Callable[[Sequence[Item], Nodes], list[Array]]
    messages: Callable[[dict[str, float], Nodes], tuple[Message, ...]]


Stages = dict[Hashable, tuple[Codec, Exchange]]


class Parts(NamedTuple):
    """What a composed method is made of: its memory, and a codec and an exchange for each phase value."""

    memory: Memory
    by_phase: Stages


class Pending(NamedTuple):
    """A node's group between encoding and the exchange."""

    item: Item
    v: Array
    local: PyTree
    packing: Packing
    skip: Array | bool


def compose(codec: Codec, memory: Memory, exchange: Exchange) -> Compressor:
    """A method of one phase, which has the codec's name.

    Raises:
      ValueError: the exchange adds payloads up and the codec is not linear.
    """
    return compose_phases({codec.name: (codec, exchange)}, memory, phases.single(codec.name))


def compose_phases(by_phase: Stages, memory: Memory, schedule: tuple[Phase, ...]) -> Compressor:
    """A method of several phases over one memory."""
    for codec, exchange in by_phase.values():
        if exchange.needs_linear and not codec.linear:
            raise ValueError(
                f"{exchange.name} adds payloads up, and the code {codec.name!r} is not linear: "
                "the sum would decode to a wrong gradient; use an exchange that gathers"
            )
    parts = Parts(memory, by_phase)

    def init(key, params, nodes):
        local = memory.init(make_packing(params).size)
        return State((), jax.tree.map(lambda x: per_node(x, nodes), local))

    def aggregate(phase, key, grads, state, nodes, skip=False):
        pending = prepare(parts, phase, key, grads, state, nodes, skip)
        exchange = parts.by_phase[phase][1]
        return finish(parts, pending, exchange.run([pending.item], nodes)[0], state)

    def wire(phase, shapes, nodes):
        return Wire(logical(parts, phase, shapes, nodes), ())

    core = Compressor(
        init, aggregate, lambda old, new, state, nodes: state, wire, schedule, _diagnose(parts), parts=parts,
        owns_momentum=memory.owns_momentum, residual=residual_of(memory), skips=True,
    )  # fmt: skip
    return guard(core)


def prepare(
    parts: Parts, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes, skip: Array | bool = False
) -> Pending:
    """Accumulate and encode: everything before the exchange.

    What `skip` changes is a part of passes over memory that are there anyway, or as small as a payload.
    """
    codec, _ = parts.by_phase[phase]
    packing = make_packing(grads)
    v, local = take_in(parts.memory, state.local, grads, packing, codec.complete, skip)
    payload = _encode(codec, comm.node_key(key, nodes), v, packing.layers, lambda own: comm.pmax(own, nodes, AGREED))
    if codec.sparse:
        payload = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), payload)
    return Pending(Item(codec, packing.layers, payload), v, local, packing, skip)


def _encode(codec: Codec, key: Key, v: Array, layers: Layers, agree: Callable[[Array], Array]) -> Payload:
    """The codec's payload; `agree` makes all nodes' of what one node would agree to."""
    agreed = () if codec.agree is None else (agree(codec.agree(v, layers)),)
    return codec.encode(key, v, layers, *agreed)


def finish(parts: Parts, pending: Pending, mean: Array, state: State) -> tuple[PyTree, State, Info]:
    """Keep what was not sent and give the mean its shape: everything after the exchange."""
    item, skip = pending.item, pending.skip
    sent = item.codec.decode(item.payload, item.layers)
    if isinstance(sent, Sparse):
        sent = sent._replace(positions=jnp.where(skip, pending.packing.size, sent.positions))  # nowhere
    else:
        sent, mean = jnp.where(skip, 0, sent), jnp.where(skip, 0, mean)
    local = parts.memory.keep(pending.local, pending.v, sent, item.codec.complete)
    info = make_info(parts.memory.residual(local), item.codec.elements(item.layers))
    return unpack(mean, pending.packing), State(state.shared, local), info


def make_info(residual: Array | None, elements: int) -> Info:
    """Info of a node that keeps `residual` back and has sent `elements` values."""
    norm = jnp.float32(0) if residual is None else jnp.linalg.norm(residual.astype(jnp.float32))
    return Info(norm, jnp.float32(elements), jnp.int32(0), jnp.bool_(True))


def logical(parts: Parts, phase: Hashable, shapes: PyTree, nodes: Nodes) -> tuple[Message, ...]:
    """Messages of one step, from the shapes of the payload."""
    codec, exchange = parts.by_phase[phase]
    layers = make_packing(shapes).layers
    return _agreement(codec, layers) + exchange.messages(payload_sizes(codec, layers), nodes)


def payload_sizes(codec: Codec, layers: Layers) -> dict[str, float]:
    """Bytes of a payload by kind."""
    payload = jax.eval_shape(
        lambda key, v: _encode(codec, key, v, layers, lambda own: own), jax.random.key(0), _vector(layers)
    )
    return {kind: x.size * x.dtype.itemsize for kind, x in payload.items()}


def _agreement(codec: Codec, layers: Layers) -> tuple[Message, ...]:
    """What nodes send to agree on something before they encode: once up, once down."""
    agree = codec.agree
    if agree is None:
        return ()
    agreed = jax.eval_shape(lambda v: agree(v, layers), _vector(layers))
    size = float(agreed.size * agreed.dtype.itemsize)
    return tuple(Message("worker", direction, AGREED, size) for direction in ("up", "down"))


def _vector(layers: Layers) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((values_of(layers),), jnp.float32)


def _diagnose(parts: Parts) -> Callable[..., dict[str, Array]]:
    def diagnose(phase, key, grads, state, nodes):
        pending = prepare(parts, phase, key, grads, state, nodes)
        item = pending.item
        got = parts.by_phase[phase][1].run([item], nodes)[0]
        everything = item.codec.elements(item.layers) == pending.packing.size
        out = compare(got, pending.v, pack(grads, pending.packing), nodes, everything)
        out |= ages(pending.local, pending.packing, nodes)
        if "positions" in item.payload:
            sparse = item.codec.decode(item.payload, item.layers)
            out["positions"] = comm.broadcast(sparse.positions, jnp.int32(0), nodes, "diagnose")
            out["positions_n"] = jnp.int32(pending.packing.size)
        return out

    return diagnose
