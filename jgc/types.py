"""The contract of every jgc method, as plain data.

A compressor is a NamedTuple of pure functions. It takes each node's gradients and returns their
mean over all nodes. The words used throughout the package:

    K       number of nodes (data-parallel workers), `nodes.count`
    g       a node's gradient as a flat vector, f32[n]
    shared  the part of the state that is the same on every node
    local   the part of the state that differs between nodes; outside a step its leaves are [K, ...]
"""

from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh

Array = jax.Array
PyTree = Any
Key = Array

EMULATED = "jgc_emulated"  # name of the vmapped axis: the nodes of one device


class Nodes(NamedTuple):
    """The number of nodes, and where they run. Hashable and static.

    Attributes:
      count: K, the number of nodes.
      per_device: nodes on each device; more than one are emulated there.
      mesh: the devices; None means that all nodes are emulated on one device.
      slow: mesh axes between nodes; communication over them is compressed.
      fast: mesh axes inside a node. Parameters are sharded over them, and each device compresses
        its shards; or its devices hold copies, and compress the mean of their gradients.
    """

    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    per_device: int
    mesh: Mesh | AbstractMesh | None = None
    slow: tuple[str, ...] = ()
    fast: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """ "emulated", "one per device" or "several per device"."""
        if self.mesh is None:
            return "emulated"
        return "one per device" if self.per_device == 1 else "several per device"

    def size(self, axes: Sequence[str]) -> int:
        """Number of devices along mesh axes."""
        return prod(self.mesh.shape[axis] for axis in axes)  # type: ignore[union-attr]


class State(NamedTuple):
    """The state that a compressor carries from step to step.

    Attributes:
      shared: the same on every node: autoencoder weights, counters.
      local: differs between nodes: residual, momentum. Leaves have an axis [K] outside the step.
    """

    shared: PyTree
    local: PyTree


class Info(NamedTuple):
    """Diagnostics of a step that need no communication. Scalars on each node.

    Attributes:
      residual_norm: f32[], L2 norm of this node's residual; 0 without a residual. For sparse
        methods on GPU and TPU within a thousandth of the norm of gradient plus residual.
      elements_sent: f32[], gradient values, coefficients or factors in this node's message.
      overflow: i32[], selected values that did not fit into a buffer of fixed size.
      finite: bool[], False if all nodes skipped the step, because a node's gradient held NaN or
        Inf, or had a norm of 1e15 or more.
    """

    residual_norm: Array
    elements_sent: Array
    overflow: Array
    finite: Array


class Message(NamedTuple):
    """An entry of the logical byte count: a payload field that a node sends or receives in a step.

    Attributes:
      role: "leader", "worker" or "server".
      direction: "up" (towards the server or the other nodes) or "down".
      field: the payload field: "values", "positions", "code", "scales", "dense" ...
      bytes: its size in bytes.
    """

    role: str
    direction: str
    field: str
    bytes: float


class Sent(NamedTuple):
    """One collective, seen from one device.

    Attributes:
      op: the collective's name in the compiled program, e.g. "all-reduce".
      field: its payload field; reports show "flag", "metrics" and "statistics" as `other`.
      bytes: sent by one device, by the collective's algorithm (`jgc.comm.ledger.bytes_sent`).
    """

    op: str
    field: str
    bytes: Fraction


class Wire(NamedTuple):
    """Bytes that one step of a phase sends. Logical and physical bytes are never mixed.

    Attributes:
      logical: messages of each role in the paper's topology, per step.
      physical: collectives of the compiled step, bytes per device; empty on a single device.
      once: messages sent once, on entering the phase (e.g. trained weights).
      devices: devices of a node, each of which sends `physical`.
    """

    logical: tuple[Message, ...]
    physical: tuple[Sent, ...]
    once: tuple[Message, ...] = ()
    devices: int = 1


class Phase(NamedTuple):
    """A range of training steps that share one compiled step.

    Attributes:
      name: for logs and reports, e.g. "compressed".
      start: first step of the phase.
      value: the static, hashable argument `phase` of the compressor's functions; may carry sizes.
      parts: in a combination of methods (`per_layer`), the phase of each method.
    """

    name: str
    start: int
    value: Hashable
    parts: tuple[Any, ...] = ()


class Init(Protocol):
    """Return the state before the first step. Its local leaves have a leading axis [K]."""

    def __call__(self, key: Key, params: PyTree, nodes: Nodes) -> State: ...


class Aggregate(Protocol):
    """Run one step. Call it inside the node axis (`jgc.on_nodes`).

    Args:
      phase: value of the phase, static.
      key: the same on all nodes.
      grads: this node's gradients.
      state: the shared state, and the local state of this node.
      nodes: the layout.

    Returns:
      The mean over nodes, equal on all nodes, with the structure, shapes and dtypes of the
      gradients; the state after the step; this node's `Info`.
    """

    def __call__(
        self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes
    ) -> tuple[PyTree, State, Info]: ...


class Transition(Protocol):
    """Convert the state from one phase to the next, on the host; local leaves are [K, ...]."""

    def __call__(self, old: Hashable, new: Hashable, state: State, nodes: Nodes) -> State: ...


class WireOf(Protocol):
    """Return the bytes of a step of a phase. `shapes` is a tree like the parameters."""

    def __call__(self, phase: Hashable, shapes: PyTree, nodes: Nodes) -> Wire: ...


class NextPhase(Protocol):
    """Return the phase of `step`, given the phase and the state of the step before, on the host.

    Reading arrays makes the host wait for the devices: do so in few steps.
    """

    def __call__(self, before: Phase, step: int, state: State, nodes: Nodes) -> Phase: ...


class Compressor(NamedTuple):
    """A method: four pure functions and the schedule of its phases; see `jgc.method.from_step`.

    Attributes:
      init: `(key, params, nodes) -> State`.
      aggregate: `(phase, key, grads, state, nodes) -> (aggregated, State, Info)`, one step.
      transition: `(old_phase, new_phase, state, nodes) -> State`, between two phases.
      wire: `(phase, shapes_and_dtypes, nodes) -> Wire`, the bytes of a step.
      schedule: the phases in order; the first starts at step 0. With a `next_phase`, the schedule
        is a plan: it lists each phase once, and sizes in phase values are upper bounds.
      owns_momentum: whether the momentum is in the method's memory, not in the optimiser.
      next_phase: `(phase, step, state, nodes) -> Phase`; None if the schedule decides.
      method: the method's record, or a combination of several. Private to jgc.
    """

    init: Init
    aggregate: Aggregate
    transition: Transition
    wire: WireOf
    schedule: tuple[Phase, ...]
    owns_momentum: bool
    next_phase: NextPhase | None
    method: Any
