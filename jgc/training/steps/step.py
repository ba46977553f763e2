"""The training step, as pure functions of whole arrays.

Order inside a step: node-local gradient of the mean loss; coupled weight decay; local clipping; the compressor
(memory, then aggregate); decoupled decay and optimiser. It is compiled in two halves: the nodes' gradients
(`unroll_nodes`), one program for all phases; and the update, under the node axis, one program a phase.
The diagnose step runs between the two on the same gradients.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jgc import comm
from jgc.loops.buffers import copied
from jgc.loops.optimizers import updated
from jgc.loops.outer import Parts as LocalParts
from jgc.method.diagnose import diagnose
from jgc.method.memory import clip_local
from jgc.method.shards import info_of_node
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import LOCAL, SHARED, Sharded, locally, of_node, per_node, place, placements_of
from jgc.training.data import VOID
from jgc.training.models import WithAuxiliary
from jgc.training.settings.config import Config
from jgc.training.steps.optimizer import add_coupled_decay, rate_of
from jgc.types import Array, Compressor, Info, Key, Nodes, PyTree, State


class OfNodes(NamedTuple):
    """With local steps: each node's own parameters and inner state, [K, ...], and the aggregates that wait."""

    params: PyTree
    inner: PyTree
    waiting: PyTree


class TrainState(NamedTuple):
    """The state that a run carries from step to step.

    Attributes:
      params: of the model, equal on all nodes; with local steps as the last outer steps left them.
      opt_state: of the optimiser, equal on all nodes; with local steps that of the outer one for each fragment.
      batch_stats: running statistics of each node, leading axis [K].
      compressor: the compressor's `State`; with local steps a tuple of them, one for each fragment.
      carry: a recurrent model's state after the step, for each node's streams, leading axes [K, b].
      local: `OfNodes` with local steps, else ().
    """

    params: PyTree
    opt_state: PyTree
    batch_stats: PyTree
    compressor: Any
    carry: PyTree = ()
    local: Any = ()

    @property
    def trained(self) -> PyTree:
        """The parameters at which gradients are taken: with local steps each node's own, [K, ...]."""
        return self.local.params if self.local else self.params

    @property
    def own(self) -> dict[str, PyTree]:
        """The model's node-local variables by Flax collection, without empty collections."""
        collections = {name: getattr(self, name) for name in OWN}
        return {name: tree for name, tree in collections.items() if jax.tree.leaves(tree)}


METRICS = ("loss", "train_accuracy", "residual_norm", "elements_sent", "overflow", "finite")
AUXILIARY = 0.4  # weight of a second head's loss: PSPNet's (Zhao et al. 2017, Section 3.3)
PLACEMENTS = TrainState(SHARED, SHARED, LOCAL, State(SHARED, LOCAL), LOCAL)
OWN = ("batch_stats", "carry")
UNROLL = {"auto": None, "yes": True, "no": False}  # of `Config.unroll_nodes`, for `node_grads`


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


class Gradients(NamedTuple):
    """The first half of a step: each node's loss and gradients. Leading axis [K] everywhere.

    Attributes:
      loss: f32[K], mean over the node's labels; with a second head plus 0.4 times that head's loss.
      accuracy: f32[K], likewise.
      own: `TrainState.own` after this batch.
      grads: the gradient of the loss, with the structure of the parameters.
    """

    loss: Array
    accuracy: Array
    own: dict[str, PyTree]
    grads: PyTree


# images f32[K, b, h, w, c], labels i32[K, b], or i32[K, b, h, w] of pixels; or windows of text, labels i32[K, b, T]
Batch = tuple[PyTree, Array]


def init_state(parts: Parts, variables: PyTree, key: Key) -> TrainState:
    """The state before the first step, placed on the devices."""
    params = variables["params"]
    if parts.config.layers.shard:
        params = place(params, sharded(params, parts.nodes), parts.nodes)
    stats, carry = (
        jax.tree.map(lambda x: per_node(x, parts.nodes), variables.get(name, {})) for name in ("batch_stats", "carry")
    )
    if parts.local is None:
        optimizer, compressor = parts.optimizer.init(params), parts.compressor.init(key, params, parts.nodes)
        state = TrainState(params, optimizer, stats, compressor, carry)
    else:
        first = parts.local.first(key, params)
        own = OfNodes(first.own, first.inner, first.waiting)
        state = TrainState(first.params, first.outer, stats, first.compressor, carry, own)
    return place_state(state, placements_of_state(state), parts.nodes)


def sharded(params: PyTree, nodes: Nodes) -> PyTree:
    """Placements that divide parameters among the devices of a node, each in its largest dimension that allows it.

    Parameters of fewer than two dimensions stay whole: they are few values.
    """
    count = nodes.size(nodes.fast)

    def one(x):
        fits = [i for i, size in enumerate(x.shape) if size % count == 0]
        if x.ndim < 2 or not fits:
            return SHARED
        largest = max(fits, key=lambda i: x.shape[i])
        return Sharded(SHARED, P(*(nodes.fast if i == largest else None for i in range(x.ndim))))

    return jax.tree.map(one, params)


def placements_of_state(state: TrainState) -> TrainState:
    """The placement of every array of a state."""
    params, local = placements_of(state.params), state.local
    if local:
        inner = jax.tree.map(of_node, local.inner)
        local = OfNodes(locally(params), inner, placements_of(local.waiting))
    return TrainState(params, placements_of(state.opt_state), LOCAL, placements_of(state.compressor), LOCAL, local)


