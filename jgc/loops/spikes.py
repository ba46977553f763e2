"""The guard of local steps: gradients that a node leaves out, and its fresh state after a reset.

As in `make_step`, a node leaves out a gradient that is not finite or has a norm of `LARGEST_NORM`
or more. Smaller gradients can do as much harm: one that is 1e12 times too large moves SGD's
parameters far away, and stays in Adam's second moment, or Lion's and Muon's momentum, for hundreds
of steps. No fixed norm tells it from the gradient of a loss in other units. Hence the second rule:
a node leaves out a gradient `SPIKE` times as large as the largest that it has used lately.

The second rule cannot stop training: each step that it leaves out raises the remembered norm
tenfold. If gradients grow from 1e-9 to 1, it leaves out three steps. The remembered norm fades by a
tenth in each used step, so occasional bad batches do not wear the rule out; many in a row do. A
node's first gradient is compared with nothing.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jgc.checks.misuse import is_key
from jgc.layout.devices import LARGEST_NORM
from jgc.types import Array, PyTree

if TYPE_CHECKING:
    import optax

# Far above the jump of a difficult batch; catches a gradient 1e12 times too large also where
# gradients have shrunk to 1e-6 of the largest.
SPIKE = 1e6
RAISE = 10.0  # factor on the remembered norm after a step that was left out
# states of optax with a schedule's count, and nothing that a fresh state must lose
SCHEDULES = ("ScaleByScheduleState", "WeightDecaySchedule", "AddNoiseState")
FADE = 0.9  # factor after a used step: else one bad batch in fifty would raise the norm for good


def limits_of(largest: Array) -> Array:
    """The norms at which nodes leave a gradient out, f32[K], from the remembered ones, 0 at first.

    Example:
      >>> limits_of(jnp.array([0.0, 2.0, 1e12]))
      Array([1.e+15, 2.e+06, 1.e+15], dtype=float32)
    """
    return jnp.where(largest > 0, jnp.minimum(SPIKE * largest, LARGEST_NORM), LARGEST_NORM)


def largest_after(largest: Array, norms: Array, usable: Array) -> Array:
    """The remembered norms after a step with gradients of these norms, which may be NaN, f32[K].

    Example:
      >>> norms = jnp.array([3.0, 1.0, 1e12, jnp.nan])
      >>> usable = jnp.array([True, True, False, False])
      >>> largest_after(jnp.full(4, 2.0), norms, usable)
      Array([ 3. ,  1.8, 20. ,  2. ], dtype=float32)
    """
    refused = jnp.where(norms < LARGEST_NORM, RAISE * largest, largest)
    return jnp.where(usable, jnp.maximum(FADE * largest, norms), refused)


def fresh(optimizer: "optax.GradientTransformation", params: PyTree, state: PyTree) -> PyTree:
    """The optimiser's first state, but for counts of schedules, hyperparameters and random keys."""
    return _anew(optimizer.init(params), state)


def _anew(first: PyTree, state: PyTree) -> PyTree:
    def node(path, a, b):
        if hasattr(b, "hyperparams"):  # of optax.inject_hyperparams
            return b._replace(inner_state=_anew(a.inner_state, b.inner_state))
        name = getattr(path[-1], "name", "") if path else ""  # a state may be one leaf
        of_multi_steps = name in ("mini_step", "gradient_step")
        # with its first key a node would draw its old noise again
        return b if _follows_schedule(b) or of_multi_steps or is_key(b) else a

    return jax.tree_util.tree_map_with_path(node, first, state, is_leaf=_follows_schedule)


def _follows_schedule(x: Any) -> bool:
    return type(x).__name__ in SCHEDULES or hasattr(x, "hyperparams")
