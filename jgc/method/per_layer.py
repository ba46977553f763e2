"""Different methods for different layers, by parameter path. A combinator: no method needs settings for it.

Groups that `compose` built share collectives: if several of them use the same exchange in a phase, one collective
carries their payloads.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.checks.misuse import check_compressor
from jgc.layout.pack import leaf_paths, make_packing, pack
from jgc.method import phases
from jgc.method.compensate import Begun
from jgc.method.compose import Exchange, Item, as_step, encoded
from jgc.method.diagnose import cosine
from jgc.method.guard import Core, guarded
from jgc.method.messages import added
from jgc.method.shards import Group, join
from jgc.nodes.placement import sharding_spec
from jgc.types import Array, Compressor, Info, Key, Message, Nodes, Phase, PyTree, State

Rule = str | Callable[[str, Any], bool]  # a pattern of paths, or a function of a leaf's path and the leaf
Result = tuple[PyTree, State, Info]


def per_layer(rules: Sequence[tuple[Rule, Compressor]], default: Compressor) -> Compressor:
    """Each leaf goes to the first rule whose pattern is found in its path (`re.search`), else to `default`.

    Paths are the tree's keys joined by "/", e.g. "params/Conv_0/kernel". The phase is the tuple of the groups'
    phases; the default's is the last.

    Args:
      rules: pairs of a rule and a compressor. A rule is a regular expression, or a function `(path, leaf) -> bool` for
        rules about shapes. An expression must match a leaf; a function need not.
      default: compressor of all other leaves.

    Raises:
      TypeError: rules that are not pairs, or a rule that is neither a pattern nor a function; something else in place
        of a compressor, such as settings.
      ValueError: some groups own their momentum and others do not; two groups clip to different norms; a pattern is not
        a regular expression; or, at `init`, a pattern matches no leaf, or an earlier rule takes all that it matches.

    Example:
      >>> from jgc.compress import dense, topk
      >>> compressor = per_layer([("^Conv_0/", dense())], default=topk(alpha=0.01))
    """
    pairs = tuple(rules) if isinstance(rules, Iterable) and not isinstance(rules, dict | str) else None  # or a zip
    if pairs is None or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"rules must be pairs, e.g. [('^head/', jgc.compress.dense())], got a {type(rules).__name__}")
    rules = pairs
    for compressor in (*(c for _, c in rules), default):
        check_compressor(compressor)
    cores = tuple(c.core for c in (*(c for _, c in rules), default))
    if len({core.owns_momentum for core in cores}) > 1:
        names = [repr(rule) for rule, _ in rules] + ["default"]
        own, not_own = (
            ", ".join(name for name, core in zip(names, cores, strict=True) if core.owns_momentum == owns)
            for owns in (True, False)
        )
        raise ValueError(
            f"the layers of {own} own their momentum, and those of {not_own} leave it to the optimiser: set "
            "momentum_correction alike"
        )
    norms = {core.clip_norm for core in cores if core.clip_norm}
    if len(norms) > 1:
        raise ValueError(f"groups of layers must clip to one norm, got {sorted(norms)}")
    groups = _Groups(tuple(rule for rule, _ in rules), tuple(matcher(rule) for rule, _ in rules), cores)
    return guarded(
        Core(
            init=groups.first_state,
            aggregate=groups.aggregate,
            transition=groups.transition,
            messages=groups.messages,
            schedule=phases.together([core.schedule for core in cores]),
            owns_momentum=cores[0].owns_momentum,
            next_phase=groups.next_phase if any(core.next_phase for core in cores) else None,
            diagnose=groups.diagnose,
            residual=groups.residual,
            clip_norm=max(norms, default=0.0),  # of the whole gradient, clipped before it is split into groups
            check=groups.check,
            has_residual=lambda: any(core.has_residual() for core in cores),
        )
    )


def matcher(rule: Rule) -> Callable[[str, Any], bool]:
    """A rule as a function `(path, leaf) -> bool`.

    Raises:
      TypeError: neither a pattern nor a function.
      ValueError: the pattern is not a regular expression.
    """
    if callable(rule):
        return rule
    if not isinstance(rule, str | re.Pattern):
        raise TypeError(f"a rule must be a pattern or a function (path, leaf) -> bool, got {rule!r}")
    try:
        compiled = re.compile(rule)
    except re.error as error:
        raise ValueError(f"the pattern {rule!r} is not a regular expression: {error}") from None
    return lambda path, leaf: compiled.search(path) is not None


def check_on_shards(matches: Callable[[str, Any], bool], params: PyTree) -> None:
    """Raise ValueError if a function says another thing of a leaf than of its shards, which are what a device sees."""
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        if not tuple(sharding_spec(leaf)):
            continue
        shard = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        if bool(matches(path, leaf)) != bool(matches(path, shard)):
            raise ValueError(
                f"a rule says {bool(matches(path, leaf))} of {path} {list(leaf.shape)}, and of the shards that devices "
                f"have of it, {list(shard.shape)}, the opposite: give a rule about its path"
            )


class _Groups(NamedTuple):
    rules: tuple[Rule, ...]
    matchers: tuple[Callable[[str, Any], bool], ...]
    cores: tuple[Core, ...]  # one for each rule, and the default

    def split(self, tree: PyTree) -> list[Group]:
        """The leaves of each group by path."""
        groups: list[Group] = [{} for _ in self.cores]
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
            matching = (i for i, matches in enumerate(self.matchers) if matches(path, leaf))
            groups[next(matching, len(self.matchers))][path] = leaf
        return groups

    def check(self, params: PyTree) -> None:
        """Raise ValueError if a pattern matches no leaf, a function not all shards of one, or a member does not fit."""
        for rule, matches in zip(self.rules, self.matchers, strict=True):
            if callable(rule):
                check_on_shards(matches, params)
        split = self.split(params)
        leaves = list(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
        for rule, matches, group in zip(self.rules, self.matchers, split, strict=False):
            if not group and not callable(rule):
                earlier = [path for path, leaf in leaves if matches(path, leaf)]
                if earlier:
                    raise ValueError(f"an earlier rule takes all that the pattern {rule!r} matches, {earlier[0]} first")
                paths = ", ".join(path for path, _ in leaves)
                raise ValueError(f"the pattern {rule!r} matches no parameter; there are {paths}")
        for core, group in zip(self.cores, split, strict=True):
            if core.check is not None and group:
                core.check(group)

    def first_state(self, key: Key, params: PyTree, nodes: Nodes) -> State:
        split = self.split(params)
        states = [core.init(jax.random.fold_in(key, i), split[i], nodes) for i, core in enumerate(self.cores)]
        return _join_states(states)

    def aggregate(
        self, phase: Sequence[Hashable], key: Key, grads: PyTree, state: State, nodes: Nodes, skip: Array | bool
    ) -> Result:
        if not (isinstance(phase, tuple) and len(phase) == len(self.cores)):
            raise ValueError(f"phase must be a tuple of {len(self.cores)}, the phases of all groups, got {phase!r}")
        split, states = self.split(grads), _split_state(state)
        results: dict[int, Result] = {}
        sharing: dict[str, list[tuple[int, Exchange, Begun, Item]]] = {}
        exchanges = [core.stages[phase[i]][1].name if core.stages and _is_f32(split[i]) else None
                     for i, core in enumerate(self.cores)]  # fmt: skip
        keys = [jax.random.fold_in(key, i) for i in range(len(self.cores))]
        for i, core in enumerate(self.cores):
            if exchanges[i] is None or exchanges.count(exchanges[i]) == 1:  # no other group's collective to share
                results[i] = core.aggregate(phase[i], keys[i], split[i], states[i], nodes, skip)
            else:
                assert core.stages is not None
                codec, exchange = core.stages[phase[i]]
                begun = core.begin(phase[i], split[i], states[i], skip)
                item = encoded(codec, keys[i], begun.filled, begun.packing.layers, nodes)
                sharing.setdefault(exchange.name, []).append((i, exchange, begun, item))
        for together in sharing.values():
            means = together[0][1].run([item for *_, item in together], nodes)
            for (i, _, begun, item), mean in zip(together, means, strict=True):
                step = as_step(item, mean)
                results[i] = self.cores[i].finish(phase[i], keys[i], begun, step, states[i], nodes, skip)
        trees, after, infos = zip(*(results[i] for i in range(len(results))), strict=True)
        norms, elements, overflow, finite = (jnp.stack(x) for x in zip(*infos, strict=True))
        info = Info(jnp.linalg.norm(norms), jnp.sum(elements), jnp.sum(overflow, dtype=jnp.int32), jnp.all(finite))
        return join(trees, grads), _join_states(after), info

    def transition(self, old: Any, new: Any, state: State, nodes: Nodes) -> State:
        states = _split_state(state)
        for i, core in enumerate(self.cores):
            if old[i] != new[i]:
                states[i] = core.transition(old[i], new[i], states[i], nodes)
        return _join_states(states)

    def next_phase(self, before: Phase, step: int, state: State, nodes: Nodes) -> Phase:
        states, cores = _split_state(state), self.cores
        parts = [phases.phase_after(core, before.parts[i], step, states[i], nodes) for i, core in enumerate(cores)]
        if tuple(part.value for part in parts) == before.value:
            return before
        return phases.combined(parts, step, phases.leader_of([core.schedule for core in cores]))

    def messages(
        self, phase: Sequence[Hashable], shapes: PyTree, nodes: Nodes
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        split = self.split(shapes)
        every = [core.messages(phase[i], split[i], nodes) for i, core in enumerate(self.cores)]
        return added([step for step, _ in every]), tuple(message for _, once in every for message in once)

    def diagnose(
        self, phase: Sequence[Hashable], key: Key, grads: PyTree, state: State, nodes: Nodes
    ) -> dict[str, Array]:
        """The diagnostics of the default group, with `true_cosine` of all leaves."""
        last = len(self.cores) - 1
        own_key, leaves = jax.random.fold_in(key, last), self.split(grads)[last]
        out = self.cores[last].diagnose(phase[last], own_key, leaves, _split_state(state)[last], nodes)
        packing = make_packing(grads)
        aggregated = pack(self.aggregate(phase, key, grads, state, nodes, skip=False)[0], packing)
        return {**out, "true_cosine": cosine(aggregated, comm.pmean(pack(grads, packing), nodes, "diagnose"))}

    def residual(self, local: Sequence[PyTree], shapes: PyTree) -> dict[str, Array]:
        each = zip(self.cores, local, self.split(shapes), strict=True)
        return {path: x for core, own, group in each for path, x in core.residual(own, group).items()}


def _is_f32(group: Group) -> bool:
    """Whether all that is compressed is f32: `dense` sends two-byte leaves as such, not in a vector of f32 values."""
    return all(x.dtype == jnp.float32 for x in jax.tree.leaves(group) if jnp.issubdtype(x.dtype, jnp.inexact))


def _split_state(state: State) -> list[State]:
    return [State(shared, local) for shared, local in zip(state.shared, state.local, strict=True)]


def _join_states(states: Sequence[State]) -> State:
    return State(tuple(s.shared for s in states), tuple(s.local for s in states))
