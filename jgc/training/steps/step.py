"""train.py's arguments of `jgc.make_step` or `jgc.local_steps`: loss, preparation of gradients, first state."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jgc.loops.buffers import device_of, put_arrays
from jgc.loops.local_loop import LocalMetrics, LocalStep
from jgc.loops.local_steps import LocalSteps
from jgc.loops.make_step import make_step
from jgc.loops.outer import Parts as LocalParts
from jgc.loops.step_loop import LoopState, Step
from jgc.loops.step_program import Metrics
from jgc.method.memory import clip_local
from jgc.nodes.placement import LOCAL, SHARED, Sharded, locally, of_node, placements_of
from jgc.nodes.placing import place
from jgc.training.data import VOID
from jgc.training.models import WithAuxiliary
from jgc.training.settings.config import Config
from jgc.training.steps.optimizer import add_coupled_decay, rate_of
from jgc.types import Array, Compressor, Key, Nodes, PyTree

TrainState = Any  # a LoopState, with local steps a LocalState: their fields differ

METRICS = ("loss", "train_accuracy", "residual_norm", "elements_sent", "overflow", "finite")
AUXILIARY = 0.4  # weight of a second head's loss: PSPNet's (Zhao et al. 2017, Section 3.3)
OWN = ("batch_stats", "carry")  # Flax collections of the model state
UNROLL = {"auto": None, "yes": True, "no": False}  # of `Config.unroll_nodes`, for `make_step`


class Parts(NamedTuple):
    """The parts of the step functions."""

    config: Config
    nodes: Nodes
    apply: Callable  # the model's
    compressor: Compressor
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule  # of the learning rate, for the log
    key: Key  # of all random choices in steps; step s uses fold_in(key, s)
    void: bool = False  # whether labels may be VOID: these count neither in the loss nor in the accuracy
    local: LocalParts | None = None  # with local steps; the optimiser is then the inner one

    @property
    def exchanged(self) -> Compressor:
        """The compressor as exchanges use it: with fragments that of one."""
        return self.local.method() if self.local and self.local.fragments > 1 else self.compressor


# images f32[K, b, h, w, c], labels i32[K, b], or i32[K, b, h, w] of pixels; or windows of text, labels i32[K, b, T]
Batch = tuple[PyTree, Array]


def make_steps(parts: Parts, has_state: bool) -> Step | LocalStep:
    """The run's step function. `has_state`: whether the model has batch statistics or a carried state."""
    loss, unroll = loss_of(parts.apply, parts.void), UNROLL[parts.config.unroll_nodes]

    def without_state(params, batch):
        value, (_, accuracy) = loss(params, batch, {})
        return value, accuracy

    fn = loss if has_state else without_state
    if parts.local is not None:
        return LocalSteps(parts.local).make_step(fn, has_aux=True, unroll=unroll)[1]
    prepare = partial(before_compression, parts=parts)
    return make_step(
        fn, parts.compressor, parts.optimizer, parts.nodes, has_aux=True, unroll=unroll,
        prepare=prepare, mean_aux=True, split=len(parts.compressor.schedule) > 1,
    )[1]  # fmt: skip


def init_state(parts: Parts, variables: PyTree, key: Key, step: Step | LocalStep | None = None) -> TrainState:
    """The state before the first step, on the devices."""
    params, model_state = variables["params"], model_state_of(variables)
    if parts.config.layers.shard:
        params = place(params, sharded(params, parts.nodes), parts.nodes)
    step = step or make_steps(parts, bool(model_state))
    state = step.init(key, params, model_state)
    return state._replace(key=put_arrays(parts.key, parts.nodes, device_of(params)))


def model_state_of(variables: PyTree) -> PyTree:
    """A model's variables that are no parameters, by Flax collection; () if there are none."""
    state = {name: variables[name] for name in OWN if jax.tree.leaves(variables.get(name))}
    return state or ()


def collection(state: TrainState, name: str) -> PyTree:
    """A collection of the model state, leaves [K, ...]; {} if there is none."""
    return state.model_state[name] if state.model_state and name in state.model_state else {}


def sharded(params: PyTree, nodes: Nodes) -> PyTree:
    """Placements that shard parameters over the devices of a node, each in its largest dimension that allows it.

    Parameters of fewer than two dimensions stay whole: they have few values.
    """
    count = nodes.size(nodes.fast)

    def placement(x):
        fits = [i for i, size in enumerate(x.shape) if size % count == 0]
        if x.ndim < 2 or not fits:
            return SHARED
        largest = max(fits, key=lambda i: x.shape[i])
        return Sharded(SHARED, P(*(nodes.fast if i == largest else None for i in range(x.ndim))))

    return jax.tree.map(placement, params)


