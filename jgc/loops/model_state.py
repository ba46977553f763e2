"""The first model state of every node: copies of arrays, but a random key for each node."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jgc.checks.misuse import check_arrays, form_of, is_key, leaves_by_path
from jgc.loops.buffers import copied
from jgc.nodes.placing import per_node
from jgc.types import Array, Nodes, PyTree

KEY_WORDS = (2, 4)  # in the data of a key: of threefry, as in Keras' seeds, and of rbg


def of_all_nodes(model_state: PyTree, nodes: Nodes) -> PyTree:
    """The model state of every node, leaves [K, ...] in new buffers.

    Node k gets `jax.random.fold_in(key, k)` of every typed random key, so that nodes draw different
    dropout masks.

    Raises:
      TypeError: a leaf that is not an array.

    Warns:
      UserWarning: a leaf uint32[..., 2] or uint32[..., 4], which may be the data of random keys:
        all nodes get the same.

    Example:
      >>> state = of_all_nodes({"mean": jnp.zeros(3), "key": jax.random.key(0)}, Nodes(2, 2))
      >>> state["mean"].shape, bool(state["key"][0] == state["key"][1])
      ((2, 3), False)
    """
    check_arrays(model_state)
    for name, x in leaves_by_path(model_state).items():
        if x.dtype == jnp.uint32 and x.shape[-1:] in [(words,) for words in KEY_WORDS]:
            warnings.warn(
                f"the leaf {name!r} of the model state is {form_of(x)}, as the data of random keys:"
                " all nodes get the same, and would draw the same dropout masks. Give init a typed "
                "key, jax.random.wrap_key_data(x), from which it makes a key for each node, and "
                "unwrap it in the loss by jax.random.key_data (docs/your_loop.md, Dropout)",
                stacklevel=3,
            )

    def first(x):
        if is_key(x):
            return jax.vmap(partial(key_of, x))(jnp.arange(nodes.count))
        return per_node(x, nodes)

    return jax.tree.map(first, copied(model_state))


def is_given(model_state: PyTree) -> bool:
    """Whether `init` got a model state. One without arrays counts: of a model without BatchNorm.

    Example:
      >>> is_given(()), is_given(None), is_given({"batch_stats": {}})
      (False, False, True)
    """
    return jax.tree.structure(model_state) not in map(jax.tree.structure, ((), None))


def key_of(keys: Array, k: Any) -> Array:
    """Node k's key, for every key in an array of any shape: `fold_in(key, k)`."""
    each = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(keys.size), k)
    return each.reshape(keys.shape)
