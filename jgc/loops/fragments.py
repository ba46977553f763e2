"""Fragments of a tree: ranges of its leaves."""

from collections.abc import Sequence

import jax

from jgc.types import PyTree


def cut(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """The indices of `count` ranges of leaves with about equally many values each.

    `sizes` are the values of each leaf; `count` is from 1 to the number of leaves.

    Example:
      >>> cut([10, 10, 10, 30], 2), cut([90, 1, 1], 3)
      (((0, 1, 2), (3,)), ((0,), (1,), (2,)))
    """
    ranges: list[list[int]] = [[]]
    held, total = 0, sum(sizes)
    for i, size in enumerate(sizes):
        must = len(sizes) - i <= count - len(ranges)  # else a later range would have no leaf
        full = (held + size / 2) * count > total * len(ranges) and len(ranges) < count
        if ranges[-1] and (must or full):
            ranges.append([])
        ranges[-1].append(i)
        held += size
    return tuple(map(tuple, ranges))


def take(tree: PyTree, leaves: Sequence[int]) -> PyTree:
    """The tree with these leaves, and None for all others, so that paths do not change.

    Example:
      >>> take({"a": 1, "b": 2}, [1])
      {'a': None, 'b': 2}
    """
    flat, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [x if i in leaves else None for i, x in enumerate(flat)])


def put_back(tree: PyTree, part: PyTree, leaves: Sequence[int]) -> PyTree:
    """The tree with these leaves replaced by the leaves of `part`, the inverse of `take`.

    Example:
      >>> put_back({"a": 1, "b": 2}, {"a": None, "b": 7}, [1])
      {'a': 1, 'b': 7}
    """
    flat, treedef = jax.tree.flatten(tree)
    new = dict(zip(leaves, jax.tree.leaves(part), strict=True))
    return jax.tree.unflatten(treedef, [new.get(i, x) for i, x in enumerate(flat)])
