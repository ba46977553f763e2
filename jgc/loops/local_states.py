"""Check that the arrays of local steps are the ones that their `init` makes."""

import jax

from jgc.checks.states import RESTORE, check_fits
from jgc.loops.fragments import take
from jgc.loops.outer import Arrays, Parts, Waiting
from jgc.method.signature import check_state


def check_local(parts: Parts, arrays: Arrays) -> None:
    """Raise ValueError, naming the field and the leaf, unless all fields of a state belong to these
    local steps."""
    params = arrays.params
    inner = jax.eval_shape(parts.inner.init, params)
    own, inner = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((parts.nodes.count, *x.shape), x.dtype), (params, inner)
    )
    check_fits("own", arrays.own, own, "of other parameters than params")
    check_fits("inner", arrays.inner, inner, "of another inner optimiser, or of other parameters")
    fragments = [take(params, leaves) for leaves in parts.leaves(params)]
    outer = tuple(jax.eval_shape(parts.outer.init, part) for part in fragments)
    check_fits("outer", arrays.outer, outer, "of another outer optimiser, or of other parameters")
    waiting = tuple(
        Waiting(part, jax.ShapeDtypeStruct((), bool)) for part in fragments if parts.overlap
    )
    check_fits(
        "waiting",
        arrays.waiting,
        waiting,
        "of local steps with another overlap, or of other parameters",
    )
    states = arrays.compressor
    if not isinstance(states, tuple) or len(states) != len(fragments):
        form = f"a {type(states).__name__} of {len(states)}"
        raise ValueError(
            f"compressor must be a tuple of {len(fragments)} states, one a fragment, and is "
            f"{form}: {RESTORE}"
        )
    for i, (state, part) in enumerate(zip(states, fragments, strict=True)):
        check_state(parts.method().init, part, state, parts.nodes, f"compressor/{i}")
