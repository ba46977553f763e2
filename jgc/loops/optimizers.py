"""The arguments that a step gives optax optimisers, and messages for those that need others."""

import re
from typing import Any

import jax

from jgc.types import PyTree

_LINE_SEARCH = (
    "is a line search, which calls the loss of all nodes several times in a step, each time with "
    "a message: optax.lbfgs(rate, linesearch=None) works with gradients only, optax.polyak_sgd "
    "with the value of the loss"
)
_LOSS_AS_FUNCTION = "a step takes one gradient, and compresses it before the optimiser sees it"
_UNFIT = {  # by the name of a state
    "ScaleByBacktrackingLinesearchState": _LINE_SEARCH,
    "ScaleByZoomLinesearchState": _LINE_SEARCH,
    "LookaheadState": (
        "is optax.lookahead, which wants parameters in pairs (LookaheadParams) and gradients of "
        "one of the two: jgc.local_steps(inner=fast_optimizer, outer=optax.sgd(slow_step_size), "
        "every=sync_period, ...) is the same algorithm, and sends only in every sync_period-th "
        "step"
    ),
    "DifferentiallyPrivateAggregateState": (
        "is dpsgd's, which wants the gradient of every example, and a step has each node's mean "
        "over its examples: take, clip and noise them in your training loop (docs/your_loop.md, "
        "As an optax transform)"
    ),
    "HutchinsonState": (
        "is sophia's, which takes second derivatives of the loss, obj_fn, and "
        f"{_LOSS_AS_FUNCTION}: use optax.adamw, or sophia with a hessian_diagonal_fn that needs "
        "gradients only"
    ),
}


def check_supported(state: PyTree, name: str = "the optimiser") -> None:
    """Raise TypeError, naming the cure, for the state of an optimiser that no step can run."""
    for part in jax.tree.leaves(state, is_leaf=lambda x: type(x).__name__ in _UNFIT):
        if (reason := _UNFIT.get(type(part).__name__)) is not None:
            raise TypeError(f"a part of {name} {reason}")


def updated(
    optimizer: Any, grads: PyTree, state: PyTree, params: PyTree, name: str = "the optimiser",
    **extras: Any,
) -> tuple[PyTree, PyTree]:  # fmt: skip
    """Call `optimizer.update` with the `extras` that it accepts.

    `value`, the loss f32[], is equal on all nodes that share the state. Raises TypeError if the
    optimiser wants other arguments.
    """
    accepted = extras
    while True:
        try:
            return optimizer.update(grads, state, params, **accepted)
        except (TypeError, ValueError) as error:
            if missing := _missing(str(error)):
                raise TypeError(_wants(name, missing, extras, error)) from None
            # a plain optimiser takes no extra argument, nor does contrib.sam, despite its type
            refused = "unexpected keyword argument {!r}".format
            others = {key: x for key, x in accepted.items() if refused(key) not in str(error)}
            if len(others) == len(accepted):
                raise
            accepted = others


def _missing(error: str) -> list[str]:
    """The arguments that an error of `update` asks for."""
    names = re.search(r"required keyword-only arguments?: (.*)", error)
    if names:
        return re.findall(r"'(\w+)'", names[1])
    return re.findall(r"^(?!params)(\w+) must be provided", error)  # of sophia, and of contrib.sam


def _wants(name: str, missing: list[str], extras: dict[str, Any], error: Exception) -> str:
    if "value_fn" in missing:
        return f"{name} {_LINE_SEARCH} ({error})"
    line = f"{name} wants {' and '.join(map(repr, missing))} ({error}), "
    if not extras:
        return (
            f"{line}and an outer step has no loss: its gradient is the mean of the nodes' "
            "pseudo-gradients. Give such an optimiser as `inner`, which gets each node's loss"
        )
    if "grad_fn" in missing:
        line = f"{name} wants the loss as a function ({error}), but {_LOSS_AS_FUNCTION}"
        return f"{line}: contrib.sam works with opaque_mode=False"
    return f"{line}and a step gives {' and '.join(f'{key}=' for key in extras)} besides gradients"
