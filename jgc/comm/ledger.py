"""The bytes of collectives, recorded while a step is traced; or collectives that send nothing.

Bytes follow from the algorithm of the collective (`bytes_sent`) and are exact Fractions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

from jgc.types import Array, Sent

# bytes that one of n devices sends, over the operand's bytes
_SHARE: dict[str, Callable[[int], Fraction]] = {
    "all-reduce": lambda n: Fraction(2 * (n - 1), n),
    "all-gather": lambda n: Fraction(n - 1),
    "reduce-scatter": lambda n: Fraction(n - 1, n),
    "all-to-all": lambda n: Fraction(n - 1, n),
    "collective-permute": lambda n: Fraction(int(n > 1)),
}
OPS = tuple(_SHARE)

_ledger: ContextVar[list[Sent] | None] = ContextVar("jgc_ledger", default=None)
_local_copies: ContextVar[bool] = ContextVar("jgc_local_copies", default=False)


class UnknownCollectiveError(ValueError):
    """The bytes of an operation cannot be counted. The message holds its name or HLO line."""


def bytes_sent(op: str, operand_bytes: int, n: int) -> Fraction:
    """Bytes that one of n devices sends in a collective, exactly, by its algorithm.

    A group of one sends nothing. With B = `operand_bytes`: all-reduce 2(n-1)/n B, reduce-scatter
    and all-to-all (n-1)/n B (B: the full input), all-gather (n-1) B (B: one device's part),
    collective-permute B.

    Raises:
      UnknownCollectiveError: an unknown op.
      ValueError: n < 1 or negative bytes.

    Example:
      >>> bytes_sent("all-reduce", 400, 8)
      Fraction(700, 1)
    """
    if op not in _SHARE:
        raise UnknownCollectiveError(f"no byte rule for `op` {op!r}; there are {', '.join(OPS)}")
    if n < 1 or operand_bytes < 0:
        raise ValueError(f"want `n` >= 1 and `operand_bytes` >= 0, got {n} and {operand_bytes}")
    return operand_bytes * _SHARE[op](n)


@contextmanager
def ledger() -> Iterator[list[Sent]]:
    """Collect the collectives traced inside the block, with the bytes that one device sends.

    Example:
      >>> with ledger() as sent:
      ...     pass
      >>> sent
      []
    """
    entries: list[Sent] = []
    token = _ledger.set(entries)
    try:
        yield entries
    finally:
        _ledger.reset(token)


def record(op: str, field: str, x: Array, group: int) -> None:
    """Record a collective, to which each of `group` devices contributes x, in the open ledger."""
    entries = _ledger.get()
    if entries is not None and group > 1:
        whole: Any = x
        # under `vmap` the collective sends all entries; the tracer's array has no public name
        while hasattr(whole, "batch_dim"):
            whole = whole.val
        entries.append(Sent(op, field, bytes_sent(op, whole.size * x.dtype.itemsize, group)))


@contextmanager
def local_copies() -> Iterator[None]:
    """Trace collectives between devices as local copies, to time a step without its network.

    `nodes` must be K nodes, one per device, on a mesh of a single device. Then a sum returns this
    node's value, an all-gather K copies of its message, and a permute its message.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jgc import comm
      >>> from jgc.types import Nodes
      >>> mesh = jax.make_mesh((1,), ("n",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> nodes = Nodes(4, 1, mesh, ("n",))
      >>> each = jax.shard_map(lambda x: comm.all_gather(x[0], nodes, "x"), mesh=nodes.mesh,
      ...     in_specs=jax.P("n"), out_specs=jax.P())
      >>> with local_copies():
      ...     each(jnp.ones((1, 3))).shape
      (4, 3)
    """
    token = _local_copies.set(True)
    try:
        yield
    finally:
        _local_copies.reset(token)


def are_local_copies() -> bool:
    """Whether collectives are traced inside `local_copies`."""
    return _local_copies.get()
