"""The compiled program of a training step in one phase: gradients, compressor, optimiser."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jgc import comm
from jgc.checks.misuse import with_same_leaves
from jgc.loops.buffers import wait_on_cpu
from jgc.loops.loop import shardings_of
from jgc.loops.losses import in_one_form
from jgc.loops.model_state import is_given
from jgc.loops.norms import norm_of_aggregate
from jgc.loops.optimizers import updated
from jgc.method.diagnose import diagnose
from jgc.method.shards import info_of_node
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import LOCAL, SHARED, locally, placements_of
from jgc.types import Array, Compressor, Info, Nodes, PyTree, State

if TYPE_CHECKING:
    import optax


class Metrics(NamedTuple):
    """A step's metrics on the devices: reading a value waits for the step.

    Attributes:
      loss: f32[], the mean over nodes, before the update. A NaN loss with finite gradients (behind
        `stop_gradient`, say) skips nothing.
      info: `Info` with means over nodes, f32[]; `finite`, bool[], is false if the step was skipped.
      aux: with `has_aux` the second output of the loss, leaves [K, ...]; else None. If the devices
        of a node hold whole parameters, the loss runs on each device's examples, and an entry is
        the mean over devices: return means, not counts. With `mean_aux` leaves [...], the mean over
        nodes in f32.
      grad_norm: f32[], the norm of the aggregate, which is the optimiser's gradient; of a method
        that sends a part of its values, the norm of these. 0 if the step was skipped.
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


class Settings(NamedTuple):
    """The arguments of `jgc.make_step`, checked."""

    loss: Callable[..., Any]
    compressor: Compressor
    optimizer: "optax.GradientTransformation"
    nodes: Nodes
    has_aux: bool = False
    unroll: bool | None = None
    prepare: Callable[[PyTree, PyTree], PyTree] | None = None
    mean_aux: bool = False
    split: bool = False


def placements_of_step(arrays: Arrays) -> Arrays:
    """The placement of every array. After a restore only this shows that model state is LOCAL."""
    return placements_of(arrays)._replace(model_state=LOCAL)


def step_program(
    settings: Settings, phase: Hashable, arrays: Arrays, frozen: PyTree
) -> Callable[..., tuple[Arrays, Metrics]]:
    """`(arrays, key, step, batch, frozen) -> (arrays, metrics)`; argument `frozen`: placements."""
    gradients = make_gradients(settings, arrays, frozen)
    update_by = make_update(settings, phase, arrays)

    def update(arrays, key, step, batch, fixed):  # the name that profiles show
        results = gradients(arrays.params, arrays.model_state, batch, fixed)
        return update_by(arrays, key, step, results)

    return jax.jit(update, donate_argnums=0, out_shardings=(shardings_of(arrays), None))


def update_program(
    settings: Settings, phase: Hashable, arrays: Arrays
) -> Callable[..., tuple[Arrays, Metrics]]:
    """`make_update`, jitted."""
    update = make_update(settings, phase, arrays)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings_of(arrays), None))


