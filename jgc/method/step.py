"""What a method is: one record, `Method`, of a step on one node and the messages that it sends.

`jgc.method.from_step` and `compose` make methods, `per_layer` and `stacked` combine them, and
`jgc.method.aggregate` runs them.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from jgc.layout.pack import Layers
from jgc.layout.vector import Memory
from jgc.method.signature import Signature
from jgc.types import Array, Key, Message, NextPhase, Nodes, Phase, PyTree, State, Transition


class Step(NamedTuple):
    """The result of a method's step on one node.

    In a method that takes v by layer, `mean` and `sent` are lists of an array for each layer.
    """

    mean: Any  # f32[n] or SparseSum, the aggregate, equal on all nodes
    sent: Any  # f32[n] or Sparse, the part of v that counts as sent; the residual is v - sent
    shared: PyTree = ()  # the method's shared state after the step
    per_node: PyTree = ()  # the method's per-node state after the step, without the memory's
    elements: int | Array = 0  # number of values that this node's message encodes
    overflow: int | Array = 0  # selected values that did not fit into a buffer of fixed size
    # f32[n]: the aggregate is the mean added to it, and becomes the method's shared state
    onto: Array | None = None


class Local(NamedTuple):
    """A node's local state."""

    memory: PyTree
    per_node: PyTree  # of the method
    signature: Signature  # of the parameters that it was made for


# (phase, key, v, state, layers, nodes) -> Step, see `jgc.method.from_step`
StepFn = Callable[[Any, Key, Any, State, Layers, Nodes], Step]
# (key, layers, nodes) -> (shared, per_node of one node), the method's first state
InitFn = Callable[[Key, Layers, Nodes], tuple[PyTree, PyTree]]
# (phase, layers, nodes) -> messages in a step of a phase, or once on entering it
MessagesFn = Callable[[Any, Layers, Nodes], tuple[Message, ...]]
# (phase, key, v, g, step, state, layers, nodes) -> a method's diagnostics
FiguresFn = Callable[[Any, Key, Array, Array, Step, State, Layers, Nodes], dict[str, Array]]


class Method(NamedTuple):
    """The arguments of `jgc.method.from_step`, which documents them.

    With `form` "leaves" a step is the exact mean of every leaf, unless groups share an all-reduce.
    """

    step: StepFn | None  # None with `stages`
    stages: dict[Hashable, Any] | None  # codec and exchange of every phase value, by `compose`
    memory: Memory
    messages: MessagesFn
    schedule: tuple[Phase, ...]
    init: InitFn
    sent_once: MessagesFn
    transition: Transition
    next_phase: NextPhase | None
    figures: FiguresFn
    clip_norm: float = 0.0
    form: str = "joined"
    takes_filled: bool = False
    check: Callable[[dict[str, Any]], None] | None = None

    @property
    def owns_momentum(self) -> bool:
        """Whether the memory holds the momentum; the optimiser must then have none."""
        return self.memory.owns_momentum
