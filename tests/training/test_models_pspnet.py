"""PSPNet: pooling and interpolation against loops, sizes, dilated convolutions."""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgc.training.data import VOID
from jgc.training.models import ConvNorm, WithAuxiliary, make_model, pspnet
from jgc.training.models.pspnet import BINS, between, parts, pooled, stretched
from jgc.training.models.resnet import FAMILIES
from jgc.training.steps.step import loss_of

RNG = np.random.default_rng(0)


def pooled_by_hand(x, bins):
    """As PyTorch documents adaptive average pooling: from floor(i n / bins) to ceil((i + 1) n / bins)."""
    b, h, w, c = x.shape
    out = np.zeros((b, bins, bins, c))
    for i in range(bins):
        for j in range(bins):
            rows = slice(math.floor(i * h / bins), math.ceil((i + 1) * h / bins))
            columns = slice(math.floor(j * w / bins), math.ceil((j + 1) * w / bins))
            out[:, i, j] = x[:, rows, columns].mean(axis=(1, 2))
    return out


@pytest.mark.parametrize("size", [(5, 7), (1, 13)])
def test_pooling_matches_loop(size):
    x = RNG.normal(size=(2, *size, 3)).astype(np.float32)
    found = jax.jit(lambda x: [pooled(x, bins) for bins in BINS])(x)
    for bins, got in zip(BINS, found, strict=True):
        np.testing.assert_allclose(got, pooled_by_hand(x, bins), atol=1e-5)


@given(size=st.integers(1, 70), bins=st.integers(1, 8))
def test_parts_cover_all_pixels(size, bins):
    matrix = parts(size, bins)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-5)
    assert np.all(matrix.sum(axis=0) > 0)
    np.testing.assert_allclose(matrix, matrix[::-1, ::-1])


@given(old=st.integers(1, 60), new=st.integers(1, 200))
def test_interpolation_is_linear(old, new):
    row = np.random.default_rng(old).normal(size=old)
    want = np.interp(np.linspace(0, old - 1, new), np.arange(old), row)
    np.testing.assert_allclose(between(old, new) @ row, want, atol=1e-4)


def test_stretching_axes():
    x = RNG.normal(size=(2, 3, 5, 3)).astype(np.float32)
    got = jax.jit(lambda x: stretched(x, 17, 33))(x)
    np.testing.assert_allclose(got[:, ::8, ::8], x, atol=1e-5)  # an image of 8 n + 1 pixels
    np.testing.assert_allclose(got[:, 4, ::8], (x[:, 0] + x[:, 1]) / 2, atol=1e-5)


def test_dilated_convolution():
    x = RNG.normal(size=(1, 9, 8, 2)).astype(np.float32)
    kernel = RNG.normal(size=(3, 3, 2, 4)).astype(np.float32)
    holes = np.zeros((5, 5, 2, 4), np.float32)
    holes[::2, ::2] = kernel
    bias = np.zeros(4, np.float32)
    dilated, plain = (
        jax.jit(partial(layer.apply, train=True))({"params": {"conv": {"kernel": weights, "bias": bias}}}, x)
        for layer, weights in ((ConvNorm(4, dilation=2, norm="none"), kernel), (ConvNorm(4, 5, norm="none"), holes))
    )
    assert dilated.shape == (1, 9, 8, 4)
    np.testing.assert_allclose(dilated, plain, atol=1e-5)


@cache
def abstract(name, size, **settings):
    """The model, and the shapes of its variables and of its outputs in training and evaluation."""
    model = make_model(name, 11, **settings)
    images = jax.ShapeDtypeStruct((2, *size, 3), jnp.float32)
    variables = jax.eval_shape(partial(model.module.init, train=False), jax.random.key(0), images)
    train = jax.eval_shape(partial(model.module.apply, train=True, mutable=["batch_stats"]), variables, images)
    return model, variables, train, jax.eval_shape(partial(model.module.apply, train=False), variables, images)


@pytest.mark.parametrize(("name", "size"), [("pspnet50", (473, 473)), ("pspnet18", (33, 1))])
def test_logit_shapes(name, size):
    _, variables, (train, updated), evaluated = abstract(name, size, dtype=jnp.bfloat16)
    assert isinstance(train, WithAuxiliary)
    for logits in (*train, evaluated):
        assert logits.shape == (2, *size, 11) and logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    statistics = jax.tree.structure(variables["batch_stats"])
    assert jax.tree.structure(dict(updated)["batch_stats"]) == statistics and "auxiliary" in variables["batch_stats"]


