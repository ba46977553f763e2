"""Models: their sizes, their parameter paths, and what their norms see. Shapes come from `jax.eval_shape`."""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgc.models import MODELS, ConvNorm, Model, make_model
from jgc.models.resnet import Block, _pad_shortcut

# The image sizes that the models are meant for, and one that they are not.
SHAPES = {"convnet5": (8, 8, 1), "resnet20": (32, 32, 3), "resnet32": (32, 32, 3)}


def image_shape(name: str) -> tuple[int, int, int]:
    return SHAPES.get(name, (224, 224, 3))


@cache
def abstract(name: str, num_classes: int, **settings: Any) -> tuple[Model, Any]:
    """The model and the shapes of its variables."""
    model = make_model(name, num_classes, **settings)
    images = jnp.zeros((1, *image_shape(name)))
    variables = jax.eval_shape(lambda: model.module.init(jax.random.key(0), images, train=False))
    return model, variables


def paths(params: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return ["/".join(entry.key for entry in path) for path, _ in leaves]


def size(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("name", "num_classes", "settings", "want"),
    [
        ("convnet5", 10, {}, 389_610),
        ("resnet18", 1000, {}, 11_689_512),  # torchvision's count, as for 50 and 101
        ("resnet50", 1000, {}, 25_557_032),
        ("resnet101", 1000, {}, 44_549_160),
        ("resnet20", 10, {}, 269_722),  # 0.27M in He et al., table 6, as 0.46M for 32
        ("resnet32", 10, {}, 464_154),
        ("resnet20", 10, {"shortcut": "projection"}, 272_474),
        ("resnet20", 100, {}, 269_722 + 90 * 65),
        ("resnet50", 1000, {"norm": "group"}, 25_557_032),
        ("resnet18", 10, {"stem": "cifar"}, 11_689_512 - 990 * 513 - 3 * 64 * (7 * 7 - 3 * 3)),
    ],
)
def test_parameter_counts(name, num_classes, settings, want):
    assert size(abstract(name, num_classes, **settings)[1]["params"]) == want


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", MODELS)
def test_patterns_find_exactly_the_first_and_the_last_layer(name, norm):
    model, variables = abstract(name, 10, norm=norm)
    every = paths(variables["params"])
    first = "layer1" if name == "convnet5" else "stem"
    assert [p for p in every if re.search(model.first_layer, p)] == [f"{first}/conv/kernel"]
    assert {p for p in every if re.search(model.last_layer, p)} == {"head/kernel", "head/bias"}


@pytest.mark.parametrize("name", MODELS)
def test_paths_are_named_by_hand(name):
    """A Flax counter (`Conv_10`) has a capital letter; a policy keyed by one would move with every edit."""
    every = paths(abstract(name, 10)[1]["params"])
    assert len(set(every)) == len(every)
    assert not [p for p in every if re.search("[A-Z]", p)]


def test_paths_of_a_block_are_stable():
    """These names are in users' policies and checkpoints: a change here breaks both."""
    every = paths(abstract("resnet50", 1000)[1]["params"])
    layers = ("layer1", "layer2", "layer3", "shortcut")
    want = {
        f"stage1_block01/{layer}/{leaf}"
        for layer in layers
        for leaf in ("conv/kernel", "norm/scale", "norm/bias")
    }
    assert {p for p in every if p.startswith("stage1_block01/")} == want
    assert "stage3_block06/layer3/conv/kernel" in every


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_shapes(name, norm):
    model, variables = abstract(name, 7, norm=norm, dtype=jnp.bfloat16)
    images = jax.ShapeDtypeStruct((4, *image_shape(name)), jnp.float32)

    def forward(variables, images):
        return model.module.apply(variables, images, train=True, mutable=["batch_stats"])

    logits, updated = jax.eval_shape(forward, variables, images)
    assert logits.shape == (4, 7) and logits.dtype == jnp.float32
    assert set(variables) == ({"params", "batch_stats"} if norm == "batch" else {"params"})
    assert dict(updated) == {k: v for k, v in variables.items() if k == "batch_stats"}
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("name", "want"),
    [("resnet20", (8, 8, 64)), ("resnet18", (7, 7, 512)), ("resnet50", (7, 7, 2048))],
)
def test_last_block_has_the_papers_output_size(name, want):
    model, variables = abstract(name, 10)
    images = jax.ShapeDtypeStruct((1, *image_shape(name)), jnp.float32)

    def forward(variables, images):
        captured = model.module.apply(
            variables, images, train=False, capture_intermediates=lambda module, _: isinstance(module, Block)
        )[1]["intermediates"]
        return captured[max(captured)]["__call__"][0]

    assert jax.eval_shape(forward, variables, images).shape == (1, *want)


