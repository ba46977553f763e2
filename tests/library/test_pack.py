"""Trees as flat vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, strategies as st

from jgc.layout.pack import POOLED, layer_ids, leaf_paths, make_packing, pack, unpack

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
leaves = st.tuples(shapes, dtypes)
trees = st.recursive(
    leaves | st.none(), lambda inner: st.dictionaries(st.sampled_from("abcd"), inner) | st.lists(inner, max_size=3)
)


def _is_leaf(x):
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)


def _filled(tree, seed: int = 0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.integers(1, 9, x[0]).astype(x[1]), tree, is_leaf=_is_leaf)


@given(trees)
def test_unpack_inverts_pack_with_zeros_for_unpacked_leaves(tree):
    tree = _filled(tree)
    packing = make_packing(tree)
    flat = pack(tree, packing)
    again = unpack(flat, packing)
    assert (flat.shape, flat.dtype) == ((packing.size,), jnp.float32)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(again), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.array_equal(y, x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros_like(x))


@given(trees)
def test_layers_cover_vector_and_end_with_pooled_leaves(tree):
    packing = make_packing(_filled(tree))
    ends = [layer.start + layer.size for layer in packing.layers]
    assert [layer.start for layer in packing.layers] == [0, *ends][: len(ends)]
    assert packing.size == ([0, *ends])[-1]
    assert all(layer.size for layer in packing.layers)
    assert all(layer.name != POOLED for layer in packing.layers[:-1])


def test_biases_and_norms_form_one_layer():
    tree = {"a": {"bias": jnp.ones(3), "kernel": jnp.zeros((2, 4))}, "b": jnp.zeros((5, 1)), "c": jnp.ones(())}
    packing = make_packing(tree)
    assert [(layer.name, layer.size) for layer in packing.layers] == [("a/kernel", 8), ("b", 5), (POOLED, 4)]
    assert np.array_equal(pack(tree, packing), [0] * 13 + [1] * 4)


def test_a_packing_is_made_from_shapes_alone():
    tree = {"kernel": jnp.zeros((2, 4)), "bias": jnp.zeros(3, jnp.bfloat16)}
    assert make_packing(jax.eval_shape(lambda: tree)) == make_packing(tree)


def test_float0_gradients_of_integers_stay_float0():
    loss = lambda p: jnp.sum(p["w"]) * p["i"]  # noqa: E731
    grads = jax.grad(loss, allow_int=True)({"w": jnp.ones((2, 2)), "i": 3})
    packing = make_packing(grads)
    assert unpack(pack(grads, packing), packing)["i"].dtype == jax.dtypes.float0


def test_the_parameters_of_an_nnx_module_roundtrip():
    params = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    packing = make_packing(params)
    again = unpack(pack(params, packing), packing)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))
    assert leaf_paths(params)[1].startswith("kernel")


def test_complex_leaves_are_refused_by_name():
    with pytest.raises(TypeError, match="'a/w' is complex64"):
        make_packing({"a": {"w": jnp.zeros(2, jnp.complex64)}})


def test_layer_ids_match_selected_values():
    assert layer_ids((2, 1, 3)).tolist() == [0, 0, 1, 2, 2, 2]


def test_what_is_beyond_a_leafs_dtype_is_clipped():
    tree = {"half": jnp.zeros((2, 2), jnp.float16), "eighth": jnp.zeros((2, 1), jnp.float8_e4m3fn), "b": jnp.zeros(1)}
    packing = make_packing(tree)
    out = unpack(jnp.array([1e9, 1.0, -1e9, 7e4, -7e4, 2.0, 1e9], jnp.float32), packing)
    assert out["eighth"].astype(jnp.float32).ravel().tolist() == [448.0, 1.0]
    assert out["half"].ravel().tolist() == [-65504.0, 65504.0, -65504.0, 2.0]
    assert out["b"].tolist() == [1e9]
