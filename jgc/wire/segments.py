"""The segments of a code for a ring, each computed when it is its turn, or all before the first."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax

from jgc.types import Array


def segments_of(
    part: Callable[[int, int], Array], whole: Array, places: int, overlapped: bool
) -> Callable[[Array], Array]:
    """`i -> f32[m]`, segment i of a code in `places` segments, zeros at the end of the last ones.

    If `overlapped`, a segment is computed by itself, `part(start, stop)` with static bounds, so
    that XLA can do so while the one before is sent; if not, it is cut out of the `whole` code.
    """
    width = -(-whole.size // places)

    def segment(place):
        code = part(place * width, (place + 1) * width)
        return jnp.pad(code, (0, width - code.size))

    if overlapped:
        branches = [partial(segment, place) for place in range(places)]
        return lambda i: lax.switch(i, branches)
    # The barrier makes every segment wait for all of them: XLA would compute each by itself.
    padded = lax.optimization_barrier(jnp.pad(whole, (0, places * width - whole.size)))
    return lambda i: lax.dynamic_slice_in_dim(padded, i * width, width)