def test_models_are_hashable_and_equal_by_value():
    """A jitted step that takes the module as a static argument must not compile again for an equal one."""
    one, other = (make_model("convnet5", 10, widths=[8] * 5) for _ in range(2))
    assert one == other and hash(one) == hash(other)


# What follows runs: a single layer, or a single block.


def layer(norm: str) -> tuple[ConvNorm, Any]:
    module = ConvNorm(16, norm=norm)
    return module, jax.jit(partial(module.init, train=False))(jax.random.key(0), jnp.zeros((1, 4, 4, 1)))


def test_batch_statistics_are_each_nodes_own():
    """Under a named node axis, nodes with other images keep other statistics: momentum 0.9, no collective."""
    module, variables = layer("batch")
    images = jax.random.normal(jax.random.key(1), (2, 4, 4, 4, 1)) * jnp.array([1.0, 3.0]).reshape(
        2, 1, 1, 1, 1
    )

    def node(images):
        return module.apply(variables, images, train=True, mutable=["batch_stats"])[1]["batch_stats"]["norm"]

    statistics = jax.jit(jax.vmap(node, axis_name="nodes"))(images)
    for i in range(2):
        conv = convolution(images[i], variables["params"]["conv"]["kernel"])
        np.testing.assert_allclose(statistics["mean"][i], 0.1 * conv.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(statistics["var"][i], 0.9 + 0.1 * conv.var((0, 1, 2)), rtol=1e-4)


def convolution(images: jax.Array, kernel: jax.Array) -> np.ndarray:
    """3x3 with one pixel of padding, as a loop over the kernel's nine offsets."""
    h, w = images.shape[1:3]
    framed = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [framed[:, y : y + h, x : x + w] @ np.asarray(kernel[y, x]) for y in range(3) for x in range(3)]
    return np.sum(shifted, axis=0)


@pytest.mark.parametrize(("norm", "independent"), [("group", True), ("batch", False)])
def test_group_norm_sees_one_image_at_a_time_and_batch_norm_the_batch(norm, independent):
    module, variables = layer(norm)
    forward = jax.jit(lambda x: module.apply(variables, x, train=True, mutable=["batch_stats"])[0])
    images = np.random.default_rng(1).normal(size=(4, 4, 4, 1)).astype(np.float32)
    others_changed = images * np.array([1, 5, 5, 5], np.float32).reshape(4, 1, 1, 1)
    assert np.allclose(forward(images)[0], forward(others_changed)[0], atol=1e-5) == independent


@pytest.mark.parametrize("bottleneck", [False, True])
def test_zero_init_makes_a_block_the_identity(bottleneck):
    x = np.random.default_rng(0).random((2, 4, 4, 16), np.float32)
    block = Block(
        4 if bottleneck else 16, 1, bottleneck, "projection", "batch", zero_init=True, dtype=jnp.float32
    )
    out, _ = jax.jit(partial(block.init_with_output, train=True))(jax.random.key(1), x)
    np.testing.assert_array_equal(out, x)


def test_identity_shortcut_keeps_every_second_pixel_and_adds_zero_channels():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    out = _pad_shortcut(x, features=3, stride=2)
    np.testing.assert_array_equal(out[0, :, :, 0], [[0, 2], [8, 10]])
    assert out.shape == (1, 2, 2, 3) and not out[..., 1:].any()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet52", {}, "got 'resnet52'; did you mean 'resnet50'"),
        ("vgg", {}, "must be one of convnet5, .*got 'vgg'$"),
        ("resnet18", {"stem": "tiny"}, "`stem` must be one of 'cifar', 'imagenet', got 'tiny'"),
        ("resnet18", {"norm": "layer"}, "`norm` must be one of 'batch', 'group', got 'layer'"),
        ("resnet18", {"num_classes": 0}, "`num_classes` must be positive, got 0"),
        ("resnet50", {"shortcut": "identity"}, "must be 'projection', got 'identity' with depth 50"),
        ("convnet5", {"widths": (8, 8)}, r"`widths` must be 5 positive numbers, got \(8, 8\)"),
        ("convnet5", {"strides": (1, 2, 0, 2, 1)}, r"`strides` must be 5 positive numbers"),
    ],
)
def test_bad_settings_are_named(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(name, **({"num_classes": 10} | settings))


def test_settings_that_a_model_does_not_have():
    with pytest.raises(TypeError, match="stm"):
        make_model("resnet18", 10, stm="cifar")
    with pytest.raises(TypeError, match="depth"):  # a resnet18 of depth 50 would be a lie in every log
        make_model("resnet18", 10, depth=50)
