"""The compiled program of a training step: node-local gradients, the compressor, the optimiser, in one phase."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.loops.losses import in_one_form
from jgc.loops.norms import norm_of_aggregate
from jgc.loops.optimizers import updated
from jgc.method.shards import info_of_node
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import LOCAL, SHARED, locally, placements_of
from jgc.types import Array, Compressor, Info, Key, Nodes, PyTree, State

if TYPE_CHECKING:
    import optax


class Metrics(NamedTuple):
    """What a step reports, on the devices: reading a value waits for the step.

    Attributes:
      loss: f32[], the mean over nodes, before the update. A loss that is NaN while all gradients are finite (behind
        `stop_gradient`, say) skips nothing.
      info: `Info` with means over nodes, f32[]; `finite` is a bool[]. If it is false, a gradient could not be used, and
        the step was skipped.
      aux: with `has_aux` the second output of the loss, leaves [K, ...], one entry a node; else None. Where the devices
        of a node hold whole parameters, the loss runs on each device's share of the examples, and an entry is the mean
        over them; where they divide the parameters, the loss runs on all of the node's examples. Return means, equal in
        both cases, not counts or values of examples.
      grad_norm: f32[], the norm of the aggregate, which is the optimiser's gradient. With `dense` it is the norm of the
        mean gradient; a method that sends a part of its values in a step gives the norm of these. 0 if the step was
        skipped.
    """

    loss: Array
    info: Info
    aux: PyTree = None
    grad_norm: Any = None


class Arrays(NamedTuple):
    """The part of `LoopState` that a program takes and returns."""

    params: PyTree
    opt_state: PyTree
    compressor: State
    model_state: PyTree


def placements_of_step(arrays: Arrays) -> Arrays:
    """The placement of every array. The model state is LOCAL, which its shardings do not say after a restore."""
    return placements_of(arrays)._replace(model_state=LOCAL)


def step_program(
    loss: Callable[..., Any],
    compressor: Compressor,
    phase: Hashable,
    optimizer: "optax.GradientTransformation",
    nodes: Nodes,
    has_aux: bool,
    unroll: bool | None,
    arrays: Arrays,
    frozen: PyTree,
) -> Callable[..., tuple[Arrays, Metrics]]:
    """`(arrays, key, step, batch, frozen) -> (arrays, metrics)` for one phase, compiled at the first call.

    Args:
      frozen: placements of the parameters that are not trained; None if there are none.
    """
    import optax  # here: `import jgc` must not wait for it

    placements, has_state = placements_of_step(arrays), bool(jax.tree.leaves(arrays.model_state))
    gradients = node_grads(
        in_one_form(loss, has_aux, has_state, frozen is not None), nodes, has_aux=True, unroll=unroll, local=True,
        placements=placements.params, frozen=frozen,
    )  # fmt: skip
    exchange = on_nodes(
        partial(_exchange, compressor, phase, nodes),
        nodes,
        ins=(SHARED, locally(placements.params), placements.compressor, LOCAL),
        outs=(placements.params, placements.compressor, SHARED),
    )

    def update(arrays, key, step, batch, fixed):
        args = arrays.params, batch, arrays.model_state, *([] if frozen is None else [fixed])
        (losses, (model_state, aux)), grads = gradients(*args)  # all with an axis [K]
        key = jax.random.fold_in(key, step)
        mean, compressor_state, (value, info, norm) = exchange(key, grads, arrays.compressor, losses)
        updates, opt_state = updated(optimizer, mean, arrays.opt_state, arrays.params, value=value, grad=mean)
        new = optax.apply_updates(arrays.params, updates), opt_state, model_state
        old = arrays.params, arrays.opt_state, arrays.model_state
        # the compressor restores its own state; `where` also keeps weak types out, which would compile anew
        params, opt_state, model_state = jax.tree.map(lambda a, b: jnp.where(info.finite, a, b), new, old)
        return Arrays(params, opt_state, compressor_state, model_state), Metrics(value, info, aux, norm)

    # outputs lie exactly where inputs do: left to XLA, the second step would be another program
    shardings = jax.tree.map(lambda x: x.sharding, arrays)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _exchange(
    compressor: Compressor, phase: Hashable, nodes: Nodes, key: Key, grads: PyTree, state: State, loss: Array
) -> tuple[PyTree, State, tuple[Array, Info, Array]]:
    """One node's aggregate and state; means over nodes of loss and `Info`, by one collective; the aggregate's norm."""
    mean, state, info = compressor.aggregate(phase, key, grads, state, nodes)
    info = info_of_node(info, nodes)
    of_node = (loss, info.residual_norm, info.elements_sent, info.overflow)  # all nodes agree on `finite`
    loss, norm, elements, overflow = comm.pmean(jnp.stack([x.astype(jnp.float32) for x in of_node]), nodes, "metrics")
    return mean, state, (loss, Info(norm, elements, overflow, info.finite), norm_of_aggregate(mean, nodes))
