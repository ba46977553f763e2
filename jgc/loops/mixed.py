"""Detect shared parameters of one run next to nodes' parameters of a different run."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgc.checks.loop_states import first_leaf
from jgc.checks.misuse import is_key
from jgc.loops.fragments import take
from jgc.loops.outer import Arrays, Parts
from jgc.types import Array, PyTree

Made = MutableMapping[int, Any]  # arrays that `init` made, by `id`; values are weak references


def note(made: Made, arrays: Arrays) -> None:
    """Record the parameters of the state that `init` returns."""
    made.update({id(x): x for x in jax.tree.leaves((arrays.params, arrays.own))})


def check_replaced(returned: Made, arrays: Arrays) -> None:
    """Raise ValueError if `params` were replaced next to an `own` that the last step returned."""
    if any(returned.get(id(x)) is not x for x in first_leaf(arrays.own)):
        return
    if any(returned.get(id(x)) is not x for x in jax.tree.leaves(arrays.params)):
        raise ValueError(
            "`params` of this state were replaced, and `own`, each node's parameters, were not, "
            "so the next exchange would count the difference as progress. To go on from other "
            "parameters, replace `own`, too, by a copy for each node, or call init(key, params)"
        )


def note_returned(returned: Made, arrays: Arrays) -> None:
    """Record the parameters that a step returns, and the first array of the nodes' parameters."""
    new = [x for x in jax.tree.leaves(arrays.params) if returned.get(id(x)) is not x]
    returned.update({id(x): x for x in (*new, *first_leaf(arrays.own))})


def check_own(
    made: Made, before: Arrays, arrays: Arrays, parts: Parts, step: int, first: bool
) -> None:
    """Raise ValueError where `params` and each node's parameters, `own`, cannot belong to one run.

    States of one run always pass. Their nodes' parameters may differ from the shared ones in the
    middle of a round, after a refused exchange, and with `merge`. So the check finds only an `own`
    that never took a step, next to different shared parameters. `own` never took a step if `init`
    returned its arrays; or, in the first call of a step function, if the step is 0, or if an
    exchange has just been applied and the inner state is the first one. The check misses parts of
    two trained states, of which `check_replaced` finds those next to an `own` that the same step
    function returned. It also misses a copy of `own` in the middle of a round, and one for an inner
    optimiser without state.
    """
    never = all(made.get(id(x)) is x for x in first_leaf(before.own)) or (first and step == 0)
    applied = parts.due(step).apply if first and not parts.merge else None
    if not never and applied is None:
        return
    if all(made.get(id(x)) is x for x in jax.tree.leaves(before.params)):
        return  # the state of `init`, in nearly every first call
    leaves: Sequence[int] = range(len(jax.tree.leaves(arrays.params)))
    if not never:
        leaves = parts.leaves(arrays.params)[applied or 0]
    jax.block_until_ready(arrays)  # on CPU, concurrent collectives can wait forever
    apart = _apart(take(arrays.params, leaves), take(arrays.own, leaves))
    if apart and (never or _is_first(parts, arrays)):
        raise ValueError(
            "the parameters of this state belong to two runs: `own` never took a step, and "
            "`params` differ from it, so the next exchange would count the difference as "
            "progress. To start from other parameters, call init(key, params). To resume, give "
            "the whole state; for a different number of nodes give jgc.with_nodes(state, init(key, "
            "state.params)) (docs/your_loop.md, Checkpoints)"
        )


@jax.jit
def _apart(params: PyTree, own: PyTree) -> Array:
    """Whether all nodes have the same parameters, which differ from the shared; False for NaN."""
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(own), strict=True))
    return _all([x == x[:1] for _, x in pairs]) & ~_all([x[0] == shared for shared, x in pairs])


def _is_first(parts: Parts, arrays: Arrays) -> bool:
    """Whether all nodes have the first state of the inner optimiser; False without arrays."""
    start = jax.tree.leaves(parts.inner.init(jax.tree.map(lambda x: x[0], arrays.own)))
    pairs = zip(start, jax.tree.leaves(arrays.inner), strict=True)
    equal = [x == value for value, x in pairs if not is_key(x)]  # each node has its key
    return bool(equal) and bool(_all(equal))


def _all(equal: list[Array]) -> Array:
    return jnp.all(jnp.stack([jnp.all(x) for x in equal]))
