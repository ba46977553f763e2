"""Different methods for different layers, by parameter path: a combinator, so that no method needs flags for it.

Groups that `compose` built share one exchange: where several of them go through the same kind of exchange in a
phase, their payloads travel in one collective.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.compress.dense import identity
from jgc.layout.pack import leaf_paths, make_packing, pack
from jgc.memory import momentum_only, no_memory
from jgc.method import phases
from jgc.method.compose import compose, finish, prepare
from jgc.method.diagnose import cosine
from jgc.method.exchange import all_reduce
from jgc.method.guard import aggregate_unless, guard
from jgc.types import Array, Compressor, Info, Message, Nodes, PyTree, State, Wire

Groups = tuple[dict[str, Array], ...]
Rule = str | Callable[[str, Any], bool]  # a pattern of paths, or a function of a leaf's path and the leaf


def per_layer(rules: Sequence[tuple[Rule, Compressor]], default: Compressor) -> Compressor:
    """Each leaf goes to the first rule whose pattern is found in its path (`re.search`), else to `default`.

    Paths are the tree's keys joined by "/", e.g. "params/Conv_0/kernel". The phase is the tuple of the groups'
    phases; the default's is the last.

    Args:
      rules: pairs of a regular expression and a compressor. In its place a function `(path, leaf) -> bool` may stand,
        for rules about shapes; it may match no leaf.
      default: for all other leaves.

    Raises:
      ValueError: some groups own their momentum and others do not; a pattern is no regular expression; or, at `init`,
        one matches no leaf.

    Example:
      >>> from jgc.compress import dense, topk
      >>> compressor = per_layer([("^Conv_0/", dense())], default=topk(alpha=0.01))
    """
    matches = tuple(rule if callable(rule) else _finder(rule) for rule, _ in rules)
    cores = tuple(c.core or c for c in (*(c for _, c in rules), default))
    if len({core.owns_momentum for core in cores}) > 1:
        raise ValueError("some groups of layers own their momentum and others leave it to the optimiser; use one way")
    schedules = [core.schedule for core in cores]

    def split(tree: PyTree) -> Groups:
        return _split(tree, matches)

    def each(fn: Callable, phase: Sequence[Hashable], *trees: Groups):
        return [fn(i, core, phase[i], *(tree[i] for tree in trees)) for i, core in enumerate(cores)]

    def init(key, params, nodes):
        groups = split(params)
        for (rule, _), group in zip(rules, groups, strict=False):
            if not group and not callable(rule):
                paths = ", ".join(leaf_paths(params))
                raise ValueError(f"the pattern {rule!r} matches no parameter; there are {paths}")
        states = [core.init(jax.random.fold_in(key, i), groups[i], nodes) for i, core in enumerate(cores)]
        return _join_states(states)

    def aggregate(phase, key, grads, state, nodes, skip=False):
        results = _aggregate_groups(cores, phase, key, split(grads), _split_state(state), nodes, skip)
        merged = _merge(grads, [result[0] for result in results])
        return merged, _join_states([result[1] for result in results]), _join_infos([result[2] for result in results])

    def transition(old, new, state, nodes):
        states = _split_state(state)
        for i, core in enumerate(cores):
            if old[i] != new[i]:
                states[i] = core.transition(old[i], new[i], states[i], nodes)
        return _join_states(states)

    def wire(phase, shapes, nodes):
        wires = each(lambda i, c, p, group: c.wire(p, group, nodes), phase, split(shapes))
        once = tuple(message for w in wires for message in w.once)
        return Wire(_join_messages([w.logical for w in wires]), (), once)

    def diagnose(phase, key, grads, state, nodes):
        last = len(cores) - 1
        groups, states = split(grads), _split_state(state)
        own = cores[last].diagnose
        out = {} if own is None else own(phase[last], jax.random.fold_in(key, last), groups[last], states[last], nodes)
        packing = make_packing(grads)
        aggregated = pack(aggregate(phase, key, grads, state, nodes)[0], packing)
        return {**out, "true_cosine": cosine(aggregated, comm.pmean(pack(grads, packing), nodes, "diagnose"))}

    def next_phase(before, step, state, nodes):
        states = _split_state(state)
        parts = [phases.phase_after(c, before.parts[i], step, states[i], nodes) for i, c in enumerate(cores)]
        if tuple(part.value for part in parts) == before.value:
            return before
        return phases.combined(parts, step, phases.leader_of(schedules))

    def residual(local, shapes):
        groups = [(core.residual, own, group) for core, own, group in zip(cores, local, split(shapes), strict=True)]
        return {path: x for kept, own, group in groups if kept for path, x in kept(own, group).items()}

    core = Compressor(
        init, aggregate, transition, wire, phases.together(schedules), diagnose, owns_momentum=cores[0].owns_momentum,
        next_phase=next_phase if any(core.next_phase for core in cores) else None, residual=residual, skips=True,
    )  # fmt: skip
    return guard(core)


def with_policy(
    rest: Compressor, first_layer: str | None, last_layer: str | None = None, last: Compressor | None = None,
    momentum: float | None = None,
) -> Compressor:
    """The LGC paper's policy: the first layer dense, the last layer by a method of its own, `rest` for all others.

    Args:
      rest: for all other layers.
      first_layer: a pattern, or None or "" for no special treatment.
      last_layer: the same for the layers that go to `last`.
      last: the method of the last layer.
      momentum: of the momentum that the memories own; None where the optimiser owns it.

    Source: LGC paper, Section VI-A.
    """
    memory = no_memory() if momentum is None else momentum_only(momentum)
    rules: list[tuple[Rule, Compressor]] = []
    if first_layer:
        rules.append((first_layer, compose(identity(), memory, all_reduce())))
    if last_layer and last is not None:
        rules.append((last_layer, last))
    return per_layer(rules, default=rest) if rules else rest


def _aggregate_groups(
    cores, phase, key, groups: Groups, states, nodes: Nodes, skip: Array | bool
) -> list[tuple[PyTree, State, Info]]:
    """All groups' results; composed groups with the same kind of exchange share one collective."""
    results: list = [None] * len(cores)
    sharing: dict[str, list] = {}
    for i, core in enumerate(cores):
        group_key = jax.random.fold_in(key, i)
        if core.parts is None:
            results[i] = aggregate_unless(skip, core, phase[i], group_key, groups[i], states[i], nodes)
        else:
            exchange = core.parts.by_phase[phase[i]][1]
            pending = prepare(core.parts, phase[i], group_key, groups[i], states[i], nodes, skip)
            sharing.setdefault(exchange.name, []).append((i, exchange, pending))
    for together in sharing.values():
        means = together[0][1].run([pending.item for _, _, pending in together], nodes)
        for (i, _, pending), mean in zip(together, means, strict=True):
            results[i] = finish(cores[i].parts, pending, mean, states[i])
    return results