def place_state(state: TrainState, placements: TrainState, nodes: Nodes) -> TrainState:
    """The state in buffers of its own (a step donates them), where `on_nodes` expects them."""
    return TrainState(*(place(copied(tree), where, nodes) for tree, where in zip(state, placements, strict=True)))


def loss_of(apply: Callable, void: bool = False) -> Callable:
    """`(params, (inputs, labels), own) -> (mean cross-entropy, (own after the batch, accuracy))` of one node.

    A carried state enters as data: no gradient flows back to the step before. A second head's cross-entropy is added
    with its weight. With `void` the means leave out labels that are VOID.
    """

    def cross_entropy(logits, labels):
        within = jnp.maximum(labels, 0) if void else labels
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), within)
        return _mean(losses, labels, void)

    def loss(params, batch, own):
        inputs, labels = batch
        out, new = apply({"params": params, **own}, inputs, train=True, mutable=list(OWN))
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


def make_gradients(
    parts: Parts, placements: TrainState = PLACEMENTS
) -> Callable[[PyTree, dict[str, PyTree], Batch], Gradients]:
    """`(params, own [K, ...], batch) -> Gradients`, without communication between nodes; `TrainState.trained`."""
    loss, unroll = loss_of(parts.apply, parts.void), UNROLL[parts.config.unroll_nodes]
    gradients = node_grads(loss, parts.nodes, has_aux=True, unroll=unroll, local=True, placements=placements.trained)

    def flat(params, own, batch):
        (loss, (own, accuracy)), grads = gradients(params, batch, own)
        return Gradients(loss, accuracy, own, grads)

    return flat


def before_compression(grads: PyTree, params: PyTree, parts: Parts) -> PyTree:
    """A node's gradient as it enters the compressor: with coupled weight decay, then clipped."""
    grads = add_coupled_decay(grads, params, parts.config)
    return clip_local(grads, parts.config.clip_norm, parts.nodes) if parts.config.clip_norm else grads


def make_before_compression(parts: Parts) -> Callable[[PyTree, PyTree], PyTree]:
    """`(grads [K, ...], params) -> gradients that enter the compressor [K, ...]`, without communication."""
    one = partial(before_compression, parts=parts)
    return on_nodes(one, parts.nodes, ins=(LOCAL, SHARED), outs=LOCAL)


def make_update(
    parts: Parts, phase: Hashable, placements: TrainState = PLACEMENTS
) -> Callable[[TrainState, Gradients, Array], tuple[TrainState, dict]]:
    """`(state, gradients, step) -> (state, metrics)` for one phase.

    If a gradient is not finite on any node, the state does not change.
    """

    def exchange(key, params, grads, compressor_state, loss, accuracy):  # one node's, without the axis [K]
        grads = before_compression(grads, params, parts)
        aggregated, new, info = parts.compressor.aggregate(phase, key, grads, compressor_state, parts.nodes)
        return aggregated, new, _metrics(info, loss, accuracy, parts.nodes)

    aggregate = on_nodes(
        exchange,
        parts.nodes,
        ins=(SHARED, placements.params, locally(placements.params), placements.compressor, LOCAL, LOCAL),
        outs=(placements.params, placements.compressor, SHARED),
    )

    def update(state, gradients, number):
        key = jax.random.fold_in(parts.key, number)
        aggregated, compressor, metrics = aggregate(
            key, state.params, gradients.grads, state.compressor, gradients.loss, gradients.accuracy
        )
        updates, opt_state = updated(
            parts.optimizer, aggregated, state.opt_state, state.params, value=metrics["loss"], grad=aggregated
        )
        new = optax.apply_updates(state.params, updates), opt_state, gradients.own
        fine = metrics["finite"] == 1  # the compressor's guard restores its own state
        old = state.params, state.opt_state, state.own
        params, opt_state, own = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)
        rate = rate_of(parts.schedule, state.opt_state, number)
        state = state._replace(params=params, opt_state=opt_state, compressor=compressor, **own)
        return state, {**metrics, "learning_rate": rate}

    return update


def _metrics(info: Info, loss: Array, accuracy: Array, nodes: Nodes) -> dict[str, Array]:
    """Means over the nodes, f32[] each, by one collective."""
    info = info_of_node(info, nodes)
    own = (loss, accuracy, info.residual_norm, info.elements_sent, info.overflow, info.finite)
    means = comm.pmean(jnp.stack([x.astype(jnp.float32) for x in own]), nodes, "metrics")
    return dict(zip(METRICS, means, strict=True))


def make_compare(
    parts: Parts, phase: Hashable, placements: TrainState = PLACEMENTS
) -> Callable[[TrainState, Gradients, Array], dict[str, Array]]:
    """`(state, gradients, step) -> figures`: the aggregate of the coming update compared with the true mean.

    Uses the gradients and the key of that update.
    """

    def compare(key, params, grads, compressor_state):  # one node's, without the axis [K]
        grads = before_compression(grads, params, parts)
        return diagnose(parts.compressor, phase, key, grads, compressor_state, parts.nodes)

    ins = (SHARED, placements.params, locally(placements.params), placements.compressor)
    on_axis = on_nodes(compare, parts.nodes, ins=ins, outs=SHARED)

    def on_state(state, gradients, number):
        key = jax.random.fold_in(parts.key, number)
        return on_axis(key, state.params, gradients.grads, state.compressor)

    return on_state
