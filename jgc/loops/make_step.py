"""A training step, compiled once for each phase: node-local gradients, compressor, optimiser.

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
    loss: Callable[..., Any], compressor: Compressor, optimizer: "optax.GradientTransformation",
    nodes: Nodes, has_aux: bool = False, unroll: bool | None = None, ahead: bool = False,
    prepare: Callable[[PyTree, PyTree], PyTree] | None = None, mean_aux: bool = False,
    split: bool = False,
) -> "tuple[Init, Step]":  # fmt: skip
    """Make the two functions of a training loop: `init` and `step`.

    `init(key, params)` copies the parameters to the devices and makes the states of optimiser and
    compressor. `step(state, batch)` makes one update and donates the state. It compiles a program
    for each phase by itself: call it outside of `jax.jit`. If any node's gradient is not finite or
    has a norm of 1e15 or more, the step changes only `state.step`.

    `init(key, params, model_state)` is for a model with state other than parameters (batch
    statistics), which stays on its node. Typed random keys in it differ between nodes.
    `step(state, batch, frozen)` gives the loss parameters that are not trained: base weights under
    LoRA, a target network, a teacher. They are equal on all nodes, sharded inside a node by their
    shardings, and not donated. New values in a later step do not recompile.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's examples; with `has_aux`
        `-> (scalar, aux)`. With a model state
        `(params, batch, model_state) -> (scalar, model_state)`, with `has_aux`, too,
        `-> (scalar, (model_state, aux))`. With `frozen` in `step` one more argument at the end.
      compressor: any of `jgc.compress`.
      optimizer: any optax optimiser; it gets the mean over nodes, and must have no momentum if the
        compressor owns it. If it takes `value` and `grad` (`optax.contrib.momo`), it gets the mean
        loss and gradient.
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`.
      unroll: see `jgc.node_grads`.
      ahead: whether a thread compiles the next phase of the schedule while the steps of a phase
        run. On CPU that takes processor time from those steps.
      prepare: `(grads, params) -> grads`, applied to each node's gradient before compression:
        coupled weight decay, clipping, or an optax transform without state. It runs inside the node
        axis, on a device's shards if parameters are sharded within a node. On several devices its
        loops and branches begin with values of the gradient, `0 * jnp.sum(g)`, not with constants.
      mean_aux: whether `metrics.aux` is the mean over nodes, in f32, sent with the other metrics.
      split: whether to compile gradients separately, once for all phases: less time to compile
        several phases, but a step holds all nodes' gradients in memory.

    Returns:
      `init(key, params, model_state=()) -> LoopState` and
      `step(state, batch, frozen=None) -> (LoopState, Metrics)`, with further methods: see `Step`.
      The leaves of `batch` have leading axes [K, b]: b examples for each of the K nodes. With
      several processes, `key`, `params`, `batch` and `frozen` are equal in all of them, or global
      arrays (`jgc.place_parts`).

    Raises:
      TypeError: an argument of the wrong type; in `init`, a leaf of the parameters that is not an
        array of floats, or an optimiser that wants the loss as a function (a line search, sophia),
        gradients of examples (dpsgd) or pairs of parameters (lookahead); in `step`, a loss that
        returns a different model state than it got.
      ValueError: in `init`, an optimiser that holds `as_optax`, or a leaf that is sharded over an
        axis that is not fast; in `step`, a leaf of the batch whose first axis is not K, a loss that
        was averaged over nodes, or an array that was donated, or that batch or `frozen` share with
        the state.

    Warns:
      jgc.MomentumWarning: in `init`, if both compressor and optimiser have a momentum.
      jgc.SkippedStepsWarning: in `step`, once, after 20 skipped steps in a row.
      jgc.SlowLoopWarning: in `step`, on CPU, if the gradient of a convolution lies in a loop.
      UserWarning: in `init`, of a leaf uint32[..., 2] or uint32[..., 4] of the model state, which
        may be the data of random keys.

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
        raise ValueError("mean_aux=True averages aux, which a loss returns with has_aux=True")
    how = Settings(loss, compressor, optimizer, nodes, has_aux, unroll, prepare, mean_aux, split)
    step = Step(how, ahead)
    return step.init, step
