"""Collectives of a traced program: the bytes they send, and which outputs differ.

`jgc.comm.ledger` names the fields of collectives, but misses calls of `jax.lax`, counts those in a
loop once, and those in a jitted function only at its first trace. `all_sent` walks over the program
instead. `varying_axes` tells which outputs differ between devices, also for loops that `shard_map`
with `check_vma=True` refuses, because they begin with a constant.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import jax

from jgc.comm.ledger import UnknownCollectiveError, bytes_sent
from jgc.types import Nodes, PyTree, Sent

Axes = frozenset[str]

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
_LOCAL = frozenset(  # name mesh axes, send nothing
    {"axis_index", "pvary", "pcast", "shard_map", "equal_on_all"}
)
_EQUALISING = frozenset({  # equal results on all devices along the axes that they name
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
    "equal_on_all",
})  # fmt: skip


def all_sent(recorded: Sequence[Sent], jaxpr: Any, nodes: Nodes) -> tuple[Sent, ...]:
    """The collectives that the ledger recorded; one entry an operation if they miss any.

    Raises UnknownCollectiveError: a collective without a byte rule, in a `while` loop, or in
    branches that send different bytes.
    """
    totals: dict[str, Fraction] = {}
    for sent in recorded:
        totals[sent.op] = totals.get(sent.op, Fraction(0)) + sent.bytes
    in_program = _bytes_by_op(jaxpr, {} if nodes.mesh is None else nodes.mesh.shape)
    if in_program == totals:
        return tuple(recorded)
    return tuple(Sent(op, "all fields", size) for op, size in in_program.items())


def _bytes_by_op(jaxpr: Any, axes: Mapping[str, int]) -> dict[str, Fraction]:
    """Bytes that one device sends in a traced function, by operation, on a mesh of these axes."""
    totals: dict[str, Fraction] = {}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        parts = [_bytes_by_op(function, axes) for function in called(params)]
        if name == "while" and any(parts):
            raise UnknownCollectiveError("a collective in a `while` loop, of unknown length")
        if name == "cond":
            if any(branch != parts[0] for branch in parts):
                raise UnknownCollectiveError("the branches of a conditional send different bytes")
            parts = parts[:1]
        along = [axis for axis in named_axes(params) if axis in axes]
        if along and name not in _LOCAL:
            if name not in _OPS:
                over = ", ".join(along)
                raise UnknownCollectiveError(f"no byte rule for `{name}` over the mesh axes {over}")
            groups = params.get("axis_index_groups")
            size = len(groups[0]) if groups else prod(axes[axis] for axis in along)
            operands = sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.invars)
            parts.append({_OPS[name]: bytes_sent(_OPS[name], operands, size)} if size > 1 else {})
        for part in parts:
            for op, sent in part.items():
                turns = params.get("length", 1)  # of a scan
                totals[op] = totals.get(op, Fraction(0)) + turns * sent
    return totals


def varying_axes(jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
    """The mesh axes along which each output of a traced function may differ.

    Args:
      jaxpr: of `jax.make_jaxpr`.
      inputs: for each input the mesh axes along which it differs. Constants differ along none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def total(x):
      ...     return jax.lax.fori_loop(0, 3, lambda _, s: s + x, 0.0), jax.lax.pmax(x, "dcn")
      >>> traced = jax.make_jaxpr(total, axis_env=[("dcn", 2)])(1.0)
      >>> varying_axes(traced, [frozenset({"dcn"})])
      [frozenset({'dcn'}), frozenset()]
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    axes_of = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Axes:  # literals, which cannot be hashed, and constants differ along none
        return frozenset() if hasattr(x, "val") else axes_of.get(x, frozenset())

    for eqn in jaxpr.eqns:
        outputs = _outputs(eqn, [read(x) for x in eqn.invars])
        axes_of.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _outputs(eqn: Any, inputs: list[Axes]) -> list[Axes]:
    """The axes along which the outputs of an operation differ."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        if "num_consts" in params:  # before JAX 0.12
            consts, carried = params["num_consts"], params["num_carry"]
        else:
            consts, carried = map(len, params["ft_in"].unpack()[:2])
        xs = consts + carried
        return _loop(params["jaxpr"], inputs[:consts], inputs[consts:xs], inputs[xs:])
    if name == "while":
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        start, carry = conds + consts, inputs[conds + consts :]
        while True:  # devices may take different numbers of turns: then all results differ
            carry = _loop(params["body_jaxpr"], inputs[conds:start], carry)
            turns = varying_axes(params["cond_jaxpr"], inputs[:conds] + carry)[0]
            if all(turns <= x for x in carry):
                return carry
            carry = [x | turns for x in carry]
    if name == "cond":
        index, *operands = inputs
        branches = [varying_axes(branch, operands) for branch in params["branches"]]
        return [index.union(*each) for each in zip(*branches, strict=True)]
    functions = [getattr(function, "jaxpr", function) for function in called(params)]
    signature = len(eqn.invars), len(eqn.outvars)
    if [(len(x.invars), len(x.outvars)) for x in functions] == [signature]:
        return varying_axes(functions[0], inputs)  # jit, checkpoint, custom derivatives
    axes = frozenset[str]().union(*inputs)
    if name in _EQUALISING and params.get("axis_index_groups") is None:
        axes -= frozenset(named_axes(params))
    if name == "axis_index":
        axes |= frozenset(named_axes(params))
    return [axes] * len(eqn.outvars)


def _loop(jaxpr: Any, consts: list[Axes], carry: list[Axes], xs: Sequence[Axes] = ()) -> list[Axes]:
    """The axes of a loop's carry and stacked outputs; body: `(consts, carry, x) -> (carry, y)`."""
    while True:
        after = varying_axes(jaxpr, [*consts, *carry, *xs])
        joined = [a | b for a, b in zip(carry, after, strict=False)]
        if joined == carry:
            return [*carry, *after[len(carry) :]]
        carry = joined


def named_axes(params: Mapping[str, Any]) -> list[str]:
    """The axes that an operation names; an axis of `vmap` is a number here."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return [axis for axis in axes if isinstance(axis, str)]


def called(params: Mapping[str, Any]) -> Iterator[Any]:
    """The traced functions that an operation calls."""
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(x, "jaxpr", x), "eqns"):
                yield x


def evaluated(
    traced: Any, result: PyTree, args: tuple, consts: Sequence[Any] | None = None
) -> PyTree:
    """The output of a traced function, structured like `result`; `consts` replace its constants."""
    consts = traced.consts if consts is None else consts
    flat = jax.core.eval_jaxpr(traced.jaxpr, consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(result), flat)
