"""Which outputs of a traced function differ between devices.

The check of `shard_map` (`check_vma=True`) tells, too, but it refuses a loop or branch that begins with a constant and
goes on with a node's values, because the types of its carry differ. This walk over the jaxpr accepts such loops.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jgc.comm.traced import called, named_axes

Axes = frozenset[str]

_EQUALISING = frozenset({  # equal results on all devices along the axes that they name
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
})  # fmt: skip


def varying_axes(jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
    """The mesh axes along which each output of a traced function may differ.

    Args:
      jaxpr: of `jax.make_jaxpr`.
      inputs: for each input the mesh axes along which it differs. Constants differ along none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def total(x):
      ...     return jax.lax.fori_loop(0, 3, lambda _, s: s + x, 0.0), jax.lax.pmax(x, "dcn")
      >>> varying_axes(jax.make_jaxpr(total, axis_env=[("dcn", 2)])(1.0), [frozenset({"dcn"})])
      [frozenset({'dcn'}), frozenset()]
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    axes_of: dict[Any, Axes] = {}

    def read(x: Any) -> Axes:  # literals and constants are not in the table
        return axes_of.get(x, frozenset()) if not hasattr(x, "val") else frozenset()

    axes_of.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        outputs = _outputs(eqn, [read(x) for x in eqn.invars])
        axes_of.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _outputs(eqn: Any, inputs: list[Axes]) -> list[Axes]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        first, second = _sizes_of_scan(params)
        xs = first + second
        return _loop(params["jaxpr"], inputs[:first], inputs[first:xs], inputs[xs:])
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
    functions = list(called(params))
    if len(functions) == 1 and _fits(functions[0], eqn):  # jit, checkpoint, custom derivatives
        return varying_axes(functions[0], inputs)
    axes = frozenset().union(*inputs)
    if name in _EQUALISING and params.get("axis_index_groups") is None:
        axes -= frozenset(named_axes(params))
    if name == "axis_index":
        axes |= frozenset(named_axes(params))
    return [axes] * len(eqn.outvars)


def _sizes_of_scan(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried arrays, which come first in a scan's arguments."""
    if "num_consts" in params:  # before JAX 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _loop(jaxpr: Any, consts: list[Axes], carry: list[Axes], xs: Sequence[Axes] = ()) -> list[Axes]:
    """The axes of a loop's carry and of its stacked outputs; one turn is `(consts, carry, x) -> (carry, y)`."""
    while True:
        after = varying_axes(jaxpr, [*consts, *carry, *xs])
        joined = [a | b for a, b in zip(carry, after, strict=False)]
        if joined == carry:
            return [*carry, *after[len(carry) :]]
        carry = joined


def _fits(function: Any, eqn: Any) -> bool:
    inner = getattr(function, "jaxpr", function)
    return len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
