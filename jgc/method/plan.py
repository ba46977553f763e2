"""The plan of a step: which leaves form a group, and which method each group has. Static.

A combination (`per_layer`, `stacked`) splits leaves among its members. Before that, leaves that are
sharded alike within a node are split off. `jgc.method.aggregate` runs the groups of a plan.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc.layout.pack import Packing, leaf_paths, make_packing
from jgc.method.signature import Signature, signature_of
from jgc.method.step import Method
from jgc.nodes.placement import ByShards, sharding_spec
from jgc.types import NextPhase, Phase, PyTree, State


class Part(NamedTuple):
    """A leaf of the parameters, or one layer of a stacked leaf."""

    leaf: int  # the leaf's number in tree order
    at: tuple[int, ...]  # the layer's index in the leaf's leading axes; () for the whole leaf
    array: jax.ShapeDtypeStruct


Parts = dict[str, Part]  # by path


class Combination(NamedTuple):
    """Several methods for the leaves of one tree, or one method for other leaves than the tree's.

    `schedule`, `owns_momentum` and `next_phase` are as in `jgc.Compressor`.
    """

    members: "tuple[Design, ...]"  # methods and combinations
    split: Callable[[Parts], list[Parts]]  # the parts of each member
    check: Callable[[dict[str, Any]], None] | None  # of parameters by path, as in `from_step`
    nested: bool  # phases and states are tuples of the members'; if not, the only member's
    schedule: tuple[Phase, ...]
    owns_momentum: bool
    next_phase: NextPhase | None
    clip_norm: float  # of the whole gradient, as in `from_step`


Design = Method | Combination


class Group(NamedTuple):
    """Leaves with one method and one state."""

    method: Method
    path: tuple[int, ...]  # of their state and phase in a combination's; folded into the key
    shard: int  # number of the shards' group, 0 if no parameter is sharded
    parts: Parts  # the leaves, by path
    packing: Packing
    signature: Signature  # of the parameters that their state was made for


class Plan(NamedTuple):
    """How a compressor treats a tree of one device's gradients."""

    design: Design
    groups: tuple[Group, ...]  # by shards first
    axes: tuple[tuple[str, ...], ...]  # fast axes over which each group is sharded; (()) if none
    group_of: tuple[int, ...]  # the shards' group of each leaf
    by_shards: bool  # whether any leaf is sharded


def make_plan(
    design: Design,
    tree: PyTree,
    axes: tuple[tuple[str, ...], ...] | None = None,
    group_of: Sequence[int] = (),
) -> Plan:
    """The plan for a tree of one device's arrays or shapes; `axes` None if no leaf is sharded."""
    parts = parts_of(tree)
    shards = [parts]
    if axes is not None:
        shards = [{} for _ in axes]
        for name in sorted(parts):
            shards[group_of[parts[name].leaf]][name] = parts[name]
    groups = []
    for shard, inside in enumerate(shards):
        for method, path, members in walk(design, inside):
            arrays = OrderedDict((name, part.array) for name, part in members.items())
            packing, signature = make_packing(arrays), signature_of(arrays)
            groups.append(Group(method, path, shard, members, packing, signature))
    return Plan(design, tuple(groups), axes or ((),), tuple(group_of), axes is not None)


