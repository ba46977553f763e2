"""The guard of local steps: the gradients that a node leaves out, and the fresh inner state after a
reset.

The first rule is the one of `make_step`: a node leaves out a gradient that is not finite, or has a
norm of `LARGEST_NORM` and more. Smaller gradients can do as much harm. A single gradient 1e12 times
too large moves SGD's parameters far away, and for hundreds of steps its remains in Adam's second
moment stop the node, and those in Lion's and Muon's momentum set its direction. No fixed norm tells
such a gradient from one of a loss in other units. Hence the second rule: a node leaves out a
gradient `SPIKE` times as large as the largest that it has used lately.

The second rule cannot stop training, because each step that it leaves out raises the remembered
norm tenfold. If the first gradients are tiny, 1e-9 say, and later ones near 1, it leaves out three
steps. The remembered norm fades by a tenth in each step that is used, so bad batches that come now
and then do not wear the rule out; many in a row do. The first gradient of a node has nothing to be
compared with.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jgc.layout.devices import LARGEST_NORM
from jgc.types import Array, PyTree

if TYPE_CHECKING:
    import optax

# Far above the jump of one difficult batch, and low enough to catch a gradient 1e12 times too large
# where gradients have shrunk to 1e-6 of the largest.
SPIKE = 1e6
RAISE = 10.0  # factor on the remembered norm after a step that was left out
# factor after a step that was used: without it, one bad batch in fifty would raise the norm for
# good
FADE = 0.9


def limits_of(largest: Array) -> Array:
    """The norms at which nodes leave a gradient out, f32[K].

    Args:
      largest: f32[K], the remembered norm of each node: the largest that it has used, fading; 0
        before the first.

    Example:
      >>> limits_of(jnp.array([0.0, 2.0, 1e12]))
      Array([1.e+15, 2.e+06, 1.e+15], dtype=float32)
    """
    return jnp.where(largest > 0, jnp.minimum(SPIKE * largest, LARGEST_NORM), LARGEST_NORM)


def largest_after(largest: Array, norms: Array, usable: Array) -> Array:
    """The remembered norms after a step, f32[K].

    Args:
      largest: f32[K], those before it.
      norms: f32[K], of the step's gradients; may be NaN.
      usable: bool[K], which gradients were used.

    Example:
      >>> norms = jnp.array([3.0, 1.0, 1e12, jnp.nan])
      >>> usable = jnp.array([True, True, False, False])
      >>> largest_after(jnp.full(4, 2.0), norms, usable)
      Array([ 3. ,  1.8, 20. ,  2. ], dtype=float32)
    """
    refused = jnp.where(norms < LARGEST_NORM, RAISE * largest, largest)
    return jnp.where(usable, jnp.maximum(FADE * largest, norms), refused)


def fresh(optimizer: "optax.GradientTransformation", params: PyTree, state: PyTree) -> PyTree:
    """The optimiser's first state for these parameters, with the old counts of schedules and
    injected hyperparameters.

    Example:
      >>> import optax
      >>> optimizer, params = optax.adam(optax.linear_schedule(0.1, 0.0, 100)), jnp.zeros(2)
      >>> state = optimizer.update(jnp.ones(2), optimizer.init(params), params)[1]
      >>> adam, schedule = fresh(optimizer, params, state)
      >>> int(adam.count), adam.mu.tolist(), int(schedule.count)
      (0, [0.0, 0.0], 1)
    """
    return _anew(optimizer.init(params), state)


def _anew(first: PyTree, state: PyTree) -> PyTree:
    def node(a, b):
        if hasattr(b, "hyperparams"):  # of optax.inject_hyperparams
            return b._replace(inner_state=_anew(a.inner_state, b.inner_state))
        return b if _follows_schedule(b) else a

    return jax.tree.map(node, first, state, is_leaf=_follows_schedule)


def _follows_schedule(x: Any) -> bool:
    return type(x).__name__ == "ScaleByScheduleState" or hasattr(x, "hyperparams")
