"""The nodes' mean gradient for a trainer that updates parameters by itself: `mean_gradients`."""

import warnings
from collections.abc import Callable, Hashable

import jax

from jgc.checks.misuse import check_compressor
from jgc.checks.optax_states import OR_METHOD, MomentumWarning
from jgc.method.as_optax import as_optax, init_optax
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import locally, placements_of
from jgc.types import Compressor, Nodes, PyTree


def mean_gradients(
    loss: Callable, compressor: Compressor, params: PyTree, nodes: Nodes, has_aux: bool = False,
    phase: Hashable = None, unroll: bool | None = None, frozen: PyTree = None, seed: int = 0,
    nan_if_skipped: bool = False,
) -> tuple[PyTree, Callable]:  # fmt: skip
    """The mean gradient over nodes, compressed; the interface of `jax.value_and_grad`.

    For a trainer that applies gradients itself, such as Flax's `TrainState` or `nnx.Optimizer`;
    otherwise use `jgc.make_step`. The trainer carries the compressor's state from step to step.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's examples, or with `has_aux`
        `-> (scalar, aux)`.
      compressor: of `jgc.compress`, but for `gradiveq` and `powersgd(alternate=True)`, which find
        their phases during the run: use `jgc.make_step` with these. If it has the momentum (as
        `dgc`, `egc`, `demo`, `klt` and LGC do by default), the trainer's optimiser must have none.
      params: the parameters, placed as in training; their shapes, dtypes and placements count.
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`.
      phase: as in `jgc.compress.as_optax`; by default the method's phases follow one another by the
        number of calls.
      unroll: as in `jgc.node_grads`.
      frozen: as in `jgc.node_grads`: placements of a last argument without a gradient.
      seed: seed of the compressor's random key.
      nan_if_skipped: as in `jgc.compress.as_optax`.

    Returns:
      The compressor's state before the first step, and a compiled function
      `(params, state, batch) -> (value, grads, state)`, with `frozen` one more argument. The leaves
      of `batch` have leading axes [K, b]. `value` is the nodes' mean loss, with `has_aux`
      `(mean loss, aux)`, where the leaves of `aux` have a leading axis [K]. `grads` has the shapes,
      dtypes and placements of the parameters.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a method whose phases need `phase` or `jgc.make_step`, see
        `jgc.compress.as_optax`; when called, a loss that was averaged over the nodes.

    Warns:
      jgc.MomentumWarning: the method has the momentum, and the optimiser cannot be seen here.

    Example:
      >>> import jgc, jax.numpy as jnp
      >>> nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
      >>> params = jgc.place({"w": jnp.ones(2)}, "shared", nodes)
      >>> state, gradients = mean_gradients(
      ...     lambda p, x: jnp.mean(x @ p["w"]), jgc.compress.dense(), params, nodes)
      >>> batch = jgc.place(jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]]), "batch", nodes)
      >>> value, grads, state = gradients(params, state, batch)
      >>> float(value), grads["w"]
      (5.0, Array([2., 3.], dtype=float32))
    """
    check_compressor(compressor)
    if compressor.next_phase is not None and phase is None:
        raise ValueError(
            "the method finds its phases during the run, which one compiled function cannot "
            "follow: use jgc.make_step, or jgc.compress.as_optax (docs/composing.md)"
        )
    if compressor.owns_momentum:
        warnings.warn(
            "the method's memory holds the momentum, and gradients get it twice if the trainer's "
            "optimiser has one, too: use an optimiser without one, e.g. optax.sgd(rate), "
            f"{OR_METHOD}", MomentumWarning, stacklevel=2)  # fmt: skip
    switched = phase is None and len(compressor.schedule) > 1
    tx = as_optax(compressor, nodes, phase, switched, seed, nan_if_skipped)
    state, placements = init_optax(tx, params, nodes), placements_of(params)
    places = placements_of(state)
    gradients = node_grads(loss, nodes, has_aux, unroll, placements=placements, frozen=frozen)
    mean = on_nodes(tx.update, nodes, ins=(locally(placements), places), outs=(placements, places))

    @jax.jit
    def run(params, state, batch, *frozen):
        value, grads = gradients(params, batch, *frozen)
        grads, state = mean(grads, state)
        value = (value[0].mean(), value[1]) if has_aux else value.mean()
        return value, grads, state

    return state, run