def _finder(pattern: str) -> Callable[[str, Any], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    return lambda path, leaf: compiled.search(path) is not None


def _split(tree: PyTree, matches: Sequence[Callable[[str, Any], bool]]) -> Groups:
    """The leaves of each group by path; the last group is the default."""
    groups: tuple[dict, ...] = tuple({} for _ in range(len(matches) + 1))
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        matching = (i for i, match in enumerate(matches) if match(path, leaf))
        groups[next(matching, len(matches))][path] = leaf
    return groups


def _merge(like: PyTree, groups: Sequence[dict[str, Array]]) -> PyTree:
    by_path = {path: leaf for group in groups for path, leaf in group.items()}
    return jax.tree.unflatten(jax.tree.structure(like), [by_path[path] for path in leaf_paths(like)])


def _split_state(state: State) -> list[State]:
    return [State(shared, local) for shared, local in zip(state.shared, state.local, strict=True)]


def _join_states(states: Sequence[State]) -> State:
    return State(tuple(s.shared for s in states), tuple(s.local for s in states))


def _join_infos(infos: Sequence[Info]) -> Info:
    return Info(
        residual_norm=jnp.linalg.norm(jnp.stack([info.residual_norm for info in infos])),
        elements_sent=jnp.sum(jnp.stack([info.elements_sent for info in infos])),
        overflow=jnp.sum(jnp.stack([info.overflow for info in infos])),
        finite=jnp.all(jnp.stack([info.finite for info in infos])),
    )


def _join_messages(groups: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
    """All groups' messages, added up by role, direction and kind. A leader is a worker of the groups without one."""
    has_leader = any(m.role == "leader" for messages in groups for m in messages)
    totals: dict[tuple[str, str, str], float] = {}
    for messages in groups:
        led = any(m.role == "leader" for m in messages)
        roles = list(messages) + [m._replace(role="leader") for m in messages if has_leader and not led]
        for m in roles:
            totals[m[:3]] = totals.get(m[:3], 0) + m.bytes
    return tuple(Message(*key, size) for key, size in totals.items())