class SplitProgram:
    """`step_program` in two: `gradients`, which all phases share, jitted, and what follows them."""

    def __init__(self, settings: Settings, phase: Hashable, arrays: Arrays, gradients: Any):
        self._gradients, self._nodes = gradients, settings.nodes
        self._update: Any = update_program(settings, phase, arrays)

    def __call__(
        self, arrays: Arrays, key: Array, step: Any, batch: PyTree, fixed: PyTree
    ) -> tuple[Arrays, Metrics]:
        results = self._gradients(arrays.params, arrays.model_state, batch, fixed)
        wait_on_cpu(results, self._nodes)
        return self._update(arrays, key, step, results)

    def lower(
        self, arrays: Arrays, key: Array, step: Any, batch: PyTree, fixed: PyTree
    ) -> jax.stages.Lowered:
        """Compile the gradients, and lower what follows them."""
        args = arrays.params, arrays.model_state, batch, fixed
        where = self._gradients.lower(*args).compile().output_shardings

        def placed(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        results = jax.tree.map(placed, jax.eval_shape(self._gradients, *args), where)
        return self._update.lower(arrays, key, step, results)


def make_gradients(settings: Settings, arrays: Arrays, frozen: PyTree) -> Callable[..., Any]:
    """`(params, model_state, batch, frozen) -> ((losses, (model_state, aux)), grads)`, [K, ...]."""
    has_state, has_frozen = is_given(arrays.model_state), frozen is not None
    loss = in_one_form(settings.loss, settings.has_aux, has_state, has_frozen)
    of_nodes = node_grads(
        loss, settings.nodes, has_aux=True, unroll=settings.unroll, local=True,
        placements=placements_of(arrays.params), frozen=frozen,
    )  # fmt: skip

    def gradients(params, model_state, batch, fixed):
        return of_nodes(params, batch, model_state, *([fixed] if has_frozen else []))

    return gradients


def make_update(settings: Settings, phase: Hashable, arrays: Arrays) -> Callable[..., Any]:
    """`(arrays, key, step, results) -> (arrays, metrics)`: all that follows `make_gradients`.

    If any node's gradient cannot be used, no array changes.
    """
    import optax  # here: `import jgc` must not wait for it

    _, compressor, optimizer, nodes, *_ = settings
    mean_aux = settings.mean_aux
    where = placements_of_step(arrays)

    def exchange(key, params, grads, state, loss, aux):  # of one node, without the axis [K]
        grads = prepared(settings.prepare, grads, params)
        mean, state, info = compressor.aggregate(phase, key, grads, state, nodes)
        info = info_of_node(info, nodes)
        means, aux = _means_over_nodes(loss, info, aux, nodes)  # all nodes agree on `finite`
        info = Info(*means[1:], info.finite)
        return mean, state, (means[0], info, aux, norm_of_aggregate(mean, nodes))

    ins = (SHARED, where.params, locally(where.params), where.compressor, LOCAL, LOCAL)
    on_all = on_nodes(exchange, nodes, ins, outs=(where.params, where.compressor, SHARED))

    def update(arrays, key, step, results):
        (losses, (model_state, aux)), grads = results
        key = jax.random.fold_in(key, step)
        mean, state, (loss, info, mean_of_aux, norm) = on_all(
            key, arrays.params, grads, arrays.compressor, losses, aux if mean_aux else None
        )
        params, before = arrays.params, arrays.opt_state
        updates, opt_state = updated(optimizer, mean, before, params, value=loss, grad=mean)
        new = optax.apply_updates(params, updates), opt_state, model_state
        old = params, before, arrays.model_state
        # the compressor restores its state; `where` also removes weak types, which would recompile
        new = jax.tree.map(lambda a, b: jnp.where(info.finite, a, b), new, old)
        arrays = Arrays(new[0], new[1], state, new[2])
        return arrays, Metrics(loss, info, mean_of_aux if mean_aux else aux, norm)

    return update


def prepare_program(settings: Settings, params: PyTree) -> Callable[[PyTree, PyTree], PyTree]:
    """`(grads [K, ...], params) -> grads`, as they enter the compressor."""
    where = placements_of(params)
    ins, prepare = (locally(where), where), partial(prepared, settings.prepare)
    return jax.jit(on_nodes(prepare, settings.nodes, ins, outs=ins[0]))


def make_diagnosis(
    compressor: Compressor, phase: Hashable, nodes: Nodes, params: PyTree, state: PyTree
) -> Callable[..., dict[str, Array]]:
    """`(key, step, grads [K, ...], state) -> figures`, see `jgc.diagnose`; takes placements."""

    def compare(key, grads, state):  # of one node, without the axis [K]
        return diagnose(compressor, phase, key, grads, state, nodes)

    on_all = on_nodes(compare, nodes, ins=(SHARED, locally(params), state), outs=SHARED)
    return lambda key, step, grads, state: on_all(jax.random.fold_in(key, step), grads, state)


def prepared(
    prepare: Callable[[PyTree, PyTree], PyTree] | None, grads: PyTree, params: PyTree
) -> PyTree:
    """A node's gradient after `prepare`. TypeError unless it has the same leaves."""
    if prepare is None:
        return grads
    must = "prepare must return the gradient's leaves with their shapes and dtypes"
    return with_same_leaves(grads, prepare(grads, params), must)


def _means_over_nodes(
    loss: Array, info: Info, aux: PyTree, nodes: Nodes
) -> tuple[tuple[Array, ...], PyTree]:
    """Means of loss, residual norm, elements sent and overflow, and of `aux`, by one collective."""
    scalars = loss, info.residual_norm, info.elements_sent, info.overflow
    values = jax.tree.map(lambda x: x.astype(jnp.float32), (scalars, aux))
    flat, unravel = ravel_pytree(values)
    return unravel(comm.pmean(flat, nodes, "metrics"))
