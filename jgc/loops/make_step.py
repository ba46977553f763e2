"""A whole training step: node-local gradients, the compressor, the optimiser, in one compiled
program for each phase.

    init, step = jgc.make_step(loss, jgc.compress.topk(alpha=0.01), optax.adamw(1e-3), nodes)
    state = init(jax.random.key(0), params)
    for batch in batches:
        state, metrics = step(state, batch)

Its parts are public: `jgc.node_grads`, `Compressor.aggregate` inside `jgc.on_nodes`,
`jgc.phase_after`, `jgc.place`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jgc.checks.misuse import check_compressor, check_loss, check_nodes, check_optimizer
from jgc.loops.step_loop import Init, Step
from jgc.loops.step_program import Settings
from jgc.types import Compressor, Nodes, PyTree

if TYPE_CHECKING:
    import optax


def make_step(
    loss: Callable[..., Any],
    compressor: Compressor,
    optimizer: "optax.GradientTransformation",
    nodes: Nodes,
    has_aux: bool = False,
    unroll: bool | None = None,
    ahead: bool = False,
    prepare: Callable[[PyTree, PyTree], PyTree] | None = None,
    mean_aux: bool = False,
    split: bool = False,
) -> "tuple[Init, Step]":
    """Make the two functions of a training loop: `init` and `step`.

    `init(key, params)` copies the parameters to the devices and makes the states of optimiser and
    compressor. `init(key, params, model_state)` does so for a model with a state that is no
    parameter (batch statistics): the loss is then
    `(params, batch, model_state) -> (scalar, new model_state)`, and every node keeps its model
    state. Typed random keys in it differ between nodes (`jax.random.fold_in` of the node's index).
    `step(state, batch)` makes one update, in the phase that the step belongs to. It compiles one
    program for each phase, calls the compressor's transition between two phases, and donates the
    state. If a gradient is not finite on any node, or has a norm of 1e15 and more, nothing changes
    on any node but `state.step`. `step(state, batch, frozen)` does so for a loss with parameters
    that are not trained: the base weights under LoRA, a target network, a teacher. The loss gets
    them as its last argument. They are equal on all nodes, divided among the devices of a node as
    their shardings say, and not donated. New values in a later step do not recompile.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's own examples; with `has_aux`
        `-> (scalar, aux)`. With a model state
        `(params, batch, model_state) -> (scalar, model_state)`, with `has_aux`, too,
        `-> (scalar, (model_state, aux))`. With `frozen` in `step` one more argument at the end.
      compressor: any of `jgc.compress`.
      optimizer: any optax optimiser; it gets the mean over nodes, and must have no momentum if the
        compressor owns it. It also gets `value`, the mean loss over nodes, and `grad`, if it takes
        them (`optax.contrib.momo`).
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`.
      unroll: see `jgc.node_grads`.
      ahead: whether a thread compiles the next phase of the schedule while the steps of a phase
        run, so that no step waits for it. On CPU that takes processor time from those steps.
      prepare: `(grads, params) -> grads`, applied to each node's gradient before compression:
        coupled weight decay, clipping, or an optax transform without state. It runs inside the node
        axis; where the devices of a node divide the parameters, it gets a device's shards.
      mean_aux: whether `metrics.aux` is the mean over nodes, in f32, which travels with the other
        metrics.
      split: whether gradients are a program apart from what follows them, compiled once for all
        phases. A method of several phases then compiles in less time, and a step holds all nodes'
        gradients in memory.

    Returns:
      `init(key, params, model_state=()) -> LoopState` and
      `step(state, batch, frozen=None) -> (LoopState, Metrics)`. `step` also has the methods
      `upcoming`, `lower`, `program`, `gradients` and `diagnose`, see `Step`. The leaves of `batch`
      have leading axes [K, b]: b examples for each of the K nodes. With several processes, `key`,
      `params`, `batch` and `frozen` are equal in all of them, or global arrays (`jgc.place_parts`).

    Raises:
      TypeError: something else in place of the loss, of a compressor, such as settings, of an
        optimiser or of the nodes; in `init`, of a random key, a leaf of the parameters that is not
        an array of floats, or one of the model state that is not an array, or an optimiser that
        wants the loss as a function (a line search, sophia), gradients of examples (dpsgd) or pairs
        of parameters (lookahead); in `step`, a loss that returns another model state than it got.
      ValueError: in `init`, an optimiser that holds `as_optax`, or a leaf that is divided over
        another axis than the fast ones; in `step`, a leaf of the batch whose first axis is not K, a
        loss that nodes have averaged, whole arrays restored for divided ones, an array that the
        batch or `frozen` shares with the state, or one that an earlier step donated.

    Warns:
      jgc.MomentumWarning: in `init`, if both compressor and optimiser have a momentum.
      jgc.SkippedStepsWarning: in `step`, once, after 20 skipped steps in a row.
      jgc.SlowLoopWarning: in `step`, on CPU, if the gradient of a convolution lies in a loop.
      UserWarning: in `init`, of a leaf uint32[2] of the model state, which may be a random key that
        all nodes share.

    Example:
      >>> import jax, jax.numpy as jnp, jgc, optax
      >>> nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
      >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
      >>> init, step = jgc.make_step(loss, jgc.compress.dense(), optax.sgd(0.25), nodes)
      >>> state, metrics = step(init(jax.random.key(0), jnp.zeros(1)), jnp.array([[1.0], [3.0]]))
      >>> float(metrics.loss), state.params, state.step
      (5.0, Array([1.], dtype=float32), 1)
    """
    check_loss(loss)
    check_compressor(compressor)
    check_optimizer(optimizer)
    check_nodes(nodes)
    if prepare is not None and not callable(prepare):
        raise TypeError(
            "prepare must be a function (grads, params) -> grads, got a "
            f"{type(prepare).__name__}; of an optax transform without state: "
            "lambda grads, params: tx.update(grads, tx.init(params), params)[0]"
        )
    if mean_aux and not has_aux:
        raise ValueError(
            "mean_aux=True takes the mean of aux, which a loss returns with has_aux=True"
        )
    settings = Settings(
        loss, compressor, optimizer, nodes, has_aux, unroll, prepare, mean_aux, split
    )
    step = Step(settings, ahead)
    return step.init, step
