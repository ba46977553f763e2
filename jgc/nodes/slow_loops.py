"""A warning where the gradient of a convolution lies in a loop or branch on CPU.

XLA's CPU backend (JAX 0.10.2, 0.12.0) takes 10 to 30 times as long for it there. Forward passes and
matrix products are as fast as elsewhere.
"""

import warnings
from typing import Any, NamedTuple

from jgc.comm.jaxprs import called


class SlowLoopWarning(UserWarning):
    """The gradient of a convolution lies in `lax.scan`, `while_loop` or `cond`, on CPU.

    Example:
      >>> import warnings
      >>> warnings.filterwarnings("ignore", category=SlowLoopWarning)  # if the loop must stay
    """


class Looped(NamedTuple):
    """A convolution in a loop or branch."""

    dimensions: Any  # its dimension numbers, which tell gradients from forward passes
    loop: str  # the loop, e.g. "a scan of 8 turns"


def warn_of_slow_loops(loss: Any, gradient: Any) -> None:
    """Warn if a gradient has convolutions in loops that its loss lacks; both are jaxprs."""
    known = {x.dimensions for x in convolutions_in_loops(loss)}
    backward = [x for x in convolutions_in_loops(gradient) if x.dimensions not in known]
    if backward:
        warnings.warn(
            f"the gradient of a convolution lies in {backward[0].loop}, where XLA on CPU takes 10 "
            "to 30 times as long for it: unroll the loop (lax.scan(..., unroll=True), or a Python "
            "loop), take microbatches together, and write a branch as jnp.where of both results. "
            "Or silence this: warnings.filterwarnings('ignore', category=jgc.SlowLoopWarning)",
            SlowLoopWarning,
            stacklevel=2,
        )


def convolutions_in_loops(jaxpr: Any, loop: str = "") -> list[Looped]:
    """The convolutions of a traced function that lie in a loop or branch.

    A `scan` of one turn, or one that is unrolled whole, is no loop. `loop` is around the function.
    """
    convolutions = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if loop and eqn.primitive.name == "conv_general_dilated":
            convolutions.append(Looped(eqn.params["dimension_numbers"], loop))
        for inner in called(eqn.params):
            convolutions += convolutions_in_loops(inner, _loop_of(eqn) or loop)
    return convolutions


def _loop_of(eqn: Any) -> str:
    """The name of a loop or branch; "" for other operations, and a scan that is no loop to XLA."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        turns = params["length"]
        return f"a scan of {turns} turns" if turns > max(params["unroll"], 1) else ""
    return {"while": "a while loop", "cond": "a branch of a conditional"}.get(name, "")
