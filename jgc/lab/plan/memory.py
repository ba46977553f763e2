"""Temporary memory of a device while it computes: activations and copies.

A step has two parts, the nodes' gradients and the update, which run in turn in one program or two; each is
measured as a program by itself, since the memory of one is free when the other runs. Evaluation is a program by itself.
Evaluation is estimated from its equations, executed in turn: XLA's CPU backend passes a whole forward pass to a library
whose memory it does not know. `Measure` says how the others are found:

- "step": compile both as training does, and ask the compiler. Minutes for large models.
- "node": compile the gradients of a single node, without optimising the code, which does not change the buffers. Where
  a device computes its nodes in turn, as on CPU, the others' finished gradients are added; under vmap, as on
  GPU and TPU, all activations exist together. The update is estimated.
- "nothing": estimate activations by the values that one node's backward pass needs of its forward pass.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jgc.lab.shared.programs import arrays_of, compile_gradients, compile_update, make_gradients
from jgc.loops.step_program import Arrays
from jgc.nodes.gradients import unrolled
from jgc.nodes.placement import BATCH, LOCAL, SHARED
from jgc.nodes.placing import placed_shapes
from jgc.training.steps.step import UNROLL, Batch, Parts, TrainState, collection, loss_of
from jgc.types import Nodes, PyTree, State

Measure = Literal["nothing", "node", "step"]

PLACEMENTS = Arrays(SHARED, SHARED, State(SHARED, LOCAL), LOCAL)

MEASURED, FROM_ONE, ESTIMATED = "compiler", "compiler, one node", "estimate"

# Copies of the device's gradients that exist together in an update: packed, added to the memory, selected from. By the
# compiler (ConvNet5, 4 nodes, CPU): 2.2 for dense, 3.2 for lgc_ps with the leader's positions.
UPDATE_COPIES = 3

QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


class Temporary(NamedTuple):
    """Memory of one program besides its arguments and the results that are held.

    Attributes:
      name: of the program.
      bytes: on one device.
      how: where the number comes from.
    """

    name: str
    bytes: float
    how: str


Measured = dict[Any, tuple[Temporary, Temporary]]  # the gradients' and evaluation's


def temporaries(
    parts: Parts, state: TrainState, batch: Batch, evaluated: PyTree, measure: Measure, measured: Measured
) -> tuple[Temporary, ...]:
    """Temporaries of the gradients, of the update (of each phase, if compiled) and of evaluation.

    Args:
      parts: of the run, in its layout.
      state: shapes of all nodes.
      batch: likewise.
      evaluated: shapes of the device's part of an evaluated batch.
      measure: see the module.
      measured: gradients and evaluation of other methods, which are the same for the same model and batches; added to.
    """
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves((state.params, state.model_state, batch, evaluated))]
    key = (parts.config.model, parts.config.unroll_nodes, parts.nodes, measure, str(shapes))
    if key not in measured:
        measured[key] = of_gradients(parts, state, batch, measure), of_evaluation(parts, state, evaluated)
    gradients, evaluation = measured[key]
    if measure == "step":
        return gradients, *of_updates(parts, state, batch), evaluation
    copies = parts.nodes.per_device * size_of(state.params)
    return gradients, Temporary("update", UPDATE_COPIES * copies, ESTIMATED), evaluation


def of_evaluation(parts: Parts, state: TrainState, inputs: PyTree) -> Temporary:
    """Temporaries of evaluating a batch, and the batch.

    Args:
      parts: of the run.
      state: shapes of all nodes.
      inputs: shapes of the device's part of the batch.
    """
    stats = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), collection(state, "batch_stats"))
    variables = {"params": state.params, **({"batch_stats": stats} if jax.tree.leaves(stats) else {})}
    forward = jax.make_jaxpr(lambda variables, inputs: parts.apply(variables, inputs, train=False, mutable=["carry"]))
    return Temporary("evaluation", size_of(inputs) + most_alive(forward(variables, inputs).jaxpr), ESTIMATED)


def most_alive(jaxpr: Any) -> int:
    """The most bytes of results alive together, if equations are executed in turn and none are fused.

    Example:
      >>> x = jax.ShapeDtypeStruct((10,), np.float32)
      >>> most_alive(jax.make_jaxpr(lambda x: (x + 1) * 2 - 3)(x).jaxpr)  # a result and its operand
      80
    """
    last = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.invars if not hasattr(var, "val")}
    last |= dict.fromkeys((var for var in jaxpr.outvars if not hasattr(var, "val")), len(jaxpr.eqns))
    alive: dict[Any, int] = {}
    most = 0
    for i, eqn in enumerate(jaxpr.eqns):
        inside = max((most_alive(inner) for inner in _inner(eqn.params)), default=0)
        made = {var: size_of(var.aval) for var in eqn.outvars}
        most = max(most, sum(alive.values()) + max(inside, sum(made.values())))
        alive = {var: size for var, size in (alive | made).items() if last.get(var, -1) > i}
    return most


def _inner(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    inner = [getattr(value, "jaxpr", value) for value in params.values()]
    return [value for value in inner if hasattr(value, "eqns")]


def size_of(tree: PyTree) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# --- the nodes' gradients -------------------------------------------------------------------------------------------


def of_gradients(parts: Parts, state: TrainState, batch: Batch, measure: Measure) -> Temporary:
    """Temporaries of the gradients of a device's nodes, and a new copy of the nodes' collections."""
    model_state = size_of(state.model_state) * parts.nodes.per_device // parts.nodes.count
    if measure == "step":
        arrays = placed_shapes(arrays_of(state), PLACEMENTS, parts.nodes)
        batch = placed_shapes(batch, (BATCH, BATCH), parts.nodes)
        compiled = compiled_bytes(compile_gradients(parts, arrays, batch))
        if compiled is not None:
            return Temporary("gradients", compiled + model_state, MEASURED)
    of_node, how = None, ESTIMATED
    if measure != "nothing":
        of_node, how = of_one_node(parts, state, batch), FROM_ONE
    if of_node is None:
        of_node, how = kept_for_backward(parts, state, batch), ESTIMATED
    here, gradient = parts.nodes.per_device, size_of(state.params)
    one_by_one = unrolled(UNROLL[parts.config.unroll_nodes], parts.nodes)
    on_device = of_node + (here - 1) * gradient if one_by_one else here * of_node
    return Temporary("gradients", on_device + model_state, how)


def of_one_node(parts: Parts, state: TrainState, batch: Batch) -> int | None:
    """Bytes for the gradients of one node, by the compiler; None if it does not say."""
    alone = parts._replace(nodes=Nodes(1, 1))
    model_state, batch = (jax.tree.map(_first, tree) for tree in (state.model_state, batch))
    lowered = jax.jit(make_gradients(alone)).lower(state.params, model_state, batch)
    return compiled_bytes(lowered.compile(QUICK if jax.default_backend() == "cpu" else None))


def kept_for_backward(parts: Parts, state: TrainState, batch: Batch) -> int:
    """Bytes that the backward pass of one node needs of its forward pass, besides the parameters and the batch."""
    both = state.model_state, batch
    model_state, batch = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), t) for t in both)

    def forward(params, model_state, batch):
        return jax.vjp(lambda p: loss_of(parts.apply, parts.void)(p, batch, model_state or {})[0], params)[1]

    size = size_of(jax.eval_shape(forward, state.params, model_state, batch))
    return max(size - size_of(state.params) - size_of(batch), 0)


def _first(x: Any) -> jax.ShapeDtypeStruct:
    """The shape [1, ...] of one node's part of an array [K, ...]."""
    return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)


