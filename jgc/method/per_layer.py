"""Different methods for different layers, by parameter path.

Groups that `compose` built share collectives: if several use the same exchange in a phase, one
collective carries their payloads.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax

from jgc.checks.misuse import check_compressor
from jgc.method import phases
from jgc.method.compressor import compressor_of
from jgc.method.plan import Combination, Parts, part_of, shard_states
from jgc.nodes.placement import sharding_spec
from jgc.types import Compressor

Matcher = Callable[[str, Any], bool]
Rule = str | Matcher  # a pattern of paths, or a function of a leaf's path and the leaf


def per_layer(rules: Sequence[tuple[Rule, Compressor]], default: Compressor) -> Compressor:
    """Each leaf goes to the first rule that matches, else to `default`.

    Paths are the tree's keys joined by "/", e.g. "params/Conv_0/kernel". The phase is the tuple of
    the groups' phases; the default's is the last.

    Args:
      rules: pairs of a rule and a compressor. A rule is a regular expression (`re.search`), which
        must match a leaf, or a function `(path, leaf) -> bool`, which need not.
      default: compressor of all other leaves.

    Raises:
      TypeError: rules that are not pairs, or a rule that is neither a pattern nor a function;
        no compressor, such as settings.
      ValueError: some groups own their momentum and others do not; two groups clip to different
        norms; a pattern is not a regular expression; or, at `init`, a pattern matches no leaf, or
        an earlier rule takes all that it matches.

    Example:
      >>> from jgc.compress import dense, topk
      >>> compressor = per_layer([("^Conv_0/", dense())], default=topk(alpha=0.01))
    """
    is_iterable = isinstance(rules, Iterable) and not isinstance(rules, dict | str)  # or a zip
    pairs: tuple[Any, ...] = tuple(rules) if is_iterable else (None,)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            "rules must be pairs, e.g. [('^head/', jgc.compress.dense())], got a "
            f"{type(rules).__name__}")
    rules = pairs
    for compressor in (*(c for _, c in rules), default):
        check_compressor(compressor)
    members = tuple(c.method for c in (*(c for _, c in rules), default))
    if len({member.owns_momentum for member in members}) > 1:
        names: dict[bool, list[str]] = {True: [], False: []}
        for i, member in enumerate(members):
            names[member.owns_momentum].append(repr(rules[i][0]) if i < len(rules) else "default")
        raise ValueError(
            f"the layers of {', '.join(names[True])} own their momentum, and those of "
            f"{', '.join(names[False])} leave it to the optimiser: set momentum_correction alike")
    norms = {member.clip_norm for member in members if member.clip_norm}
    if len(norms) > 1:
        raise ValueError(f"groups of layers must clip to one norm, got {sorted(norms)}")
    patterns, matchers = tuple(rule for rule, _ in rules), tuple(matcher(rule) for rule, _ in rules)
    schedules = [member.schedule for member in members]
    schedule = phases.together(schedules)
    known = {phases.phase_names(phase): phase.name for phase in schedule}

    def next_phase(before, step, state, nodes):
        whole = shard_states(state)[0]  # a method that reads its state refuses shards
        parts = [
            phases.phase_after(member, before.parts[i], step, part_of(whole, (i,)), nodes)
            for i, member in enumerate(members)
        ]
        if tuple(part.value for part in parts) == before.value:
            return before
        # phases in turn keep their first step, so that each pair of them is one phase
        start = max(part.start for part in parts)
        common = phases.combined(parts, start, phases.leader_of(schedules))
        names = phases.phase_names(common)  # a pair that is not in the schedule has all of them
        return common._replace(name=known.get(names, ", ".join(dict.fromkeys(names))))

    return compressor_of(
        Combination(
            members,
            split=partial(split_by_rules, matchers),
            check=partial(check_rules, patterns, matchers),
            nested=True,
            schedule=schedule,
            owns_momentum=members[0].owns_momentum,
            next_phase=next_phase if any(member.next_phase for member in members) else None,
            # of the whole gradient, clipped before it is split into groups
            clip_norm=max(norms, default=0.0),
        )
    )


def split_by_rules(matchers: Sequence[Matcher], parts: Parts) -> list[Parts]:
    """The parts of each group, by path in alphabetical order; the default's are the last."""
    groups: list[Parts] = [{} for _ in range(len(matchers) + 1)]
    for path, part in sorted(parts.items()):
        matching = (i for i, matches in enumerate(matchers) if matches(path, part.array))
        groups[next(matching, len(matchers))][path] = part
    return groups


def check_rules(rules: Sequence[Rule], matchers: Sequence[Matcher], params: dict[str, Any]) -> None:
    """Raise ValueError if a pattern matches no leaf, or a function not all shards of one."""
    taken: set[str] = set()
    for rule, matches in zip(rules, matchers, strict=True):
        matching = [path for path, leaf in params.items() if matches(path, leaf)]
        if callable(rule):
            check_on_shards(matches, params)
        elif not matching:
            raise ValueError(
                f"the pattern {rule!r} matches no parameter; there are {', '.join(params)}")
        elif taken.issuperset(matching):
            raise ValueError(
                f"an earlier rule takes all that the pattern {rule!r} matches, {matching[0]} first")
        taken.update(matching)


def matcher(rule: Rule) -> Matcher:
    """A rule as a function `(path, leaf) -> bool`.

    Raises:
      TypeError: neither a pattern nor a function.
      ValueError: the pattern is not a regular expression.
    """
    if callable(rule):
        return rule
    if not isinstance(rule, str | re.Pattern):
        raise TypeError(
            f"a rule must be a pattern or a function (path, leaf) -> bool, got {rule!r}")
    try:
        compiled = re.compile(rule)
    except re.error as error:
        raise ValueError(f"the pattern {rule!r} is not a regular expression: {error}") from None
    return lambda path, leaf: compiled.search(path) is not None


def check_on_shards(matches: Matcher, params: dict[str, Any]) -> None:
    """Raise ValueError if a function differs between a leaf and its shards, which devices see."""
    for path, leaf in params.items():
        if not tuple(sharding_spec(leaf)):
            continue
        shard = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        if bool(matches(path, leaf)) != bool(matches(path, shard)):
            raise ValueError(
                f"a rule says {bool(matches(path, leaf))} of {path} {list(leaf.shape)}, and of "
                f"the shards that devices have of it, {list(shard.shape)}, the opposite: give a "
                "rule about its path")
