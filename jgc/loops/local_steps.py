"""Local steps: every node takes H steps by itself, then the nodes exchange their progress.

    local = jgc.local_steps(
        inner=optax.adamw(1e-3), outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        compressor=jgc.compress.topk(alpha=0.01), every=30, nodes=nodes,
    )
    init, step = local.make_step(loss)
    state = init(jax.random.key(0), params)
    for batch in batches:
        state, metrics = step(state, batch)

With `dense` this is DiLoCo, with fragments Streaming DiLoCo. `jgc.loops.outer` has the equations.

References:
  Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
  Algorithm 1; 2025, "Streaming DiLoCo with overlapping communication", Algorithm 2.

Differs from the papers
  1. Fragments are ranges of the parameters' arrays in tree order, of about equal size; the paper's
     are whole blocks.
  2. With an overlap, the result replaces a node's parameters by default (`merge=0`). The paper
     averages the two (`merge=0.5`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jgc.checks.argument_types import check_type
from jgc.checks.misuse import check_compressor, check_loss, check_nodes, check_optimizer
from jgc.loops.fragments import take
from jgc.loops.local_loop import Init, LocalStep
from jgc.loops.outer import Due, Parts
from jgc.method.bytes_per_step import StepBytes, bytes_per_step
from jgc.method.plan import any_residual
from jgc.types import Compressor, Nodes, PyTree

if TYPE_CHECKING:
    import optax


class LocalSteps(NamedTuple):
    """Training with local steps; `local_steps` makes it.

    Attributes:
      parts: the settings, and the pure functions of whole arrays, for a custom loop.
    """

    parts: Parts

    def due(self, done: int) -> Due:
        """The fragments whose exchange and outer step come after `done` steps; or None."""
        return self.parts.due(done)

    def bytes_per_round(self, params: PyTree) -> dict[str, StepBytes]:
        """The bytes of H steps, in which every fragment is exchanged once, by phase.

        See `jgc.StepBytes`; `uncompressed` is the size of H whole gradients in f32. `params` may be
        shapes and dtypes.

        Example:
          >>> import jax, jgc, optax
          >>> nodes = jgc.make_nodes(4, devices=jax.devices()[:1])
          >>> local = jgc.local_steps(optax.sgd(1), optax.sgd(1), jgc.compress.topk(alpha=0.01),
          ...     30, nodes)
          >>> local.bytes_per_round({"w": jax.ShapeDtypeStruct((100, 100), "float32")})["top-k"]
          StepBytes(device=0.0, node=508.0, uncompressed=1200000.0)
        """
        parts = self.parts
        fragments = [take(params, leaves) for leaves in parts.leaves(params)]
        of_each = [bytes_per_step(parts.method(), part, parts.nodes) for part in fragments]
        total = {}
        for name in of_each[0]:
            sent = StepBytes(*map(sum, zip(*(part[name] for part in of_each), strict=True)))
            total[name] = sent._replace(uncompressed=parts.every * sent.uncompressed)
        return total

    def make_step(
        self, loss: Callable[..., Any], has_aux: bool = False, unroll: bool | None = None
    ) -> tuple[Init, LocalStep]:
        """Make the two functions of a training loop: `init` and `step`.

        Model state and `frozen` are as in `jgc.make_step`; a node's model state is never exchanged.
        `step(state, batch)` takes one inner step on every node, which sends nothing; then come the
        exchange and the outer step that are due. It compiles a program for the inner step and one
        for each fragment and phase, and donates the state.

        A node leaves out a step whose gradient is not finite, has a norm of 1e15 or more, or is a
        million times as large as the largest gradient that it has used lately (see
        `jgc.loops.spikes`). If a node's difference from the shared parameters is not finite or has
        a norm of 1e15 or more, the exchange changes nothing on the others, and this node restarts
        from the shared parameters.

        Args:
          loss: as in `jgc.make_step`.
          has_aux: as in `jax.value_and_grad`.
          unroll: see `jgc.node_grads`.

        Returns:
          `init(key, params, model_state=()) -> LocalState` and
          `step(state, batch, frozen=None) -> (LocalState, LocalMetrics)`, as in `jgc.make_step`.
          `step` also has its two halves, `inner` and `exchange`, and `diagnose`; see
          `jgc.loops.local_loop.LocalStep`.

        Raises:
          TypeError, ValueError: as in `jgc.make_step`; ValueError also for more fragments than
            arrays, or a pattern of layers without a match.
        """
        check_loss(loss)
        step = LocalStep(self.parts, loss, has_aux, unroll)
        return step.init, step


def local_steps(
    inner: "optax.GradientTransformation", outer: "optax.GradientTransformation",
    compressor: Compressor, every: int, nodes: Nodes, fragments: int = 1, overlap: int = 0,
    merge: float = 0.0,
) -> LocalSteps:  # fmt: skip
    """Train with H local steps on every node between two exchanges.

    After H inner steps the compressor aggregates the nodes' pseudo-gradients, theta - theta_k: the
    shared parameters minus the node's. The outer optimiser takes a step with the aggregate as its
    gradient, and every node goes on from the result. Each node has its parameters and inner state;
    outer state and aggregate are equal on all. The compressor's memory and phases count exchanges,
    not steps.

    Args:
      inner: any optax optimiser, e.g. `optax.adamw(1e-3)`; every node has a state of it, with
        different random keys. If it takes `value` and `grad` (`optax.contrib.momo`), it gets the
        node's loss and gradient.
      outer: any optax optimiser, e.g. `optax.sgd(0.7, momentum=0.9, nesterov=True)`;
        `optax.sgd(1.0)` takes the mean of the nodes' parameters.
      compressor: any of `jgc.compress` that leaves the momentum to the optimiser.
      every: H, inner steps between two exchanges of a parameter, at least 1.
      nodes: the layout; parameters may be sharded over the devices of a node.
      fragments: parts of the parameters, exchanged one after the other within H steps; from 1 to H,
        and at most the number of arrays.
      overlap: steps from an exchange to the outer step that uses its result, from 0 to H - 1: the
        time that its messages may take.
      merge: weight of a node's parameters in the average with the new shared ones, in [0, 1); 0
        discards them. Only for compressors without a residual, which would send that part twice.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number out of range, `merge` above 0 with a compressor that keeps a residual, or
        a compressor that owns the momentum.

    Example:
      >>> import jax, jax.numpy as jnp, jgc, optax
      >>> nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
      >>> local = local_steps(optax.sgd(0.25), optax.sgd(1.0), jgc.compress.dense(), every=2,
      ...     nodes=nodes)
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
            "the compressor's memory owns a momentum, and pseudo-gradients get theirs from the "
            "outer optimiser: use a method or setting without (momentum_correction=False; ef21: "
            "eta=1), and as `outer` optax.sgd(rate, momentum=0.9)"
        )
    for name, x in (("every", every), ("fragments", fragments), ("overlap", overlap)):
        check_type(name, int, x)
    check_type("merge", float, merge)
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    if not 1 <= fragments <= every:
        raise ValueError(f"fragments must be from 1 to every = {every}, got {fragments}")
    if not 0 <= overlap < every:
        raise ValueError(f"overlap must be from 0 to every - 1 = {every - 1} steps, got {overlap}")
    if not 0 <= merge < 1:
        raise ValueError(f"merge must be in [0, 1), got {merge}")
    if merge and compressor.method is not None and any_residual(compressor.method):
        raise ValueError(
            f"merge={merge:g} keeps in a node's parameters a part that the method's residual "
            "keeps, too, so it would be sent twice: give merge=0, or a method without error "
            "feedback (dense, qsgd)"
        )
    how = Parts(inner, outer, compressor, every, nodes, fragments, overlap, float(merge))
    return LocalSteps(how)
