"""Make a method: a step on one node's vector, and its messages, become a `Compressor`.

    def step(phase, key, v, state, layers, nodes):
        mean = comm.pmean(v, nodes, "values")
        return Step(mean, sent=v, elements=v.size)

    compressor = from_step(
        step, memory=error_feedback(), schedule=phases.single("mine"), messages=...
    )

The skeleton (`jgc.method.aggregate`) does everything else: packing, memory, the skipped step,
`Info`, the residual by parameter, the default diagnostics and the physical bytes.
"""

from collections.abc import Callable, Hashable
from typing import Any

from jgc import comm
from jgc.layout.pack import Layers
from jgc.method.compressor import compressor_of
from jgc.method.memory import Memory
from jgc.method.step import FiguresFn, InitFn, MessagesFn, Method, Step, StepFn
from jgc.selection.entries import as_vector
from jgc.types import Array, Compressor, NextPhase, Nodes, Phase, State, Transition

__all__ = ["Layers", "Step", "as_vector", "dense_step", "from_step"]


def dense_step(v: Array, state: State, nodes: Nodes, algorithm: str = "psum") -> Step:
    """The step of an uncompressed phase: the exact mean. The method's state does not change."""
    return Step(
        comm.mean_by(algorithm)(v, nodes, "dense"), v, state.shared, state.local.per_node, v.size
    )


def from_step(
    step: StepFn | None,
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
    form: str = "joined",
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Compressor:
    """Build a compressor from a step function.

    Args:
      step: `(phase, key, v, state, layers, nodes) -> Step`, one step on one node, of v f32[n], its
        gradient plus residual. `key` is the same on all nodes (`comm.node_key` derives a node's);
        `state` has `shared`, and `local.per_node` of this node; `layers` are the ranges of v. In
        the phase with value "dense" it must send all of v (`dense_step`).
      memory: the memory of each node.
      schedule: the phases.
      messages: `(phase, layers, nodes)`, logical messages of a step, for every phase but "dense".
      init: `(key, layers, nodes) -> (shared, per_node of one node)`, the method's state before the
        first step; nothing by default.
      sent_once: `(phase, layers, nodes)`, messages on entering a phase.
      transition: converts the state between two phases.
      next_phase: see `Compressor`.
      figures: `(phase, key, v, g, step, state, layers, nodes)`, the method's diagnostics; they
        extend or replace the default ones.
      clip_norm: each node first clips its whole gradient to the norm clip_norm / sqrt(K); 0 for no
        clipping.
      stages: codec and exchange of every phase value, with `step=None`; only `compose` gives them.
      takes_filled: whether v may have zeros behind its n values, as on TPU (`jgc.layout.devices`),
        where cutting them off may take a copy. `mean` has n values, and so has `sent` unless it is
        Sparse.
      form: how the step takes v: "joined", as f32[n], or "layers", as a list of an array for each
        layer in its parameter's shape, biases and norms as one vector; `mean` and `sent` are then
        such lists, too.
      check: raises ValueError for parameters, arrays by path, that the method does not fit.

    Raises:
      TypeError: `memory` is no Memory, `schedule` no tuple of phases; in a step, its result is no
        `Step`.
      ValueError: a negative `clip_norm`; in a step, `mean`, `sent` or a state of a different shape.

    Example:
      >>> from jgc import comm
      >>> from jgc.layout.pack import values_of
      >>> from jgc.method.memory import error_feedback
      >>> from jgc.method.messages import both_ways
      >>> from jgc.method.phases import single
      >>> def step(phase, key, v, state, layers, nodes):
      ...     sent = comm.rounded(v, jnp.bfloat16)  # v.astype(bfloat16) would be undone
      ...     return Step(comm.pmean(sent, nodes, "values"), sent, elements=v.size)
      >>> rounded = from_step(step, memory=error_feedback(), schedule=single("rounded"),
      ...     messages=lambda phase, layers, nodes: both_ways({"values": 4.0 * values_of(layers)}))
      >>> rounded.schedule[0].name
      'rounded'
    """
    if not isinstance(memory, Memory):
        raise TypeError(
            f"memory must be a jgc.method.memory.Memory, e.g. error_feedback(), got {memory!r}")
    is_schedule = isinstance(schedule, tuple) and all(isinstance(x, Phase) for x in schedule)
    if not (is_schedule and schedule):
        raise TypeError(
            f"schedule must be a tuple of jgc.Phase, e.g. phases.single('mine'), got {schedule!r}")
    if not 0 <= clip_norm < float("inf"):
        raise ValueError(
            f"clip_norm must be finite and at least 0 (0 for no clipping), got {clip_norm}")
    return compressor_of(Method(
        step, stages, memory, messages, schedule, init, sent_once, transition, next_phase,
        figures, clip_norm, form, takes_filled, check,
    ))  # fmt: skip
