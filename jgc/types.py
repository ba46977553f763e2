"""The contract of every jgc method, as plain data.

A compressor is a NamedTuple of pure functions. It takes each node's gradients and returns their
mean over all nodes. The words used throughout the package:

    K       number of nodes (data-parallel workers), `nodes.count`
    g       a node's gradient as a flat vector, f32[n]
    shared  the part of the state that is the same on every node
    local   the part of the state that each node holds for itself; outside a step its leaves have a
            leading axis [K]
"""

from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh

Array = jax.Array
PyTree = Any
Key = Array

EMULATED = "jgc_emulated"  # name of the vmapped axis: the nodes of one device


class Nodes(NamedTuple):
    """How many nodes there are, and where they run. Hashable and static.

    Attributes:
      count: K, the number of nodes.
      per_device: nodes on each device; more than one are emulated there.
      mesh: the devices; None means that all nodes are emulated on one device.
      slow: mesh axes between nodes; communication over them is compressed.
      fast: mesh axes inside a node. Its devices divide the parameters along them, and each
        compresses its own shards; or they hold copies, and gradients are averaged over them before
        they are compressed.
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
        size = 1
        for axis in axes:
            size *= self.mesh.shape[axis]  # type: ignore[union-attr]
        return size


class State(NamedTuple):
    """The state that a compressor carries from step to step.

    Attributes:
      shared: the same on every node: autoencoder weights, counters.
      local: differs between nodes: residual, momentum. Leaves have a leading axis [K] outside the
        step and none inside it.
    """

    shared: PyTree
    local: PyTree


class Info(NamedTuple):
    """Diagnostics of a step that a node has without further communication. Scalars on each node.

    Attributes:
      residual_norm: f32[], L2 norm of this node's residual; 0 without a residual. On GPU and TPU,
        where a method sends only a part of the values, within a thousandth of the norm of gradient
        plus residual: one huge value that is sent hides small residuals.
      elements_sent: f32[], values that this node's message encodes: gradient values, or the
        coefficients or factors sent in their place.
      overflow: i32[], selected values that did not fit into a buffer of fixed size.
      finite: bool[], False if any node's gradient held NaN or Inf, or had a norm of 1e15 or more;
        all nodes then skipped the step.
    """

    residual_norm: Array
    elements_sent: Array
    overflow: Array
    finite: Array


class Message(NamedTuple):
    """One entry of the logical byte count: a payload field that one node of a role sends or
    receives in a step.

    Attributes:
      role: "leader", "worker" or "server".
      direction: "up" (towards the server or the other nodes) or "down".
      field: the payload field: "values", "positions", "code", "scales", "signs", "innovations",
        "dense" ...
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
      field: the payload field that it carries; reports show "flag", "metrics" and "statistics" as
        `other`.
      bytes: bytes that one device sends, by the collective's algorithm (see
        `jgc.comm.ledger.bytes_sent`).
    """

    op: str
    field: str
    bytes: Fraction


class Wire(NamedTuple):
    """Bytes that one step of a phase sends. Logical and physical bytes are never mixed.

    Attributes:
      logical: messages of each role in the paper's topology, per step.
      physical: collectives of the compiled step, bytes per device. Empty where all nodes are on one
        device.
      once: messages sent once, on entering the phase (e.g. trained weights).
      devices: devices of a node. Each of them sends `physical`, so a node sends that many times as
        much.
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
    """Convert the state of the old phase to that of the new one. Runs on the host; local leaves
    have an axis [K]."""

    def __call__(self, old: Hashable, new: Hashable, state: State, nodes: Nodes) -> State: ...


class WireOf(Protocol):
    """Return the bytes of a step of a phase. `shapes` is a tree like the parameters; only static
    shapes are used."""

    def __call__(self, phase: Hashable, shapes: PyTree, nodes: Nodes) -> Wire: ...


class NextPhase(Protocol):
    """Return the phase of `step`, given the phase of the step before it and the state after that
    step.

    Runs on the host. It should read arrays in few steps only: each read makes the host wait for the
    devices.
    """

    def __call__(self, before: Phase, step: int, state: State, nodes: Nodes) -> Phase: ...


class Compressor(NamedTuple):
    """A method: four pure functions and the schedule of its phases. `jgc.method.from_step` makes
    one.

    Attributes:
      init: `(key, params, nodes) -> State`.
      aggregate: `(phase, key, grads, state, nodes) -> (aggregated, State, Info)`, one step.
      transition: `(old_phase, new_phase, state, nodes) -> State`, between two phases.
      wire: `(phase, shapes_and_dtypes, nodes) -> Wire`, the bytes of a step.
      schedule: the phases in order; the first starts at step 0. With a `next_phase`, the schedule
        is a plan: it lists each phase once, and sizes in phase values are upper bounds.
      owns_momentum: whether the method's memory holds the momentum; the optimiser must then have
        none.
      next_phase: `(phase, step, state, nodes) -> Phase`; None if the schedule alone decides.
      method: what the functions run: the method's record, or a combination of several. Private to
        jgc.
    """

    init: Init
    aggregate: Aggregate
    transition: Transition
    wire: WireOf
    schedule: tuple[Phase, ...]
    owns_momentum: bool
    next_phase: NextPhase | None
    method: Any
