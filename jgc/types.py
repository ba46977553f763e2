"""The contract that every method of jgc keeps, as plain data.

A compressor is a NamedTuple of pure functions. It takes each node's gradients and returns their mean
over all nodes. The words used throughout the package:

    K       number of nodes (data-parallel workers), `nodes.count`
    g       a node's gradient as a flat vector, f32[n]
    shared  the part of the state that is the same on every node
    local   the part that each node has for itself; outside a step its leaves have a leading axis [K]
"""

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

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
      kind: what it is: "values", "positions", "code", "scales", "signs", "innovations", "dense", "weights" ...
      bytes: size of it in bytes; a float only where the size is a mean.
    """

    role: str
    direction: str
    kind: str
    bytes: float


class Sent(NamedTuple):
    """One collective as a device takes part in it.

    Attributes:
      op: the collective's name in the compiled program, e.g. "all-reduce".
      kind: what it carries; "flag" and the like are shown as `other`.
      bytes: bytes that one device sends, by the algorithm of the collective (see `jgc.wire`).
    """

    op: str
    kind: str
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


class Compressor(NamedTuple):
    """A method: four pure functions and the schedule of its phases.

    Attributes:
      init: `(key, params, nodes) -> State`.
      aggregate: `(phase, key, grads, state, nodes) -> (aggregated, State, Info)`. Runs inside the node axis
        (`jgc.on_nodes`); `grads` and `state.local` are this node's. `key` is the same on all nodes. The
        aggregate has the gradients' structure, shapes and dtypes, and is equal on all nodes.
      transition: `(old_phase, new_phase, state, nodes) -> State`, between two phases, on the host's view
        of the state (local leaves with their leading axis [K]).
      wire: `(phase, shapes_and_dtypes, nodes) -> Wire`, from static shapes alone. A core leaves the physical bytes
        to its guard, which traces the step as a whole.
      schedule: the phases in order, the first of which starts at step 0. Where there is a `next_phase`, each kind once,
        as planned, with sizes that are upper bounds.
      diagnose: None, or `(phase, key, grads, state, nodes) -> dict` of arrays that need the true mean over
        the nodes. A step of its own, never part of `aggregate`: it moves whole gradients.
      owns_momentum: the momentum lives in the method's memory; the optimiser must then have none.
      next_phase: None where the schedule says it all; else `(phase, step, state, nodes) -> Phase`, the phase of `step`
        from that of the step before and the state after it, on the host. Reads arrays in few steps only: each time
        the host waits for the devices.
      residual: None, or `(local, shapes) -> {path: array}`, what this node keeps back of each parameter, with its shape
        and dtype, without those of which nothing is kept; `shapes` is a tree like the parameters. For recordings.
      core: the same method without the guard against non-finite gradients, for combinators; None where
        the compressor is itself a core.
      parts: what `compose` built it from, so that `per_layer` can share one exchange; else None.
      skips: of a core: its `aggregate` takes the flag of a step that all nodes skip as its last argument and sees to
        aggregate and state itself, which is cheaper than going over the whole state afterwards (`jgc.method.guard`).
    """

    init: Callable[..., State]
    aggregate: Callable[..., tuple[PyTree, State, Info]]
    transition: Callable[..., State]
    wire: Callable[..., Wire]
    schedule: tuple[Phase, ...]
    diagnose: Callable[..., dict[str, Array]] | None = None
    owns_momentum: bool = False
    next_phase: Callable[..., Phase] | None = None
    residual: Callable[..., dict[str, Array]] | None = None
    core: Any = None
    parts: Any = None
    skips: bool = False