def parts_of(tree: PyTree, divided: bool = False) -> Parts:
    """The leaves of a tree by path, in tree order; with `divided`, arrays have their shardings."""
    parts = {}
    for i, (path, x) in enumerate(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)):
        sharding = x.sharding if divided and tuple(sharding_spec(x)) else None
        parts[path] = Part(i, (), jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
    return parts


def walk(
    design: Design, parts: Parts, path: tuple[int, ...] = ()
) -> Iterator[tuple[Method, tuple[int, ...], Parts]]:
    """The methods of a design, each with its path and its parts."""
    if isinstance(design, Method):
        yield design, path, parts
        return
    for i, (member, inside) in enumerate(zip(design.members, design.split(parts), strict=True)):
        yield from walk(member, inside, (*path, i) if design.nested else path)


def phases_of(design: Design, phase: Any) -> list[Hashable]:
    """The phase of every method of a design, in the order of `walk`.

    Raises:
      ValueError: not a tuple with an entry for each group.
    """
    if isinstance(design, Method):
        return [phase]
    if not design.nested:
        return phases_of(design.members[0], phase)
    if not (isinstance(phase, tuple) and len(phase) == len(design.members)):
        raise ValueError(
            f"phase must be a tuple of {len(design.members)}, the phases of all groups, got "
            f"{phase!r}")
    pairs = zip(design.members, phase, strict=True)
    return [x for member, part in pairs for x in phases_of(member, part)]


def check_phase(design: Design, phase: Any) -> None:
    """Raise TypeError for a `Phase` instead of its value, ValueError for an unknown phase."""
    if isinstance(phase, Phase):
        raise TypeError(
            f"phase must be the value of a phase, got a Phase: give phase.value, {phase.value!r}")
    if design.next_phase is None:
        _check_value(design, phase)
        return
    for (method, *_), part in zip(walk(design, {}), phases_of(design, phase), strict=True):
        _check_value(method, part)


def _check_value(design: Design, phase: Any) -> None:
    values = [known.value for known in design.schedule]
    kinds = {type(value) for value in values if not isinstance(value, str)}
    found = design.next_phase is not None and type(phase) in kinds  # names are all in the schedule
    if phase not in values and not found:
        raise ValueError(f"phase must be one of {', '.join(map(repr, values))}, got {phase!r}")


def check_fits(design: Design, parts: Parts) -> None:
    """Raise ValueError if a method or a combination does not fit parameters."""
    if design.check is not None:
        design.check({path: part.array for path, part in parts.items()})
    if isinstance(design, Combination):
        for member, inside in zip(design.members, design.split(parts), strict=True):
            if inside:
                check_fits(member, inside)


def unchecked(design: Design) -> Design:
    """The design without checks: a fragment of the parameters may lack what its rules name."""
    if isinstance(design, Method):
        return design._replace(check=None)
    return design._replace(check=None, members=tuple(unchecked(x) for x in design.members))


def any_residual(design: Design) -> bool:
    """Whether a node has a residual. Makes states of one value."""
    memories = (method.memory for method, *_ in walk(design, {}))
    return any(memory.residual(memory.init(1)) is not None for memory in memories)


def layers_of_leaf(parts: dict[tuple[int, ...], Any], shape: tuple[int, ...]) -> Any:
    """A stacked leaf of its layers."""
    return jnp.stack([parts[index] for index in sorted(parts)]).reshape(shape)


# --- the states of groups in a compressor's state -------------------------------------------------


def part_of(state: State, path: tuple[int, ...]) -> State:
    """The state of a group in a combination's."""
    for i in path:
        state = State(state.shared[i], state.local[i])
    return state


def assembled(design: Design, states: Iterator[State]) -> State:
    """The state of a design, from the states of its methods in the order of `walk`."""
    if isinstance(design, Method):
        return next(states)
    members = [assembled(member, states) for member in design.members]
    if not design.nested:
        return members[0]
    shared, local = zip(*members, strict=True)
    return State(shared, local)


def shard_states(state: State) -> list[State]:
    """The states of the shards' groups; [state] if no leaf is sharded."""
    if not isinstance(getattr(state, "shared", None), ByShards):
        return [state]
    pairs = zip(state.shared.parts, state.local.parts, strict=True)
    return [State(shared, local) for shared, local in pairs]


def joined_shards(
    states: Sequence[State], axes: tuple[tuple[str, ...], ...], group_of: tuple[int, ...]
) -> State:
    """The states of all shards' groups as one."""
    shared, local = zip(*states, strict=True)
    return State(ByShards(shared, axes, group_of), ByShards(local, axes, group_of))