def arrays_by_name(state: TrainState) -> dict[str, PyTree]:
    """The arrays of a state, by the names that checkpoints have for them. The key follows from the seed."""
    model_state = dict(state.model_state) if state.model_state else {}
    arrays = {"params": state.params, "compressor": state.compressor, **model_state}
    if isinstance(state, LoopState):
        return {**arrays, "opt_state": state.opt_state}
    fields = {"params": state.own, "inner": state.inner, "waiting": state.waiting}
    fields["largest_norm"] = state.largest_norm
    return {**arrays, "opt_state": state.outer, "local": fields}


def with_arrays(state: TrainState, arrays: dict[str, PyTree]) -> TrainState:
    """The inverse of `arrays_by_name`, with the other fields of `state`."""
    names = [name for name in OWN if name in arrays]
    fields = {name: arrays[name] for name in ("params", "compressor")}
    fields["model_state"] = {name: arrays[name] for name in names} if names else state.model_state
    if isinstance(state, LoopState):
        return state._replace(**fields, opt_state=arrays["opt_state"])
    local = dict(arrays["local"])
    return state._replace(**fields, outer=arrays["opt_state"], own=local.pop("params"), **local)


def placements_by_name(state: TrainState) -> dict[str, PyTree]:
    """The placement of every array of `arrays_by_name`."""
    arrays = arrays_by_name(state)
    where = {name: LOCAL if name in OWN else placements_of(x) for name, x in arrays.items() if name != "local"}
    if not isinstance(state, LoopState):
        own, inner = locally(where["params"]), jax.tree.map(of_node, state.inner)
        waiting = placements_of(state.waiting)
        where["local"] = {"params": own, "inner": inner, "waiting": waiting, "largest_norm": LOCAL}
    return {name: where[name] for name in arrays}


def loss_of(apply: Callable, void: bool = False) -> Callable:
    """`(params, (inputs, labels), model_state) -> (mean cross-entropy, (new model state, accuracy))` of a node.

    No gradient flows through a carried state to the step before. A second head's cross-entropy is added with its
    weight. With `void` the means leave out labels that are VOID.
    """

    def cross_entropy(logits, labels):
        within = jnp.maximum(labels, 0) if void else labels
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), within)
        return _mean(losses, labels, void)

    def loss(params, batch, model_state):
        inputs, labels = batch
        out, new = apply({"params": params, **model_state}, inputs, train=True, mutable=list(OWN))
        logits, *further = out if isinstance(out, WithAuxiliary) else (out,)
        total = cross_entropy(logits, labels)
        for auxiliary in further:
            total += AUXILIARY * cross_entropy(auxiliary, labels)
        return total, (dict(new), _mean(jnp.argmax(logits, -1) == labels, labels, void))

    return loss


def _mean(values: Array, labels: Array, void: bool) -> Array:
    """The mean over labels, f32[]; with `void` over labels that are not VOID, 0 if all are."""
    if not void:
        return jnp.mean(values, dtype=jnp.float32)
    counts = labels != VOID
    return jnp.sum(jnp.where(counts, values, 0), dtype=jnp.float32) / jnp.maximum(jnp.sum(counts), 1)


def before_compression(grads: PyTree, params: PyTree, parts: Parts) -> PyTree:
    """A node's gradient as it enters the compressor: with coupled weight decay, then clipped."""
    grads = add_coupled_decay(grads, params, parts.config)
    return clip_local(grads, parts.config.clip_norm, parts.nodes) if parts.config.clip_norm else grads


def outputs_of(metrics: Metrics | LocalMetrics) -> dict[str, Array]:
    """A step's metrics by their names in metrics.jsonl: f32[], with local steps [K]."""
    info, finite = metrics.info, metrics.info and metrics.info.finite
    if isinstance(metrics, LocalMetrics):
        finite = metrics.finite if info is None else metrics.finite & info.finite
    named = {} if info is None else info._asdict()
    named |= {"loss": metrics.loss, "train_accuracy": metrics.aux, "finite": finite}
    return {name: named[name] for name in METRICS if name in named}


def make_rate_of(parts: Parts) -> Callable[[TrainState], Array]:
    """`state -> the learning rate of its coming step`, f32[]; call it before the step donates the state."""
    rate = jax.jit(partial(rate_of, parts.schedule))
    return lambda state: rate(getattr(state, "opt_state", ()), state.step)
