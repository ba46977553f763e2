"""Shapes of parameters to plan for: a transformer of any size, and what can be sharded within a node."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jgc.nodes.placement import spec
from jgc.training.errors import UserError
from jgc.training.steps.step import sharded
from jgc.types import Nodes, PyTree

BLOCKS = 12  # of `transformer`
UNIT = 64  # its width is a multiple
LEAST = 1_000_000  # parameters


def transformer(count: int) -> PyTree:
    """Shapes of a transformer with exactly `count` parameters: 12 blocks of four matrices and two norms each.

    An embedding takes what the blocks leave.

    Raises:
      UserError: too few parameters for the blocks.

    Example:
      >>> shapes = transformer(100_000_000)
      >>> shapes["block01"]["up"].shape, sum(x.size for x in jax.tree.leaves(shapes))
      ((832, 3328), 100000000)
    """
    if count < LEAST:
        raise UserError(f"--params must be at least {LEAST:,}, got {count:,}")
    width = int((count / (12 * BLOCKS)) ** 0.5) // UNIT * UNIT
    if count - _of_blocks(width) < width:  # nothing is left for an embedding
        width -= UNIT
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    block = {**sizes, "norm1": (width,), "norm2": (width,)}
    left = count - _of_blocks(width)
    tree = {f"block{i:02d}": dict(block) for i in range(1, BLOCKS + 1)}
    rows, rest = divmod(left, width)
    whole = {**tree, "embedding": (rows, width), **({"bias": (rest,)} if rest else {})}
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), whole, is_leaf=lambda x: isinstance(x, tuple)
    )


def _of_blocks(width: int) -> int:
    """Parameters of all blocks."""
    return BLOCKS * (12 * width**2 + 2 * width)


def number(text: str) -> int:
    """A number of parameters from the command line.

    Raises:
      UserError: it is none.

    Example:
      >>> number("25M"), number("1.3B"), number("1000000")
      (25000000, 1300000000, 1000000)
    """
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    try:
        return round(float(text if factor == 1 else text[:-1]) * factor)
    except (ValueError, OverflowError) as error:
        raise UserError(f"--params must be a number such as 25M or 1.3B, got {text!r}") from error


def divided(shapes: PyTree, nodes: Nodes) -> PyTree:
    """Shapes sharded in their largest dimension within a node (FSDP), where that is possible.

    Raises:
      UserError: a node is one device, or no parameter can be sharded.
    """
    if not nodes.fast:
        raise UserError("--shard shards parameters over the devices of a node: give a target of several hosts or "
                        "slices, such as h100:4x8 or v5e:2x4x2slices")  # fmt: skip
    placements = sharded(shapes, nodes)
    if all(isinstance(x, str) for x in jax.tree.leaves(placements)):
        raise UserError(f"--shard: no parameter has a dimension that the {nodes.size(nodes.fast)} devices divide")

    def leaf(x, placement):
        sharding = NamedSharding(nodes.mesh, spec(placement, nodes))  # type: ignore[arg-type]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, shapes, placements)
