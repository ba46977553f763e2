"""The skeleton of every method: it turns a step on one node's vector into a `Compressor`.

A method is a function `step` on one node and the messages that it sends. The skeleton owns everything else: packing,
memory, the skipped step, `Info`, the residual by parameter, the default diagnostics and the physical bytes.

    def step(phase, key, v, state, layers, nodes):
        mean = comm.pmean(v, nodes, "values")
        return Step(mean, sent=v, elements=v.size)

    compressor = from_step(step, memory=error_feedback(), schedule=phases.single("mine"), messages=...)
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.backend import backend, backend_of
from jgc.layout.opaque import sealed
from jgc.layout.pack import Layers, Packing, floats_by_path, make_packing, pack, unpack
from jgc.layout.tiles import as_before, as_flat, cut, filled, in_tiles
from jgc.method.ages import ages
from jgc.method.compensate import Begun, compensate, unless
from jgc.method.diagnose import compare
from jgc.method.guard import Core, guarded
from jgc.method.memory import Memory, has_residual, norm_of_rest, stored
from jgc.method.messages import own_or_dense
from jgc.method.phases import DENSE
from jgc.method.signature import Signature, check_signature, signature_of
from jgc.nodes.placement import per_node
from jgc.selection.entries import Sparse, SparseSum, added, entries_at, scatter_layers
from jgc.types import Array, Compressor, Info, Key, Message, NextPhase, Nodes, Phase, PyTree, State, Transition

MOST_VALUES = 2**31 - 1


class Step(NamedTuple):
    """The result of a method's step on one node.

    Attributes:
      mean: f32[n] or SparseSum, the aggregate, equal on all nodes.
      sent: f32[n] or Sparse, the part of v that counts as sent; the residual becomes v - sent.
      shared: the method's shared state after the step.
      own: the method's per-node state after the step, without the memory's.
      elements: how many values this node's message encodes.
      overflow: how many selected values did not fit into a buffer of fixed size.
      onto: f32[n] or None. The aggregate is the mean added to it, and becomes the method's shared state.
    """

    mean: Array | SparseSum
    sent: Array | Sparse
    shared: PyTree = ()
    own: PyTree = ()
    elements: int | Array = 0
    overflow: int | Array = 0
    onto: Array | None = None


class Local(NamedTuple):
    """A node's local state: the memory's and the method's own, and what parameters it was made for."""

    memory: PyTree
    own: PyTree
    signature: Signature


class StepFn(Protocol):
    """`step(phase, key, v, state, layers, nodes)`: one step of a method, on one node.

    Args:
      phase: value of the phase.
      key: the same on all nodes; `comm.node_key` derives a node's own key from it.
      v: f32[n], this node's gradient plus its residual.
      state: the state before the step: `state.shared`, and `state.local.own` of this node.
      layers: the ranges of v, with names and shapes.
      nodes: the layout.
    """

    def __call__(self, phase: Any, key: Key, v: Array, state: State, layers: Layers, nodes: Nodes, /) -> Step: ...


class InitFn(Protocol):
    """`init(key, layers, nodes) -> (shared, own)`: the method's state before the first step; `own` of one node."""

    def __call__(self, key: Key, layers: Layers, nodes: Nodes, /) -> tuple[PyTree, PyTree]: ...


class MessagesFn(Protocol):
    """`messages(phase, layers, nodes)`: the messages of each role in a step of a phase, or once on entering it."""

    def __call__(self, phase: Any, layers: Layers, nodes: Nodes, /) -> tuple[Message, ...]: ...


class FiguresFn(Protocol):
    """`figures(phase, key, v, g, step, state, layers, nodes)`: a method's own diagnostics."""

    def __call__(
        self, phase: Any, key: Key, v: Array, g: Array, step: Step, state: State, layers: Layers, nodes: Nodes, /
    ) -> dict[str, Array]: ...


def dense_step(v: Array, state: State, nodes: Nodes, algorithm: str = "psum") -> Step:
    """The step of an uncompressed phase: the exact mean. The method's own state does not change."""
    return Step(comm.mean_by(algorithm)(v, nodes, "dense"), v, state.shared, state.local.own, v.size)


