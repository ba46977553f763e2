"""Mistakes around `as_optax`, found in the state of an optax optimiser."""

import dataclasses
import warnings
from typing import Any

import jax

from jgc.checks.misuse import path_of
from jgc.types import PyTree, State

# Fields with a running mean of gradients in states of SGD, Adam, Adafactor, Prodigy and MoMo, Adan,
# AdEMAMix
MOMENTA = ("trace", "mu", "ema", "exp_avg", "m", "m1")
CENTRE = "ScaleByRStdDevState"  # of centred RMSprop: its "mu" is not added to updates
OR_METHOD = (
    "or a method or setting without (momentum_correction=False; ef21: eta=1). If it is meant: "
    "warnings.filterwarnings('ignore', category=jgc.MomentumWarning)"
)


class MomentumWarning(UserWarning):
    """The method owns the momentum, and the optimiser has one, too.

    Example:
      >>> import warnings
      >>> warnings.filterwarnings("ignore", category=MomentumWarning)  # if that is what you want
    """


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OwnsMomentum:
    """Static mark in the state of `as_optax`: whether its method owns the momentum."""

    value: bool


def check_composition(opt_state: PyTree) -> None:
    """Check the transforms around `as_optax` in an optax state; states without it always pass.

    Raises:
      ValueError: a wrapper would let every node decide by itself (docs/composing.md).

    Warns:
      MomentumWarning: the method owns the momentum, and a different transform has one, too.
    """
    for x in jax.tree.leaves(
        opt_state, is_leaf=lambda x: type(x).__name__ == "ApplyIfFiniteState" or is_accumulator(x)
    ):
        if type(x).__name__ == "ApplyIfFiniteState" and holds_state(x.inner_state):
            raise ValueError(
                "optax.apply_if_finite around as_optax: each node would decide by its "
                "gradient, and nodes would disagree. A jgc method already skips a step on all "
                "nodes if any gradient is not finite: leave apply_if_finite out, or put it "
                "behind: optax.chain(as_optax(...), optax.apply_if_finite(optimizer, n))")
        if is_accumulator(x) and jax.tree.leaves(x.skip_state):
            raise ValueError(
                "optax.MultiSteps with should_skip_update_fn around as_optax: each node would "
                "decide by its gradient. Leave should_skip_update_fn out: a jgc method skips "
                "steps that are not finite, on all nodes")
    if any(_in_sequence(x) > 1
           for x in jax.tree.leaves(opt_state, is_leaf=lambda x: _in_sequence(x) > 1)):  # fmt: skip
        raise ValueError(
            "two as_optax in one chain: the second would compress what is already the mean. "
            "For other methods for other layers: as_optax(jgc.compress.per_layer(...), nodes)")
    marks = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, OwnsMomentum))
    if any(isinstance(x, OwnsMomentum) and x.value for x in marks):
        warn_of_momentum(opt_state)


def _in_sequence(x: Any) -> int:
    """How many `as_optax` one gradient passes in a chain, or in chains nested in it."""
    name = type(x).__name__
    if name == "OptaxState":
        return 1
    apart = name in ("MaskedState", "PartitionState", "MultiTransformState")  # other leaves in each
    if apart or not isinstance(x, tuple | dict):
        return 0
    return sum(map(_in_sequence, x.values() if isinstance(x, dict) else x))


def holds_state(tree: PyTree) -> bool:
    """Whether a compressor's `State` is part of a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, State))
    return any(isinstance(x, State) for x in leaves)


def is_accumulator(x: Any) -> bool:
    """Whether x is the state of `optax.MultiSteps` around `as_optax`: each node sums its gradients.
    """
    around = getattr(x, "inner_opt_state", None)
    return getattr(x, "acc_grads", None) is not None and holds_state(around)


def warn_of_momentum(opt_state: PyTree) -> None:
    """Warn of the first momentum in an optimiser's state."""
    leaves = jax.tree_util.tree_flatten_with_path(
        opt_state, is_leaf=lambda x: isinstance(x, State) or type(x).__name__ == CENTRE)[0]
    for path, _ in leaves:
        # The first name on the path, after names of wrappers, is the optimiser's; later ones may be
        # names of parameters.
        names = [(i, key.name) for i, key in enumerate(path)
                 if "state" not in getattr(key, "name", "state")]  # fmt: skip
        at = [i for i, name in names[:1] if name in MOMENTA]
        if at:
            warnings.warn(
                "the method's memory holds the momentum, and the optimiser has one, too "
                f"(its state {path_of(path[: at[0] + 1])!r}), so gradients get it twice: use an "
                f"optimiser without momentum, e.g. optax.sgd(rate), {OR_METHOD}",
                MomentumWarning, stacklevel=3)  # fmt: skip
            return
