"""A user's loss in the one form that the steps take."""

from collections.abc import Callable
from typing import Any

from jgc.misuse import check_model_state, check_pair, check_scalar


def in_one_form(loss: Callable[..., Any], has_aux: bool, has_state: bool) -> Callable[..., Any]:
    """`(params, batch, model_state) -> (scalar, (model_state, aux))`, the model state with the leaves it had.

    Args:
      loss: `(params, batch) -> scalar`; with `has_aux` `-> (scalar, aux)`. With `has_state`
        `(params, batch, model_state) -> (scalar, model_state)`; with both `-> (scalar, (model_state, aux))`.
      has_aux: whether the loss returns more than a scalar; else `aux` is None.
      has_state: whether the model has a state that is no parameter; else `model_state` stays what it is, ().

    Raises:
      TypeError: when called, of a loss that returns something else than this, or another model state than it got.

    Example:
      >>> in_one_form(lambda w, x: w * x, has_aux=False, has_state=False)(2.0, 3.0, ())
      (6.0, ((), None))
    """

    def without_state(params, batch, state):
        out = loss(params, batch)
        value, aux = check_pair(out, "(scalar, aux), with has_aux=True") if has_aux else (check_scalar(out), None)
        return value, (state, aux)

    def with_state(params, batch, state):
        form = "(scalar, (new model state, aux))" if has_aux else "(scalar, new model state)"
        value, out = check_pair(loss(params, batch, state), form)
        new, aux = check_pair(out, form) if has_aux else (out, None)
        return value, (check_model_state(state, new), aux)

    return with_state if has_state else without_state
