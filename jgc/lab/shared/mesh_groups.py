"""The devices that take part in a collective together, where XLA names the axes of a mesh."""

import re
from math import prod

import numpy as np


def groups_of_axes(mesh: str, axes: str) -> tuple[tuple[int, ...], ...]:
    """The groups along axes of a mesh of devices 0, 1, 2, ...

    Example:
      >>> groups_of_axes("'a'=2,'b'=4", "'b'")
      ((0, 1, 2, 3), (4, 5, 6, 7))
      >>> groups_of_axes("'a'=2,'b'=4", "'a','b':(1)2")
      ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    grouped = {name: (int(before or 1), int(size or 0)) for name, before, size in
               re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)}  # fmt: skip
    dims, chosen = list[int](), list[int]()
    for name, size in re.findall(r"'([^']*)'=(\d+)", mesh):
        # An axis is before x part x rest; groups lie along the part.
        before, part = grouped.get(name, (1, 1))
        part = part or int(size)
        chosen += [len(dims) + 1] if name in grouped else []
        dims += [before, part, int(size) // before // part]
    ids = np.moveaxis(np.arange(prod(dims)).reshape(dims), chosen, range(-len(chosen), 0))
    return tuple(map(tuple, ids.reshape(-1, prod(dims[i] for i in chosen)).tolist()))
