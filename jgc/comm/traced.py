"""The collectives of a traced program. `jgc.comm.ledger` names their fields, but misses those that are called by
`jax.lax`, and counts those in a loop once and those in a jitted function only when JAX traces it for the first time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import jax

from jgc.comm.ledger import UnknownCollectiveError, bytes_sent
from jgc.types import Nodes, PyTree, Sent

_OPS = {  # of XLA, by JAX's primitive
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
_LOCAL = frozenset({"axis_index", "pvary", "pcast", "shard_map"})  # name mesh axes and send nothing


def all_sent(recorded: Sequence[Sent], jaxpr: Any, nodes: Nodes) -> tuple[Sent, ...]:
    """What the ledger recorded while a program was traced, if that is all it sends, else one entry an operation.

    Args:
      recorded: of `jgc.comm.ledger`.
      jaxpr: of `jax.make_jaxpr`, from the same tracing. Collectives that XLA adds for shardings are not in it.
      nodes: the layout.

    Raises:
      UnknownCollectiveError: a collective without a byte rule, in a `while` loop, or in branches that send different
        bytes.
    """
    found = _totals(_sent_in(jaxpr, nodes.mesh.shape if nodes.mesh is not None else {}))
    if found == _totals(recorded):
        return tuple(recorded)
    return tuple(Sent(op, "all fields", size) for op, size in found.items())


def _totals(sent: Iterable[Sent]) -> dict[str, Fraction]:
    """Bytes by operation."""
    totals: dict[str, Fraction] = {}
    for one in sent:
        totals[one.op] = totals.get(one.op, Fraction(0)) + one.bytes
    return totals


def _sent_in(jaxpr: Any, axes: Mapping[str, int]) -> list[Sent]:
    """The collectives of a traced function, on a mesh of these axes."""
    sent: list[Sent] = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        sent += _by_itself(eqn, axes)
        inside = [_sent_in(inner, axes) for inner in called(eqn.params)]
        if eqn.primitive.name == "while" and any(inside):
            raise UnknownCollectiveError("a collective in a `while` loop, whose number of turns decides what is sent")
        if eqn.primitive.name == "cond":
            if any(_totals(branch) != _totals(inside[0]) for branch in inside):
                raise UnknownCollectiveError("the branches of a conditional send different bytes")
            inside = inside[:1]
        turns = eqn.params.get("length", 1)  # of a scan
        sent += [one._replace(bytes=turns * one.bytes) for part in inside for one in part]
    return sent


def _by_itself(eqn: Any, axes: Mapping[str, int]) -> list[Sent]:
    """What an operation sends, without the functions that it calls."""
    name, over = eqn.primitive.name, [axis for axis in named_axes(eqn.params) if axis in axes]
    if not over or name in _LOCAL:
        return []
    if name not in _OPS:
        raise UnknownCollectiveError(f"no byte rule for `{name}` over the mesh axes {', '.join(over)}")
    groups = eqn.params.get("axis_index_groups")
    size = len(groups[0]) if groups else prod(axes[axis] for axis in over)
    operands = sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.invars)
    return [Sent(_OPS[name], "", bytes_sent(_OPS[name], operands, size))] if size > 1 else []


def named_axes(params: Mapping[str, Any]) -> list[str]:
    """The axes that an operation names; an axis of `vmap` is a number here."""
    found = params.get("axes", params.get("axis_name", ()))
    return [axis for axis in (found if isinstance(found, tuple) else (found,)) if isinstance(axis, str)]


def called(params: Mapping[str, Any]) -> Iterator[Any]:
    """The traced functions that an operation calls."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one


def evaluated(traced: Any, result: PyTree, args: tuple, consts: Sequence[Any] | None = None) -> PyTree:
    """The output of a function from its jaxpr.

    Args:
      traced: of `jax.make_jaxpr`.
      result: a tree with the structure of the output, e.g. its shapes.
      args: the arguments.
      consts: replace the constants of the trace; None keeps them.
    """
    flat = jax.core.eval_jaxpr(traced.jaxpr, traced.consts if consts is None else consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(result), flat)