def from_step(
    step: StepFn,
    *,
    memory: Memory,
    schedule: tuple[Phase, ...],
    messages: MessagesFn,
    init: InitFn = lambda key, layers, nodes: ((), ()),
    sent_once: MessagesFn = lambda phase, layers, nodes: (),
    transition: Transition = lambda old, new, state, nodes: state,
    next_phase: NextPhase | None = None,
    figures: FiguresFn = lambda *args: {},
    clip_norm: float = 0.0,
    stages: dict[Hashable, Any] | None = None,
    takes_filled: bool = False,
) -> Compressor:
    """Make a compressor of a step.

    Args:
      step: one step on one node. In the phase with value "dense" it must send all of v (`dense_step`).
      memory: the memory of each node.
      schedule: the phases.
      messages: logical messages of a step, for every phase except "dense".
      init: the method's state before the first step; nothing by default.
      sent_once: messages on entering a phase.
      transition: converts the state between two phases.
      next_phase: see `Compressor`.
      figures: the method's diagnostics; they extend the default ones, or replace those of the same name.
      clip_norm: each node first clips its whole gradient to the norm clip_norm / sqrt(K); 0 for no clipping.
      stages: codec and exchange of every phase value; only `compose` gives them.
      takes_filled: whether v may have zeros behind its n values, as on TPU (`jgc.layout.tiles`), where a copy may be
        needed to cut them off. `mean` has n values all the same, and so has `sent` unless it is Sparse.

    Raises:
      TypeError: something else in place of the memory or of the phases; in a step, of its `Step`.
      ValueError: a negative `clip_norm`; in a step, a mean, what is sent or a state of another shape.

    Example:
      >>> from jgc import comm
      >>> from jgc.layout.pack import values_of
      >>> from jgc.method.memory import error_feedback
      >>> from jgc.method.messages import both_ways
      >>> from jgc.method.phases import single
      >>> def step(phase, key, v, state, layers, nodes):
      ...     sent = comm.rounded(v, jnp.bfloat16)  # v.astype(bfloat16) and back is removed by XLA for GPU
      ...     return Step(comm.pmean(sent, nodes, "values"), sent, elements=v.size)
      >>> rounded = from_step(step, memory=error_feedback(), schedule=single("rounded"),
      ...     messages=lambda phase, layers, nodes: both_ways({"values": 4.0 * values_of(layers)}))
      >>> rounded.schedule[0].name
      'rounded'
    """
    if not isinstance(memory, Memory):
        raise TypeError(f"memory must be a jgc.method.memory.Memory, e.g. error_feedback(), got {memory!r}")
    if not (isinstance(schedule, tuple) and schedule and all(isinstance(phase, Phase) for phase in schedule)):
        raise TypeError(f"schedule must be a tuple of jgc.Phase, e.g. phases.single('mine'), got {schedule!r}")
    if not 0 <= clip_norm < float("inf"):
        raise ValueError(f"clip_norm must be finite and at least 0 (0 for no clipping), got {clip_norm}")
    method = _Method(step, memory, messages, init, sent_once, figures, takes_filled)
    return guarded(
        Core(
            init=method.first_state,
            aggregate=method.aggregate,
            transition=transition,
            messages=method.all_messages,
            schedule=schedule,
            owns_momentum=memory.owns_momentum,
            next_phase=next_phase,
            diagnose=method.diagnose,
            residual=method.residual,
            begin=method.begin,
            finish=method.finish,
            stages=stages,
            clip_norm=clip_norm,
            has_residual=lambda: has_residual(memory),
        )
    )


