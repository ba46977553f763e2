"""A user's loss in the one form that the steps take."""

import inspect
from collections.abc import Callable
from typing import Any

from jgc.checks.misuse import check_arrays, check_model_state, check_pair, check_scalar


def in_one_form(
    loss: Callable[..., Any], has_aux: bool, has_state: bool, has_frozen: bool = False
) -> Callable[..., Any]:
    """`(params, batch, model_state) -> (scalar, (model_state, aux))`, the model state with the
    leaves it had.

    Args:
      loss: `(params, batch) -> scalar`; with `has_aux` `-> (scalar, aux)`. With `has_state`
        `(params, batch, model_state) -> (scalar, model_state)`; with both
        `-> (scalar, (model_state, aux))`. With `has_frozen` one more argument at the end, of the
        result, too.
      has_aux: whether the loss returns more than a scalar; else `aux` is None.
      has_state: whether the model has a state that is no parameter; else `model_state` stays what
        it is, ().
      has_frozen: whether the step got parameters that are not trained.

    Raises:
      TypeError: when called, of a loss that returns something else than this, or another model
        state than it got.

    Example:
      >>> in_one_form(lambda w, x: w * x, has_aux=False, has_state=False)(2.0, 3.0, ())
      (6.0, ((), None))
    """

    def without_state(params, batch, state, *frozen):
        out = _called(loss, has_state, has_frozen, params, batch, *frozen)
        value, aux = (
            check_pair(out, "(scalar, aux), with has_aux=True")
            if has_aux
            else (check_scalar(out), None)
        )
        check_arrays(aux, or_numbers=True)
        return value, (state, aux)

    def with_state(params, batch, state, *frozen):
        form = "(scalar, (new model state, aux))" if has_aux else "(scalar, new model state)"
        value, out = check_pair(
            _called(loss, has_state, has_frozen, params, batch, state, *frozen), form
        )
        new, aux = check_pair(out, form) if has_aux else (out, None)
        check_arrays(aux, or_numbers=True)
        return value, (check_model_state(state, new), aux)

    return with_state if has_state else without_state


def _called(loss: Callable[..., Any], has_state: bool, has_frozen: bool, *args: Any) -> Any:
    """`loss(*args)`. Raise TypeError, naming the cure, if it takes another number of arguments."""
    try:
        inspect.signature(loss).bind(*args)
    except ValueError:  # a built-in one, which does not say what it takes
        pass
    except TypeError as error:
        names = [
            "params",
            "batch",
            *(["model_state"] if has_state else []),
            *(["frozen"] if has_frozen else []),
        ]
        why = ["because init got a model state"] if has_state else []
        why += ["because step got frozen"] if has_frozen else []
        call = ", ".join([f"({', '.join(names)})", *why])
        wants = (
            []
            if has_state
            else ["a loss with a model state wants one in init, init(key, params, model_state)"]
        )
        wants += (
            []
            if has_frozen
            else ["one with parameters that are not trained in step, step(state, batch, frozen)"]
        )
        raise TypeError(
            "; ".join([f"the loss is called with {call}, and does not fit: {error}", *wants])
        ) from None
    return loss(*args)
