"""Data: batches as pure functions of (seed, step), augmentation, prefetching, and the digits."""

import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

# Not `from jgc.training.data import test_batches`: pytest would take it for a test.
from jgc.training import data
from jgc.training.data import Augment, Dataset, batch_indices, make_batch, prefetch
from jgc.training.data.augment import Draw, apply, draw, normalise

TFDS = Path(os.environ.get("JGC_TEST_DATA") or Path(__file__).parents[2] / "../shared/data/tfds").resolve()


CROP_AND_FLIP = Augment(pad=4, flip=True)


def tiny(n: int = 50, augment: Augment = CROP_AND_FLIP) -> Dataset:
    """CIFAR-like random images; each label is the number of its image."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 32, 32, 3), np.uint8)
    labels = np.arange(n, dtype=np.int32)
    mean, std = np.array([125, 123, 114], np.float32), np.array([63, 62, 67], np.float32)
    return Dataset("tiny", images, labels, images[:7], labels[:7], n, mean, std, augment)


# Order.


@settings(deadline=None)  # a busy machine is no error
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_epoch_covers_every_example(n, batch_size, seed):
    steps = -(-3 * n // batch_size)
    sequence = np.concatenate([batch_indices(seed, step, batch_size, n) for step in range(steps)])
    for epoch in range(3):
        assert sorted(sequence[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_order_depends_on_seed_and_epoch():
    epochs = {tuple(batch_indices(seed, epoch, 50, 50)) for seed in range(3) for epoch in range(3)}
    assert len(epochs) == 9


def test_order_is_pinned():
    """A new NumPy or an edit must not change the order of data in a resumed run."""
    assert batch_indices(seed=3, step=2, batch_size=6, n=10).tolist() == [9, 7, 4, 6, 1, 2]
    assert draw(np.random.default_rng([3, 1, 2]), 6, Augment(pad=4, flip=True)).dy.tolist() == [
        6,
        3,
        0,
        6,
        6,
        2,
    ]


@pytest.mark.parametrize(
    "bad", [(0, -1, 4, 10), (0, 0, 0, 10), (0, 0, 4, 0), (-1, 0, 4, 10), (2**32, 0, 4, 10)]
)
def test_bad_indices(bad):
    with pytest.raises(ValueError, match="got"):
        batch_indices(*bad)


# Batches.


def test_batches_are_pure():
    """Resuming at step 5 needs only the number 5."""
    dataset = tiny()
    through = [make_batch(dataset, 1, step, 2, 16) for step in range(8)]
    for step in (5, 6, 7, 2):
        for a, b in zip(through[step], make_batch(dataset, 1, step, 2, 16), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(through[0][0], make_batch(dataset, 2, 0, 2, 16)[0])


@pytest.mark.parametrize("nodes", [1, 2, 4, 16])
def test_batch_independent_of_nodes(nodes):
    dataset = tiny()
    images, labels = make_batch(dataset, 1, 3, nodes, 16)
    want_images, want_labels = make_batch(dataset, 1, 3, 8, 16)
    assert images.shape == (nodes, 16 // nodes, 32, 32, 3) and images.dtype == np.float32
    assert labels.shape == (nodes, 16 // nodes) and labels.dtype == np.int32
    np.testing.assert_array_equal(images.reshape(want_images.shape), want_images)
    np.testing.assert_array_equal(labels.ravel(), want_labels.ravel())


def test_disjoint_shards():
    dataset = tiny()
    images, labels = make_batch(dataset, 1, 0, 4, 16)
    assert len(set(labels.ravel())) == 16
    own_images, own_labels = make_batch(dataset, 1, 0, 4, 16, local=slice(1, 3))
    np.testing.assert_array_equal(own_images, images[1:3])
    np.testing.assert_array_equal(own_labels, labels[1:3])


def test_labels_match_images():
    dataset = tiny(augment=Augment())
    images, labels = make_batch(dataset, 1, 2, 2, 16)
    want = normalise(dataset.train_images[labels.ravel()], dataset.mean, dataset.std)
    np.testing.assert_array_equal(images.reshape(want.shape), want)


@pytest.mark.parametrize("nodes", [0, 3])
def test_indivisible_batch(nodes):
    with pytest.raises(ValueError, match=f"got {nodes} nodes and a batch of 16"):
        make_batch(tiny(), 0, 0, nodes, 16)


def test_test_batches_cover_test_set():
    dataset = tiny()
    batches = list(data.test_batches(dataset, 3))
    assert {b.inputs.shape for b in batches} == {(3, 32, 32, 3)} and len(batches) == 3
    assert {b.inputs.dtype for b in batches} == {np.dtype(np.float32)}
    labels = np.concatenate([b.labels[b.mask] for b in batches])
    images = np.concatenate([b.inputs[b.mask] for b in batches])
    np.testing.assert_array_equal(labels, dataset.test_labels)
    np.testing.assert_array_equal(images, normalise(dataset.test_images, dataset.mean, dataset.std))
    with pytest.raises(ValueError, match="got 0"):
        data.test_batches(dataset, 0)


# Augmentation.


def test_augmentation_matches_loop():
    images = tiny(n=40).train_images
    chosen = draw(np.random.default_rng(5), 40, Augment(pad=4, flip=True))
    before = images.copy()
    out = apply(images, chosen, 4)
    for image, dy, dx, flip, got in zip(images, *chosen, out, strict=True):
        want = np.pad(image, ((4, 4), (4, 4), (0, 0)))[dy : dy + 32, dx : dx + 32]
        np.testing.assert_array_equal(got, want[:, ::-1] if flip else want)
    np.testing.assert_array_equal(images, before)
    assert out.dtype == np.uint8


def test_centred_crop_is_identity():
    images = tiny(n=3).train_images
    four, no = np.full(3, 4), np.zeros(3, bool)
    np.testing.assert_array_equal(apply(images, Draw(four, four, no), 4), images)


def test_draw_ranges():
    chosen = draw(np.random.default_rng(0), 4000, Augment(pad=2, flip=True))
    assert set(chosen.dy) == set(chosen.dx) == set(range(5))
    assert len(set(zip(chosen.dy, chosen.dx, chosen.flip, strict=True))) == 50  # drawn independently
    assert abs(chosen.flip.mean() - 0.5) < 0.04  # five standard deviations
    assert not draw(np.random.default_rng(0), 4000, Augment(pad=2)).flip.any()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_normalise_is_per_channel(dtype):
    dataset = tiny(n=3)
    images = dataset.train_images.astype(dtype)
    want = (images.astype(np.float32) - dataset.mean) / dataset.std
    np.testing.assert_array_equal(normalise(images, dataset.mean, dataset.std), want)


# Prefetch.


def test_prefetch_order_and_depth():
    begun = []
    for step in prefetch(lambda s: begun.append(s) or s, 3, 20, depth=3):
        assert len(begun) <= step - 3 + 1 + 3
    assert begun == list(range(3, 20))
    assert list(prefetch(abs, 5, 5)) == []
    dataset = tiny()
    for step, batch in enumerate(prefetch(partial(make_batch, dataset, 1, nodes=2, batch_size=8), 0, 3)):
        np.testing.assert_array_equal(batch[0], make_batch(dataset, 1, step, 2, 8)[0])


def test_prefetch_error():
    seen = []
    with pytest.raises(ZeroDivisionError):
        seen.extend(prefetch(lambda s: 1 / (2 - s), 0, 10, depth=4))
    assert seen == [0.5, 1.0]


def test_prefetch_bad_depth():
    with pytest.raises(ValueError, match="got 0"):
        prefetch(abs, 0, 3, depth=0)


def test_prefetch_closes_thread():
    begun = []
    steps = prefetch(lambda s: begun.append(s) or s, 0, 1000, depth=2)
    assert next(steps) == 0
    steps.close()
    assert len(begun) <= 4
    assert not [t for t in threading.enumerate() if t.name.startswith("jgc-prefetch")]


# Digits.


def test_digits_split_is_fixed():
    one, two = data.load_digits(), data.load_dataset("digits", shift=1)
    assert one.train_images.shape == (1437, 8, 8, 1) and one.test_images.shape == (360, 8, 8, 1)
    assert one.train_images.dtype == np.float32 and one.train_labels.dtype == np.int32
    np.testing.assert_array_equal(one.train_images, two.train_images)
    share = np.bincount(one.test_labels) / np.bincount(np.concatenate([one.train_labels, one.test_labels]))
    assert np.all(abs(share - 0.2) < 0.005)
    assert (one.augment, two.augment) == (Augment(), Augment(pad=1))
    normal = normalise(one.train_images, one.mean, one.std)
    assert abs(normal.mean()) < 1e-4 and abs(normal.std() - 1) < 1e-4
    with pytest.raises(ValueError, match="got 8"):
        data.load_digits(shift=8)
