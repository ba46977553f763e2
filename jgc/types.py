"""The contract that every method of jgc keeps, as plain data.

A compressor is a NamedTuple of pure functions. It takes each node's gradients and returns their mean
over all nodes. The words used throughout the package:

    K       number of nodes (data-parallel workers), `nodes.count`
    g       a node's gradient as a flat vector, f32[n]
    shared  the part of the state that is the same on every node
    local   the part that each node has for itself; outside a step its leaves have a leading axis [K]
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
      per_device: how many of them are emulated on each device.
      mesh: the devices; None means that all nodes are emulated on one device.
      slow: mesh axes between nodes, over which gradients are compressed.
      fast: mesh axes inside a node, over which a plain mean comes first.
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
    """What a compressor carries from step to step.

    Attributes:
      shared: the same on every node: autoencoder weights, counters.
      local: each node's own: residual, momentum. Leaves have a leading axis [K] outside the step
        and none inside it.
    """

    shared: PyTree
    local: PyTree


class Info(NamedTuple):
    """What a node knows after a step without asking the others. Scalars on each node.

    Attributes:
      residual_norm: f32[], L2 norm of what this node keeps back.
      elements_sent: f32[], how many gradient values this node's message stands for.
      overflow: i32[], selected values that did not fit into a capped buffer.
      finite: bool[], False where any node's gradient held NaN or Inf and all nodes skipped the step.
    """

    residual_norm: Array
    elements_sent: Array
    overflow: Array
    finite: Array


class Message(NamedTuple):
    """One line of the logical account: what one node of a role sends up or receives back in a step.

    Attributes:
      role: "leader", "worker" or "server".
      direction: "up" (towards the server or the other nodes) or "down".
      field: of the payload: "values", "positions", "code", "scales", "signs", "innovations", "dense", "weights" ...
      bytes: size of it in bytes; a float only where the size is a mean.
    """

    role: str
    direction: str
    field: str
    bytes: float


class Sent(NamedTuple):
    """One collective as a device takes part in it.

    Attributes:
      op: the collective's name in the compiled program, e.g. "all-reduce".
      field: of the payload that it carries; "flag" and the like are shown as `other`.
      bytes: bytes that one device sends, by the algorithm of the collective (see `jgc.wire`).
    """

    op: str
    field: str
    bytes: Fraction


class Wire(NamedTuple):
    """What one step of a phase costs. Logical and physical bytes are never mixed.

    Attributes:
      logical: messages of each role in the paper's topology, per step.
      physical: collectives of the compiled step, bytes per device. Empty where all nodes are on one device.
      once: messages sent a single time, on entering the phase (e.g. trained weights).
    """

    logical: tuple[Message, ...]
    physical: tuple[Sent, ...]
    once: tuple[Message, ...] = ()


class Phase(NamedTuple):
    """A stretch of training for which one compiled step serves.

    Attributes:
      name: what people read, e.g. "compressed".
      start: first step of the phase.
      value: hashable static value that the compressor's functions take; may carry sizes.
      parts: of a combination of methods, the phase that each of them is in.
    """

    name: str
    start: int
    value: Hashable
    parts: tuple[Any, ...] = ()


class Init(Protocol):
    """The state before the first step, with a leading axis [K] on its local leaves."""

    def __call__(self, key: Key, params: PyTree, nodes: Nodes) -> State: ...


class Aggregate(Protocol):
    """One step, inside the node axis (`jgc.on_nodes`).

    Args:
      phase: value of the phase, static.
      key: the same on all nodes.
      grads: this node's gradients.
      state: the shared state, and the local state of this node.
      nodes: the layout.

    Returns:
      The mean over nodes, with the gradients' structure, shapes and dtypes, equal on all nodes; the state after the
      step; this node's `Info`.
    """

    def __call__(
        self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes
    ) -> tuple[PyTree, State, Info]: ...


class Transition(Protocol):
    """The state of a new phase, on the host, from the state of the old one; local leaves have their axis [K]."""

    def __call__(self, old: Hashable, new: Hashable, state: State, nodes: Nodes) -> State: ...


class WireOf(Protocol):
    """The bytes of a step of a phase, from static shapes alone; `shapes` is a tree like the parameters."""

    def __call__(self, phase: Hashable, shapes: PyTree, nodes: Nodes) -> Wire: ...


class NextPhase(Protocol):
    """The phase of `step` from that of the step before and the state after it, on the host.

    Reads arrays in few steps only: each time the host waits for the devices.
    """

    def __call__(self, before: Phase, step: int, state: State, nodes: Nodes) -> Phase: ...


class Compressor(NamedTuple):
    """A method: four pure functions and the schedule of its phases. `jgc.method.from_step` makes one.

    Attributes:
      init: `(key, params, nodes) -> State`.
      aggregate: `(phase, key, grads, state, nodes) -> (aggregated, State, Info)`, one step.
      transition: `(old_phase, new_phase, state, nodes) -> State`, between two phases.
      wire: `(phase, shapes_and_dtypes, nodes) -> Wire`, what a step sends.
      schedule: the phases in order, the first of which starts at step 0. With a `next_phase`, each kind of phase once,
        as planned, with sizes that are upper bounds.
      owns_momentum: the momentum lives in the method's memory; the optimiser must then have none.
      next_phase: None where the schedule says it all; else `(phase, step, state, nodes) -> Phase`.
      core: jgc's own, for `per_layer`, `jgc.diagnose` and `jgc.residual`.
    """

    init: Init
    aggregate: Aggregate
    transition: Transition
    wire: WireOf
    schedule: tuple[Phase, ...]
    owns_momentum: bool
    next_phase: NextPhase | None
    core: Any
