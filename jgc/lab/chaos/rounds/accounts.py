"""A node's account of its movement, on its disk, so that conservation can be checked over kills.

    opening + moved since = counted by the lists since + residual + carry

Where a node says that it has lost something, its account is closed and a new one opened.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jgc.layout.pack import make_packing, unpack
from jgc.rounds.arithmetic import Vector
from jgc.rounds.messages import BadObject, opened
from jgc.rounds.protocol import Member


class Balance(NamedTuple):
    """A node's account after an exchange; vectors are f64[n].

    Attributes:
      opened: rounds before the shared state when the account was opened.
      number: the same now.
      opening: residual and carry then.
      moved: sum of the differences since.
      left: residual and carry now.
      incarnations: of the processes that have sent for the node.
    """

    opened: int
    number: int
    opening: Vector
    moved: Vector
    left: Vector
    incarnations: tuple[str, ...]


class Account:
    """A node's account. `begin` and `end` go around each exchange."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lost = 0
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, member: Member, started: int | None) -> None:
        """Continue the account after a start, or open one.

        Args:
          member: after it has joined.
          started: the round on the node's disk before it joined, see `round_on_disk`.
        """
        self.number = len(list(self.folder.glob("balance-*.npz")))
        flying = _read(self.folder / "flying.npz")
        if member.lost or flying is None or started is None or not self.number:
            return self._new(member)
        old = read_balance(self.folder / f"balance-{self.number - 1}.npz")
        moved = old.moved
        if flying["account"] == self.number - 1:  # else killed in the exchange that opened this one
            # the difference of the exchange in which the process was killed counts if it was on disk
            moved = flying["moved"] + (flying["difference"] if flying["round"] <= started else 0)
        incarnations = (*old.incarnations, member.incarnation)
        self.balance = old._replace(moved=moved, incarnations=incarnations)
        self.number -= 1
        self.end(member)

    def begin(self, member: Member, difference: Vector) -> None:
        """Before an exchange, while nothing of it is on the node's disk."""
        _write(
            self.folder / "flying.npz", moved=self.balance.moved, difference=difference,
            round=np.array(member.shared.number), account=np.array(self.number),
        )  # fmt: skip

    def end(self, member: Member, difference: Vector | float = 0.0) -> None:
        """After an exchange."""
        if member.lost > self.lost:
            return self._new(member)
        moved, number = self.balance.moved + difference, member.shared.number
        self.balance = self.balance._replace(number=number, moved=moved, left=_left(member))
        self._save()

    def _new(self, member: Member) -> None:
        self.lost, self.number = member.lost, len(list(self.folder.glob("balance-*.npz")))
        left, number = _left(member), member.shared.number
        self.balance = Balance(number, number, left, 0 * left, left, (member.incarnation,))
        self._save()

    def _save(self) -> None:
        write_balance(self.folder / f"balance-{self.number}.npz", self.balance)


def round_on_disk(folder: Path, node: str) -> int | None:
    """The round of a node's file on disk; None without a readable file."""
    try:
        return opened((folder / f"{node}.rounds").read_bytes(), None)[0]["round"]
    except (FileNotFoundError, BadObject):
        return None


def write_balance(path: Path, balance: Balance) -> None:
    """Replace a file by a balance."""
    facts = json.dumps([balance.opened, balance.number, balance.incarnations])
    _write(
        path, opening=balance.opening, moved=balance.moved, left=balance.left, facts=np.array(facts)
    )


def read_balance(path: Path) -> Balance:
    """A balance from its file."""
    arrays = _read(path)
    if arrays is None:
        raise FileNotFoundError(path)
    start, number, incarnations = json.loads(str(arrays["facts"]))
    opening, moved, left = (arrays[name] for name in ("opening", "moved", "left"))
    return Balance(start, number, opening, moved, left, tuple(incarnations))


def _left(member: Member) -> Vector:
    """f64[n]: movement of the node that no list has counted."""
    coder: Any = member.context.coder
    (residual,) = member.memory.values()
    packing = make_packing(coder.parts[0].like)
    # a packing has a different order than a vector
    vector = coder.leaves.vector(unpack(jnp.asarray(residual), packing))
    return member.carry.astype(np.float64) + vector


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with np.load(path) as file:
            return dict(file)
    except FileNotFoundError:
        return None


def _write(path: Path, **arrays: Any) -> None:
    """Replace a file; a process that is killed leaves the old or the new one."""
    new = path.with_suffix(".tmp")
    with new.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(new, path)