@pytest.mark.slow
def test_logits_lie_on_their_pixels_whatever_the_size():
    """An image whose sides are not 8 n + 1 pixels has the logits of the padded one, whose features lie on pixels."""
    model = make_model("pspnet18_half", 5)
    images = jax.random.normal(jax.random.key(0), (1, 20, 31, 3))
    variables = model.module.init(jax.random.key(1), images, train=False)
    padded = jnp.pad(images, ((0, 0), (0, 5), (0, 2), (0, 0)))
    whole = model.module.apply(variables, padded, train=False)
    np.testing.assert_array_equal(model.module.apply(variables, images, train=False), whole[:, :20, :31])
    train, _ = model.module.apply(variables, images, train=True, mutable=["batch_stats"])
    assert {x.shape for x in train} == {(1, 20, 31, 5)}


def test_full_size():
    """ResNet-50 without its head, and PSPNet's layers one by one."""
    _, variables, *_ = abstract("pspnet50", (473, 473), dtype=jnp.bfloat16)
    backbone = 25_557_032 - 2049 * 1000
    pyramid = 4 * (2048 * 512 + 2 * 512)
    final = 9 * 4096 * 512 + 2 * 512 + 513 * 11
    auxiliary = 9 * 1024 * 256 + 2 * 256 + 257 * 11
    assert sum(x.size for x in jax.tree.leaves(variables["params"])) == backbone + pyramid + final + auxiliary


def test_paths_and_patterns():
    model, variables, *_ = abstract("pspnet18", (33, 1), dtype=jnp.bfloat16)
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    paths = ["/".join(entry.key for entry in path) for path, _ in leaves]
    assert [p for p in paths if re.search(model.first_layer, p)] == ["stem/conv/kernel"]
    assert sorted(p for p in paths if re.search(model.last_layer, p)) == ["final/head/bias", "final/head/kernel"]
    tops = {p.partition("/")[0] for p in paths if not p.startswith("stage")}
    assert tops == {"stem", "pyramid1", "pyramid2", "pyramid3", "pyramid6", "final", "auxiliary"}
    images, init = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32), make_model("resnet18", 11).module.init
    resnet = jax.eval_shape(partial(init, train=False), jax.random.key(0), images)
    shared = resnet["params"].keys() - {"head"}
    assert {k: jax.tree.map(jnp.shape, variables["params"][k]) for k in shared} == {
        k: jax.tree.map(jnp.shape, resnet["params"][k]) for k in shared
    }


@pytest.mark.slow
def test_both_heads_learn(monkeypatch):
    """With one narrow block a stage: every layer has a gradient, and a few steps of SGD lower the loss."""
    monkeypatch.setitem(FAMILIES, 18, FAMILIES[18]._replace(stages=(1, 1, 1, 1)))
    module = pspnet(18, 3, width=4).module
    images = jnp.asarray(RNG.normal(size=(4, 17, 17, 3)), jnp.float32)
    labels = jnp.where(images[..., 0] > 1.5, VOID, (images[..., 1] > 0).astype(int))
    variables = jax.jit(partial(module.init, train=False))(jax.random.key(0), images)
    loss = loss_of(module.apply, void=True)

    @jax.jit
    def step(params, stats):
        (value, (own, _)), grads = jax.value_and_grad(loss, has_aux=True)(params, (images, labels), stats)
        return value, grads, jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), own

    params, own, losses = variables["params"], {"batch_stats": variables["batch_stats"]}, []
    for i in range(15):
        value, grads, params, own = step(params, own)
        losses.append(float(value))
        if i == 0:
            assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("pspnet18", {"norm": "none"}, "`norm` must be one of 'batch', 'group', got 'none'"),
        ("pspnet18", {"width": 0}, "`width` must be positive, got 0"),
        ("pspnet18", {"num_classes": 0}, "`num_classes` must be positive, got 0"),
        ("pspnet34", {}, "got 'pspnet34'; did you mean pspnet"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(name, **({"num_classes": 11} | settings))