class _Method(NamedTuple):
    """A step with the arguments of `from_step` that its functions, those of a `Core`, need."""

    step: StepFn
    memory: Memory
    messages: MessagesFn
    init: InitFn
    sent_once: MessagesFn
    figures: FiguresFn
    takes_filled: bool

    def first_state(self, key: Key, params: PyTree, nodes: Nodes) -> State:
        packing = make_packing(params)
        if packing.size > MOST_VALUES:
            raise ValueError(
                f"the parameters have {packing.size:,} values, and a vector of all holds up to {MOST_VALUES:,}, for "
                "positions are i32: give groups of layers a method each (jgc.compress.per_layer), or divide parameters "
                "among the devices of a node (docs/meshes.md)"
            )
        shared, own = self.init(key, packing.layers, nodes)
        kept = self.memory.init(packing.size)
        if backend_of(nodes) == "tpu":
            kept = jax.tree.map(in_tiles, kept)
        local = Local(kept, own, signature_of(params))
        return State(shared, jax.tree.map(lambda x: per_node(x, nodes), local))

    def aggregate(
        self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes, skip: Array | bool
    ) -> tuple[PyTree, State, Info]:
        begun = self.begin(phase, grads, state, skip)
        result = self.result(phase, key, begun, state, nodes)
        return self.finish(phase, key, begun, result, state, nodes, skip)

    def result(self, phase: Hashable, key: Key, begun: Begun, state: State, nodes: Nodes) -> Step:
        v = begun.filled if self.takes_filled else begun.v
        result = self.step(phase, key, v, _seen(state, begun.packing), begun.packing.layers, nodes)
        _check_result(result, v, begun.packing.size, state)
        return result

    def begin(self, phase: Hashable, grads: PyTree, state: State, skip: Array | bool) -> Begun:
        check_signature(grads, state.local.signature)
        packing, kept = make_packing(grads), jax.tree.map(as_flat, state.local.memory)
        if not jax.tree.leaves(kept):  # no state that a bad gradient could spoil; `finish` discards the rest
            skip = False
        v, kept = compensate(self.memory, kept, grads, packing, phase == DENSE, skip)
        return Begun(v, kept, packing)

    def finish(
        self, phase: Hashable, key: Key, begun: Begun, result: Step, state: State, nodes: Nodes, skip: Array | bool
    ) -> tuple[PyTree, State, Info]:
        """The rest of a step. If `skip`, the aggregate is zeros and the state does not change."""
        v, kept, packing = begun
        mean, sent = result.mean, result.sent
        if sent is v and packing.size and not isinstance(mean, SparseSum):
            # v is the memory's own vector: the all-reduce of it comes before it is changed in place
            v = sent = sealed(v, skip & (mean[0] > 0))
        # TPU and GPU select while they cut the leaves out of the vector, in less time than plain slices take.
        late = backend() != "cpu" and isinstance(mean, SparseSum) and result.onto is None
        mean = _unless_zeros(False if late else skip, mean)
        before = state
        if result.onto is None:
            aggregate = as_vector(mean, packing.layers)
        else:  # in place
            total = added(result.onto, mean.entries if isinstance(mean, SparseSum) else mean)
            before, result = state._replace(shared=total), result._replace(shared=total)
            aggregate = jnp.where(skip, 0, total)
        # As codecs take them, so that XLA gathers them once; before v is changed in place.
        entries = entries_at(v, sent.positions) if isinstance(sent, Sparse) else None
        taken = _taken_off(sent, v, packing.size, skip)
        kept = self.memory.update(kept, v, taken, phase == DENSE)
        kept = stored(comm.node_key(key, nodes), kept, state.local.memory)
        shared, own = unless(skip, (before.shared, before.local.own), (result.shared, result.own))
        norm = _norm_kept(self.memory.residual(kept), v, entries, taken)
        info = Info(norm, jnp.float32(result.elements), jnp.int32(result.overflow), jnp.bool_(True))
        kept = jax.tree.map(as_before, kept, state.local.memory)
        return unpack(aggregate, packing, skip, late), State(shared, Local(kept, own, state.local.signature)), info

    def all_messages(
        self, phase: Hashable, shapes: PyTree, nodes: Nodes
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        layers = make_packing(shapes).layers
        return own_or_dense(self.messages, phase, layers, nodes), self.sent_once(phase, layers, nodes)

    def diagnose(self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes) -> dict[str, Array]:
        begun = self.begin(phase, grads, state, skip=False)
        v, kept, packing = begun.v, begun.memory, begun.packing
        g, layers = pack(grads, packing), packing.layers
        step = self.result(phase, key, begun, state, nodes)
        found = compare(as_vector(step.mean, layers), v, g, nodes, everything=not isinstance(step.sent, Sparse))
        found |= ages(kept, packing, nodes)
        sent = () if phase == DENSE else self.messages(phase, layers, nodes)
        size = max((m.bytes for m in sent if (m.direction, m.field) == ("up", "positions")), default=0.0)
        if isinstance(step.sent, Sparse) and size:
            found["position_bytes"] = jnp.float32(size)
            found["positions"] = comm.broadcast(step.sent.positions, jnp.int32(0), nodes, "diagnose")
            found["positions_n"] = jnp.int32(packing.size)
        return found | self.figures(phase, key, v, g, step, state, layers, nodes)

    def residual(self, local: Local, shapes: PyTree) -> dict[str, Array]:
        kept = self.memory.residual(local.memory)
        if kept is None:
            return {}
        return floats_by_path(unpack(as_flat(kept), make_packing(shapes)))


def _unless_zeros(skip: Array | bool, mean: Array | SparseSum) -> Array | SparseSum:
    """Zeros if `skip`; of entries their values, for to select among mu before scattering is less than among n after."""
    if not isinstance(mean, SparseSum):
        return jnp.where(skip, 0, mean)
    values = mean.entries.values if skip is False else jnp.where(skip, 0, mean.entries.values)
    return mean._replace(entries=mean.entries._replace(values=values))


def _taken_off(sent: Array | Sparse, v: Array, n: int, skip: Array | bool) -> Array | Sparse:
    """What the memory takes off v: what was sent, or nothing if `skip`. JAX drops writes to positions past the end."""
    if not isinstance(sent, Sparse):
        return filled(jnp.where(skip, 0, sent), v.size)
    outside = skip if v.size == n else skip | (sent.positions >= n)
    return sent._replace(positions=jnp.where(outside, v.size, sent.positions))


def _norm_kept(residual: Array | None, v: Array, entries: Array | None, taken: Array | Sparse) -> Array:
    """The norm of the residual, f32[]; 0 without one. `entries` are those of v at the positions of `taken`."""
    if residual is None:
        return jnp.float32(0)
    if isinstance(taken, Sparse) and entries is not None and backend() != "cpu":
        return norm_of_rest(v, entries, taken)
    return jnp.linalg.norm(residual.astype(jnp.float32))


def _check_result(result: Any, v: Array, n: int, state: State) -> None:
    """Raise TypeError or ValueError, naming the part, unless a step returned what `Step` says."""
    if not isinstance(result, Step):
        raise TypeError(f"the step of a method must return a jgc.method.from_step.Step, got a {type(result).__name__}")
    for name, x in (("mean", result.mean), ("sent", result.sent)):
        if not isinstance(x, SparseSum | Sparse) and jnp.shape(x) not in ((n,), v.shape):
            raise ValueError(f"the step's {name} must be f32[{n}], as v is, got the shape {list(jnp.shape(x))}")
    before, after = {"shared": state.shared, "own": state.local.own}, {"shared": result.shared, "own": result.own}
    for name, x in before.items():
        made: Any = jax.tree.structure(x)
        found: Any = jax.tree.structure(after[name])
        if result.onto is None and made != found:
            raise ValueError(f"the step's {name} must be like that of init, {made}, got {found}")


def _seen(state: State, packing: Packing) -> State:
    """The state as a step sees it: the memory's vectors have n values."""
    memory = jax.tree.map(lambda x: cut(as_flat(x), packing.size), state.local.memory)
    return state._replace(local=state.local._replace(memory=memory))


def as_vector(mean: Array | SparseSum, layers: Layers) -> Array:
    """A mean over nodes as f32[n]."""
    return scatter_layers(mean, layers) if isinstance(mean, SparseSum) else mean
