"""A user's loss in the form that the steps take."""

import inspect
from collections.abc import Callable
from typing import Any

from jgc.checks.misuse import check_arrays, check_pair, check_scalar, with_same_leaves


def in_one_form(
    loss: Callable[..., Any], has_aux: bool, has_state: bool, has_frozen: bool
) -> Callable[..., Any]:
    """`(params, batch, model_state) -> (scalar, (model_state, aux))`, whatever a loss takes.

    `loss` is as in `jgc.make_step`, with `has_frozen` it has one more argument at the end, as has
    the result. Without `has_state` the model state does not change, without `has_aux` aux is None.
    When called, raises TypeError for a loss of a different form.

    Example:
      >>> in_one_form(lambda w, x: w * x, False, False, False)(2.0, 3.0, ())
      (6.0, ((), None))
    """

    def one_form(params, batch, state, *frozen):
        args = params, batch, *([state] if has_state else []), *frozen
        out, new, aux = _called(loss, has_state, has_frozen, *args), state, None
        if has_state:
            form = "(scalar, (new model state, aux))" if has_aux else "(scalar, new model state)"
            value, new = check_pair(out, form)
            new, aux = check_pair(new, form) if has_aux else (new, None)
        elif has_aux:
            value, aux = check_pair(out, "(scalar, aux), with has_aux=True")
        else:
            value = check_scalar(out)
        check_arrays(aux, or_numbers=True)
        must = "the loss must return the model state's leaves as they were"
        return value, (with_same_leaves(state, new, must), aux)

    return one_form


def _called(loss: Callable[..., Any], has_state: bool, has_frozen: bool, *args: Any) -> Any:
    """`loss(*args)`. Raise TypeError, naming the cure, if it takes more or fewer arguments."""
    try:
        inspect.signature(loss).bind(*args)
    except ValueError:  # a built-in one, which does not say what it takes
        pass
    except TypeError as error:
        names, why, wants = ["params", "batch"], [], []
        for given, name, reason, cure in (
            (has_state, "model_state", "because init got a model state",
             "a loss with a model state wants one in init, init(key, params, model_state)"),
            (has_frozen, "frozen", "because step got frozen",
             "one with parameters that are not trained in step, step(state, batch, frozen)"),
        ):  # fmt: skip
            names += [name] if given else []
            why += [reason] if given else []
            wants += [] if given else [cure]
        call = ", ".join([f"({', '.join(names)})", *why])
        line = f"the loss is called with {call}, and does not fit: {error}"
        raise TypeError("; ".join([line, *wants])) from None
    return loss(*args)
