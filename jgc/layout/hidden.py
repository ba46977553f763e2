"""Static numbers that XLA on CPU cannot see, so that it compiles the code for leaves of equal size once."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jgc.backend import backend
from jgc.types import Array


def hidden(numbers: Sequence[int], nothing: Array | bool) -> Sequence[Array]:
    """The numbers as i32[] whose values XLA does not know; on other backends than CPU, plain constants.

    XLA on CPU compiles equal operations once, 15 ms each. A start of a slice that it knows makes them unequal. So the
    numbers come out of a loop that takes no step, which XLA cannot know.

    Args:
      numbers: static.
      nothing: bool[] or i32[] of any value up to 1, not known when compiling, the same on all nodes.

    Example:
      >>> [int(x) for x in hidden([0, 3, 7], jnp.bool_(True))]
      [0, 3, 7]
    """
    first = tuple(jnp.int32(number) for number in numbers)
    if backend() != "cpu" or not first:
        return first

    def rotated(carry):  # a change that XLA cannot undo
        i, numbers = carry
        return i + 1, (*numbers[1:], numbers[0])

    return lax.while_loop(lambda carry: carry[0] < jnp.asarray(nothing, jnp.int32), rotated, (jnp.int32(1), first))[1]
