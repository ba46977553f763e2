"""The conservation law of error feedback, written over the vectors in which groups of leaves travel."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from contract import COMMON, PARAMS, ROUNDS_STATE, Case, K, Step, compressor_of, on_host, rules_of, settings_of

from jgc.compress import Gradiveq, ScaleCom
from jgc.compress.low_rank.slices import is_convolution
from jgc.layout.pack import leaf_paths, make_packing, pack
from jgc.method.ages import Aged
from jgc.method.memory import Corrected
from jgc.types import PyTree, State

EXACT = 2.0**-20  # finer than the last bit of any sum of these gradients, coarser than a rounding of their size


class Balance(NamedTuple):
    """One group of leaves in one step: what had to go somewhere, where it went, and how exactly that is known."""

    had: np.ndarray  # f64[n], mean over nodes of what was kept before and what came in, so far as it is remembered
    aggregated: np.ndarray  # f64[n], that share of it
    kept: np.ndarray  # f64[n], mean over nodes
    tolerance: np.ndarray  # f64[n]


def balances(case: Case, step: Step) -> list[Balance]:
    """The balance of every group of leaves in a step."""
    compressor = compressor_of(case.variant)
    residual_eps = float(jnp.finfo(ROUNDS_STATE.get(case.variant, jnp.float32)).eps)
    out = []
    for at_once, g, before, after, aggregated, eps in zip(
        _at_once(case),
        zip(*(flat(case, jax.tree.map(lambda x, i=i: x[i], step.grads)) for i in range(K)), strict=True),
        _by_group(case, step.before),
        _by_group(case, on_host(step.after)),
        flat(case, step.aggregated),
        flat(case, _rounding_units()),
        strict=True,
    ):
        owns_momentum = compressor.owns_momentum and not at_once
        velocity, before_kept = _velocity_and_kept(before, owns_momentum)
        _, after_kept = _velocity_and_kept(after, owns_momentum)
        share = remembered(case)
        had = (before_kept + share * came_in(velocity, np.stack(g), at_once)).mean(0)
        tolerance = EXACT + eps * np.abs(aggregated) + residual_eps * np.abs(after_kept).max(initial=0)
        out.append(Balance(had, share * aggregated, np.mean(after_kept, 0), tolerance))
    return out


def came_in(velocity: np.ndarray, g: np.ndarray, at_once: bool) -> np.ndarray:
    """What a node's memory takes in with a gradient g, [K, n]: the gradient, or the momentum it stands for."""
    momentum = COMMON["momentum"]
    return g / (1 - momentum) if at_once else momentum * velocity + g


def _at_once(case: Case) -> list[bool]:
    """Of each group of leaves, whether a gradient's whole momentum series comes in at once; not of dense groups."""
    at_once = getattr(settings_of(case.variant), "momentum_at_once", False)
    return [False] * len(_rules(case)) + [at_once]


def remembered(case: Case) -> float:
    """The share of (what came in - what was sent) that a memory takes in: 1, or beta where it is a low-pass filter.

    kept after = (1 - beta) kept before + beta (kept before + came in - sent), so that the law holds times beta.
    """
    settings = settings_of(case.variant)
    return settings.beta if isinstance(settings, ScaleCom) else 1.0


def _by_group(case: Case, state: State) -> list:
    """The memory of each group of leaves: `per_layer` keeps a tuple of local states."""
    groups = state.local if _rules(case) else [state.local]
    return [group.memory for group in groups]


def _velocity_and_kept(local: PyTree, owns_momentum: bool) -> tuple[np.ndarray, np.ndarray]:
    """A memory's velocity and residual, [K, n] or zeros where it has none.

    A single vector is a velocity where the memory owns the momentum.
    """
    none = np.zeros((1, 1))
    if isinstance(local, Aged):
        return _velocity_and_kept(local.memory, owns_momentum)
    if isinstance(local, Corrected):
        return np.asarray(local.velocity, float), np.asarray(local.residual, float)
    if isinstance(local, np.ndarray):
        return (np.asarray(local, float), none) if owns_momentum else (none, np.asarray(local, float))
    if isinstance(local, tuple) and local:  # one residual for each layer
        assert not owns_momentum
        return none, np.concatenate([np.asarray(x, float).reshape(len(x), -1) for x in local], axis=1)
    assert local == (), f"say here what of a {type(local).__name__} is velocity and what is kept"
    return none, none


def flat(case: Case, tree: PyTree) -> list[np.ndarray]:
    """A tree as the vectors f64[n] in which the variant's groups of leaves travel."""
    rules = _rules(case)
    groups: list[dict] = [{} for _ in range(len(rules) + 1)]
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        groups[next((i for i, rule in enumerate(rules) if rule(path, leaf)), len(rules))][path] = leaf
    return [np.asarray(pack(group, make_packing(group)), float) for group in groups]


def _rules(case: Case) -> list[Callable[[str, Any], bool]]:
    """What sets the groups apart, in their order; the last group has all other leaves."""
    settings = settings_of(case.variant)
    if isinstance(settings, Gradiveq):
        return [lambda path, leaf: not is_convolution(leaf, settings.max_slice)]
    return [lambda path, leaf, p=p: re.search(p, path) is not None for p, _ in rules_of(case.variant)]


def _rounding_units() -> PyTree:
    """The rounding unit of every entry of the aggregate, as the gradients' dtype has it."""

    def unit(x):
        return np.full(x.shape, jnp.finfo(x.dtype).eps if jnp.issubdtype(x.dtype, jnp.inexact) else 0, x.dtype)

    return jax.tree.map(unit, PARAMS)