# --- the update -----------------------------------------------------------------------------------------------------


def of_updates(parts: Parts, state: TrainState, batch: Batch) -> tuple[Temporary, ...]:
    """Temporaries of each phase's update, by the compiler, or an estimate if it does not say."""
    placed, guess = placed_shapes(arrays_of(state), PLACEMENTS, parts.nodes), UPDATE_COPIES * parts.nodes.per_device
    config = dataclasses.replace(parts.config, unroll_nodes="no")  # the same shapes, traced once
    whole = parts._replace(nodes=Nodes(parts.nodes.count, parts.nodes.count), config=config)
    gradients = jax.eval_shape(make_gradients(whole), state.params, state.model_state, batch)
    gradients = placed_shapes(gradients, type(gradients)(*[LOCAL] * len(gradients)), parts.nodes)
    out = []
    for phase in parts.compressor.schedule:
        compiled = compiled_bytes(compile_update(parts, phase.value, placed, gradients))
        name = f"update, {phase.name}"
        if compiled is None:
            out.append(Temporary(name, guess * size_of(state.params), ESTIMATED))
        else:
            out.append(Temporary(name, compiled, MEASURED))
    return tuple(out)


def compiled_bytes(compiled: Any) -> int | None:
    """Temporaries of a compiled program on one device; None if the compiler does not say."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)
