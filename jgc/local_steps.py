"""Local steps: every node takes H steps of its own, then the nodes exchange how far they have come, compressed.

    local = jgc.local_steps(
        inner=optax.adamw(1e-3), outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        compressor=jgc.compress.topk(alpha=0.01), every=30, nodes=nodes,
    )
    init, step = local.make_step(loss)
    state = init(jax.random.key(0), params)
    for batch in batches:
        state, metrics = step(state, batch)

With `dense` this is DiLoCo, with fragments Streaming DiLoCo. `jgc.method.outer` has the equations.

References:
  Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", Algorithm 1.
  Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", Algorithm 2.

Differs from the papers
  1. Fragments are ranges of the parameters' arrays in tree order, of about equal size; the paper's are whole blocks.
  2. With an overlap, the result replaces a node's own parameters (`merge=0`), unless `merge` says otherwise. The paper
     averages the two (`merge=0.5`).
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from jgc.backend import backend_of
from jgc.buffers import copied, device_of, donatable, lies_elsewhere, put_arrays
from jgc.fits import check_remembered, remember
from jgc.frozen import Frozen, frozen_for
from jgc.gradients import node_grads
from jgc.losses import in_one_form
from jgc.method.bytes_per_step import StepBytes
from jgc.method.local_fits import check_local
from jgc.method.mixed import Made, check_own, note
from jgc.method.outer import Arrays, Due, Parts
from jgc.method.phases import phase_after, phase_at
from jgc.method.spikes import largest_after, limits_of
from jgc.misuse import check_arrays, check_compressor, check_key, check_loop, check_loss, check_nodes, check_optimizer
from jgc.model_state import of_all_nodes
from jgc.placement import BATCH, LOCAL, check_node_axes
from jgc.skipped import make_skip_warning
from jgc.typed import check_type
from jgc.types import Array, Compressor, Info, Key, Nodes, Phase, PyTree, State

if TYPE_CHECKING:
    import optax


class LocalState(NamedTuple):
    """The state that a loop carries from step to step. `step` donates its arrays: use the returned state alone.

    Attributes:
      step: inner steps so far, on the host.
      phases: the compressor's phase of each fragment's last exchange, on the host.
      params: the parameters that all nodes share, as the last outer steps left them: what to evaluate and to keep.
      outer: the outer optimiser's states, one for each fragment, equal on all nodes.
      waiting: with an overlap, the aggregates that wait to be applied.
      compressor: the compressor's states, one for each fragment; local leaves have a leading axis [K].
      own: each node's own parameters, leaves [K, ...].
      inner: each node's own state of the inner optimiser, leaves [K, ...].
      largest_norm: f32[K], the largest norm of a gradient that each node has used, 0 before the first; see `step`.
      key: the random key of all exchanges; that after step s uses `fold_in(key, s)`.
      model_state: each node's own, such as batch statistics, leaves [K, ...]; () if `init` got none.
    """

    step: int
    phases: tuple[Phase, ...]
    params: PyTree
    outer: tuple[PyTree, ...]
    waiting: tuple[PyTree, ...]
    compressor: tuple[State, ...]
    own: PyTree
    inner: PyTree
    largest_norm: Array
    key: Key
    model_state: PyTree = ()


class LocalMetrics(NamedTuple):
    """What a step reports, on the devices: reading a value waits for the step. Between exchanges nothing is averaged.

    Attributes:
      loss: f32[K], each node's own, before its update.
      finite: bool[K], whether a node could use its gradient; where it could not, the node left out this step, and its
        model state stayed as it was. A gradient cannot be used if it is not finite, has a norm of 1e15 and more, or is
        a million times as large as the largest that the node has used.
      exchanged: the fragment that was exchanged after the step; None if none was.
      info: its `Info`, leaves [K]; None without an exchange. If `info.finite` is false, the exchange changed nothing.
      aux: with `has_aux` the second output of the loss, leaves [K, ...]; else None.
      grad_norm: f32[K], the norm of each node's gradient, NaN or infinite where the gradient is.
      reset: bool[K], with a refused exchange the nodes whose difference from the shared parameters was not finite, or
        had a norm of 1e15 and more: they began anew from the shared parameters, with a fresh state of the inner
        optimiser. None without an exchange.
    """

    loss: Array
    finite: Array
    exchanged: int | None
    info: Info | None
    aux: PyTree = None
    grad_norm: Any = None
    reset: Array | None = None


Init = Callable[..., LocalState]
Step = Callable[..., tuple[LocalState, LocalMetrics]]


class LocalSteps(NamedTuple):
    """Training with local steps; `local_steps` makes it.

    Attributes:
      parts: the settings, and the pure functions of whole arrays, for a loop of your own.
    """

    parts: Parts

    def due(self, done: int) -> Due:
        """The fragment that is exchanged after `done` steps, and the one whose outer step comes then; or None."""
        return self.parts.due(done)

    def bytes_per_round(self, params: PyTree) -> dict[str, StepBytes]:
        """The bytes of H steps by the compressor's phase; see `jgc.StepBytes`. `uncompressed` is that of H gradients.

        Example:
          >>> import jgc, optax
          >>> nodes = jgc.make_nodes(4, devices=jax.devices()[:1])
          >>> local = jgc.local_steps(optax.sgd(1), optax.sgd(1), jgc.compress.topk(alpha=0.01), 30, nodes)
          >>> local.bytes_per_round({"w": jax.ShapeDtypeStruct((100, 100), "float32")})["top-k"]
          StepBytes(device=0.0, node=508.0, uncompressed=1200000.0)
        """
        return self.parts.bytes_per_round(params)

    def make_step(self, loss: Callable[..., Any], has_aux: bool = False, unroll: bool = True) -> tuple[Init, Step]:
        """Make the two functions of a training loop: `init` and `step`.

        `init(key, params)` copies the parameters to the devices, for all nodes and for each. `init(key, params,
        model_state)` does so for a model with a state that is no parameter (batch statistics): every node keeps one of
        its own, which is never exchanged; its random keys differ from those of other nodes, as in `jgc.make_step`.
        `step(state, batch)` takes one inner step on every node, which sends nothing; then come the exchange and the
        outer step that are due. It compiles one program for the inner step and one for each fragment and phase, and
        donates the state. `step(state, batch, frozen)` gives the loss parameters that are
        not trained as its last argument; see `jgc.make_step`.

        A node leaves out a step whose gradient is not finite, or has a norm of 1e15 and more, as in `jgc.make_step`;
        and one a million times as large as the largest gradient that it has used (`jgc.method.spikes` says why). If a
        node's difference from the shared parameters is not finite or has a norm of 1e15 and more, the exchange changes
        nothing on the others, and this node begins anew from the shared parameters.

        Args:
          loss: as in `jgc.make_step`: `(params, batch) -> scalar`, the mean loss over a node's own examples; with
            `has_aux` `-> (scalar, aux)`. With a model state `(params, batch, model_state) -> (scalar, model_state)`,
            with `has_aux`, too, `-> (scalar, (model_state, aux))`.
          has_aux: as in `jax.value_and_grad`.
          unroll: see `jgc.on_nodes`; True is much faster for convolutions on CPU.

        Returns:
          `init(key, params, model_state=()) -> LocalState` and `step(state, batch, frozen=None) -> (LocalState,
          LocalMetrics)`. The leaves of `batch` have leading axes [K, b]: b examples for each of the K nodes. With
          several processes, `key`, `params`, `batch` and `frozen` are equal in all of them, or global arrays
          (`jgc.place_parts`).

        Raises:
          TypeError: something else in place of the loss; in `init`, of a random key, a leaf of the parameters that is
            not an array of floats, or one of the model state that is not an array; in `step`, a loss that returns
            another model state than it got.
          ValueError: in `init`, more fragments than arrays, no arrays, an optimiser that holds `as_optax`, or a pattern
            of layers without a match; in `step`, a leaf of the batch whose first axis is not K, or an averaged loss.
        """
        check_loss(loss)
        warn_of_skips = make_skip_warning("steps of one node")
        put_frozen, made = frozen_for(self.parts.nodes), WeakValueDictionary[int, Any]()
        loop = _Loop(self.parts, loss, has_aux, unroll, put_frozen, {}, warn_of_skips, set(), {}, made)
        return loop.init, loop.step


def local_steps(
    inner: "optax.GradientTransformation",
    outer: "optax.GradientTransformation",
    compressor: Compressor,
    every: int,
    nodes: Nodes,
    fragments: int = 1,
    overlap: int = 0,
    merge: float = 0.0,
) -> LocalSteps:
    """Train with H local steps on every node between two exchanges.

    After H inner steps the compressor aggregates the nodes' pseudo-gradients, theta - theta_k: the parameters that all
    share minus the node's own. The outer optimiser takes a step with the aggregate as its gradient, and every node goes
    on from the result. Parameters and inner state are each node's own; outer state and aggregate are equal on all.
    The compressor's memory and phases count exchanges, not steps.

    Args:
      inner: any optax optimiser, e.g. `optax.adamw(1e-3)`; every node has one of its own. It also gets `value`, the
        node's loss, and `grad`, if it takes them (`optax.contrib.momo`); the outer one does not.
      outer: any optax optimiser, e.g. `optax.sgd(0.7, momentum=0.9, nesterov=True)`; `optax.sgd(1.0)` takes the mean of
        the nodes' parameters.
      compressor: any of `jgc.compress` that leaves the momentum to the optimiser.
      every: H, inner steps between two exchanges of a parameter, at least 1.
      nodes: the layout; parameters may be divided among the devices of a node.
      fragments: parts of the parameters, exchanged one after the other within H steps; from 1 to H, and at most the
        arrays of the parameters.
      overlap: steps from an exchange to the outer step with its result, from 0 to H - 1: time in which it can travel.
        Of what a node moved in these steps it keeps the share `merge`; with `merge=0` nothing.
      merge: share of its own parameters that a node keeps when it takes over the shared ones, in [0, 1). Only for
        compressors without a residual: what was not sent would be kept twice.

    Raises:
      TypeError: something else in place of an optimiser, a compressor or a whole number.
      ValueError: `every` below 1, `fragments`, `overlap` or `merge` out of range, `merge` above 0 with a compressor
        that keeps a residual, a compressor that owns the momentum.

    Example:
      >>> import jax.numpy as jnp, jgc, optax
      >>> nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
      >>> local = local_steps(optax.sgd(0.25), optax.sgd(1.0), jgc.compress.dense(), every=2, nodes=nodes)
      >>> init, step = local.make_step(lambda w, x: jnp.mean((w - x) ** 2))
      >>> state = init(jax.random.key(0), jnp.zeros(1))
      >>> for _ in range(2):
      ...     state, metrics = step(state, jnp.array([[1.0], [3.0]]))
      ...     print(state.params, state.own.tolist(), metrics.exchanged)
      [0.] [[0.5], [1.5]] None
      [1.5] [[1.5], [1.5]] 0
    """
    for name, x in (("inner", inner), ("outer", outer)):
        check_optimizer(x, name)
    check_compressor(compressor)
    check_nodes(nodes)
    if compressor.owns_momentum:
        raise ValueError(
            "the compressor's memory owns a momentum, and pseudo-gradients get theirs from the outer optimiser: use a "
            "method or setting without (momentum_correction=False; ef21: eta=1), and as `outer` optax.sgd(rate, "
            "momentum=0.9)"
        )
    for name, x in (("every", every), ("fragments", fragments), ("overlap", overlap)):
        check_type(name, int, x)
    check_type("merge", float, merge)
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    if not 1 <= fragments <= every:
        raise ValueError(f"fragments must be from 1 to every = {every}, one exchange after a step, got {fragments}")
    if not 0 <= overlap < every:
        raise ValueError(f"overlap must be from 0 to every - 1 = {every - 1} steps, got {overlap}")
    if not 0 <= merge < 1:
        raise ValueError(f"merge must be in [0, 1) (0: every node takes over the shared parameters), got {merge}")
    if merge and compressor.core is not None and compressor.core.has_residual():
        raise ValueError(
            f"merge={merge:g} keeps in a node's own parameters what the method keeps in its residual, too, so it would "
            "be sent twice: give merge=0, or a method without error feedback (dense, qsgd)"
        )
    return LocalSteps(Parts(inner, outer, compressor, every, nodes, fragments, overlap, float(merge)))


class _Loop(NamedTuple):
    """A loss with the compiled programs so far, by what they do, and the parameters that `init` made."""

    parts: Parts
    loss: Callable[..., Any]
    has_aux: bool
    unroll: bool
    put_frozen: Callable[..., Frozen]
    programs: dict[Hashable, Callable[..., Any]]
    warn_of_skips: Callable[[int, Array], None]
    fitting: set[Any]  # structures of states that fit
    first: dict[Any, PyTree]  # see `remember`
    made: Made

    def init(self, key: Key, params: PyTree, model_state: PyTree = ()) -> LocalState:
        check_key(key)
        parts = self.parts
        arrays, put = parts.first(key, params), partial(put_arrays, nodes=parts.nodes, device=device_of(params))
        phases = (phase_at(parts.compressor.schedule, 0),) * parts.fragments
        kept = put(of_all_nodes(model_state, parts.nodes), placements=LOCAL)
        remember(self.first, arrays.params, kept)
        note(self.made, arrays)
        return LocalState(0, phases, *arrays, put(key), kept)

    def step(self, state: LocalState, batch: PyTree, frozen: PyTree = None) -> tuple[LocalState, LocalMetrics]:
        check_loop(state, LocalState, batch, self.parts.nodes)
        if len(state.phases) != self.parts.fragments:
            raise ValueError(f"these steps have {self.parts.fragments} fragments, and the state {len(state.phases)}")
        if (structure := jax.tree.structure(state[2:])) not in self.fitting:
            check_remembered(self.first, state.params, state.model_state)
            check_local(self.parts, Arrays(*state[2:-2]))
            self.fitting.add(structure)
        parts, put = self.parts, partial(put_arrays, nodes=self.parts.nodes, device=device_of(state.params))
        donated = Arrays(*state[2:-2])._asdict() | {"model_state": state.model_state}
        donated = donatable(donated, batch=batch, key=state.key, frozen=frozen)
        key, kept, arrays = state.key, donated.pop("model_state"), Arrays(**donated)
        phases, done = state.phases, state.step + 1
        before = arrays
        if not self.programs or lies_elsewhere((*arrays, kept, key), parts.nodes):  # the state was restored or moved
            arrays, key = put(arrays, placements=parts.placements(arrays)), put(key)
            kept = put(kept, placements=LOCAL)
        check_own(self.made, before, arrays, parts, state.step, first=not self.programs)
        check_arrays(batch, or_numbers=True)
        check_node_axes(BATCH, batch, parts.nodes, "the batch")
        fixed = self.put_frozen(frozen, device_of(state.params))
        inner_step = self._program(("inner", jax.tree.structure(kept), fixed.name), self._inner, arrays, kept, fixed)
        batch = put(batch, placements=BATCH)
        taken = inner_step(arrays.own, arrays.inner, kept, batch, arrays.largest_norm, fixed.arrays)
        own, inner, kept, largest, loss, finite, aux, norms = taken
        self.warn_of_skips(state.step, finite)
        arrays, info, reset = arrays._replace(own=own, inner=inner, largest_norm=largest), None, None
        due = parts.due(done)
        if due.exchange is not None:
            arrays, phase = self._enter(arrays, due.exchange, phases[due.exchange], done)
            phases = (*phases[: due.exchange], phase, *phases[due.exchange + 1 :])
            exchange = self._program((due.exchange, phase.value), self._exchange, arrays, due.exchange, phase.value)
            arrays, info, reset = exchange(arrays, key, np.int32(state.step))
        if parts.overlap and due.apply is not None:
            arrays = self._program(("apply", due.apply), self._apply, arrays, due.apply)(arrays)
        metrics = LocalMetrics(loss, finite, due.exchange, info, aux, norms, reset)
        return LocalState(done, phases, *arrays, key, kept), metrics

    def _enter(self, arrays: Arrays, fragment: int, before: Phase, done: int) -> tuple[Arrays, Phase]:
        """The phase of a fragment's exchange, and the arrays after the compressor's transition to it."""
        parts, states = self.parts, list(arrays.compressor)
        method, round_ = parts.method(), parts.round_of(fragment, done)
        phase = phase_after(method, before, round_, states[fragment], parts.nodes)
        if phase.value == before.value:
            return arrays, phase
        after = method.transition(before.value, phase.value, states[fragment], parts.nodes)
        states[fragment] = put_arrays(copied(after), parts.nodes, device_of(arrays.params))
        return arrays._replace(compressor=tuple(states)), phase

    def _program(self, name: Hashable, make: Callable[..., Any], arrays: Arrays, *args: Any) -> Callable[..., Any]:
        # Devices of a CPU are threads of one processor: collectives of several programs at once can wait forever.
        mesh = self.parts.nodes.mesh
        if mesh is not None and mesh.size > 1 and backend_of(self.parts.nodes) == "cpu":
            jax.block_until_ready(arrays)
        name = name, jax.tree.structure(arrays)
        if name not in self.programs:
            self.programs[name] = make(arrays, *args)
        return self.programs[name]

    def _inner(self, arrays: Arrays, kept: PyTree, frozen: Frozen) -> Callable[..., Any]:
        parts, placements, has_frozen = self.parts, self.parts.placements(arrays), frozen.placements is not None
        gradients = node_grads(
            in_one_form(self.loss, self.has_aux, bool(jax.tree.leaves(kept)), has_frozen), parts.nodes, has_aux=True,
            unroll=self.unroll, local=True, placements=placements.own, frozen=frozen.placements,
        )  # fmt: skip
        inner_step = parts.make_inner(placements)

        def inner_update(own, inner, kept, batch, largest, fixed):
            args = own, batch, kept, *([fixed] if has_frozen else [])
            (loss, (new, aux)), grads = gradients(*args)  # all with an axis [K]
            own, inner, finite, norms = inner_step(own, inner, grads, loss, limits_of(largest))
            largest = largest_after(largest, norms, finite)
            stayed = jax.tree.map(lambda a, b: jnp.where(finite.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, kept)
            return own, inner, stayed, largest, loss, finite, aux, norms

        shardings = jax.tree.map(lambda x: x.sharding, (arrays.own, arrays.inner, kept, arrays.largest_norm))
        return jax.jit(inner_update, donate_argnums=(0, 1, 2, 4), out_shardings=(*shardings, *[None] * 4))

    def _exchange(self, arrays: Arrays, fragment: int, phase: Hashable) -> Callable[..., Any]:
        parts = self.parts
        leaves = parts.leaves(arrays.params)[fragment]
        exchange = parts.make_exchange(parts.placements(arrays), leaves, fragment, phase)

        def exchange_update(arrays, key, step):
            return exchange(jax.random.fold_in(key, step), arrays)

        shardings = jax.tree.map(lambda x: x.sharding, arrays)
        return jax.jit(exchange_update, donate_argnums=0, out_shardings=(shardings, None, None))

    def _apply(self, arrays: Arrays, fragment: int) -> Callable[..., Any]:
        parts = self.parts
        apply = parts.make_apply(parts.placements(arrays), parts.leaves(arrays.params)[fragment], fragment)

        def outer_update(arrays):
            return apply(arrays, arrays.waiting[fragment])

        return jax.jit(outer_update, donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, arrays))
