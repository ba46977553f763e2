"""Tiny ImageNet in the folders of its distribution: labels, grayscale files, the cache, and one line for what is wrong.

On three classes of four images, which a fixture writes; some of them are grayscale, as some of the real ones are.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from image_helpers import bomb
from PIL import Image
from tiny import tiny_conv_model

from jgc.training import data
from jgc.training.data import Augment, MissingDataError, load_tiny_imagenet, make_batch
from jgc.training.run import setup
from jgc.training.settings import cli

WNIDS = ("n02124075", "n04067472", "n01443537")  # not in order, as in the real wnids.txt
TRAIN, GRAY_TRAIN = 4, (1, 2)  # images of a class; class and number of the grayscale one
VAL = ((0, "RGB"), (2, "L"), (1, "RGB"), (2, "RGB"), (0, "L"))  # class and colours of each


def picture(number: int, mode: str = "RGB") -> np.ndarray:
    """uint8[64, 64(, 3)], two colours side by side, which JPEG keeps to within a few units."""
    left, right = np.random.default_rng(number).integers(20, 236, (2, 1 if mode == "L" else 3), np.uint8)
    pixels = np.concatenate([np.broadcast_to(x, (64, 32, len(x))) for x in (left, right)], axis=1)
    return pixels[..., 0] if mode == "L" else pixels


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "JPEG", quality=95, subsampling=0)


def train_file(folder: Path, label: int, i: int) -> Path:
    return folder / "train" / WNIDS[label] / "images" / f"{WNIDS[label]}_{i}.JPEG"


def train_picture(label: int, i: int) -> np.ndarray:
    return picture(10 * label + i, "L" if (label, i) == GRAY_TRAIN else "RGB")


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A very small tiny-imagenet-200, and an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "my data" / "tiny-imagenet-200"
    for label in range(len(WNIDS)):
        for i in range(TRAIN):
            write(train_file(folder, label, i), train_picture(label, i))
    for i, (_, mode) in enumerate(VAL):
        write(folder / "val" / "images" / f"val_{i}.JPEG", picture(100 + i, mode))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    rows = [f"val_{i}.JPEG\t{WNIDS[label]}\t0\t32\t44\t62" for i, (label, _) in enumerate(VAL)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    return folder


def expected(pictures: list[np.ndarray]) -> np.ndarray:
    return np.stack([x if x.ndim == 3 else np.repeat(x[..., None], 3, axis=2) for x in pictures]).astype(int)


def test_labels(unpacked):
    dataset = load_tiny_imagenet(unpacked.parent)
    want = expected([train_picture(label, i) for label in range(3) for i in range(TRAIN)])
    assert dataset.train_images.dtype == np.uint8 and dataset.image_shape == (64, 64, 3)
    np.testing.assert_allclose(dataset.train_images, want, atol=6)
    assert dataset.train_labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    want = expected([picture(100 + i, mode) for i, (_, mode) in enumerate(VAL)])
    np.testing.assert_allclose(dataset.test_images, want, atol=6)
    assert dataset.test_labels.tolist() == [label for label, _ in VAL]
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32
    assert (dataset.num_classes, dataset.augment) == (3, Augment(pad=8, flip=True))


def test_grayscale_images(unpacked):
    dataset = load_tiny_imagenet(unpacked.parent)
    images = [dataset.train_images[GRAY_TRAIN[0] * TRAIN + GRAY_TRAIN[1]]]
    images += [dataset.test_images[i] for i, (_, mode) in enumerate(VAL) if mode == "L"]
    assert len(images) == 3
    for image in images:
        np.testing.assert_array_equal(image, np.repeat(image[..., :1], 3, axis=2))


def test_channel_statistics(unpacked):
    dataset = load_tiny_imagenet(unpacked.parent)
    np.testing.assert_allclose(dataset.mean, dataset.train_images.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(dataset.std, dataset.train_images.std((0, 1, 2)), rtol=1e-5)
    assert dataset.mean.dtype == dataset.std.dtype == np.float32
    images, labels = make_batch(dataset, seed=0, step=0, nodes=2, batch_size=12)
    assert images.shape == (2, 6, 64, 64, 3) and sorted(labels.ravel()) == dataset.train_labels.tolist()


# The cache.


def test_cache_hits(unpacked, monkeypatch):
    first = load_tiny_imagenet(unpacked.parent)

    def no_decode(*args):
        raise AssertionError("decoded although the cache has it")

    monkeypatch.setattr("jgc.training.data.tiny_imagenet._decode", no_decode)
    monkeypatch.setenv("TFDS_DATA_DIR", str(unpacked.parent))
    for again in (load_tiny_imagenet(unpacked), data.load_dataset("tiny_imagenet")):
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


def change_an_image(folder):
    write(train_file(folder, 2, 0), picture(77))


def change_its_time(folder):
    os.utime(train_file(folder, 2, 0), ns=(0, 0))


def change_a_label(folder):
    path = folder / "val" / "val_annotations.txt"
    path.write_text(path.read_text().replace(WNIDS[2], WNIDS[0]))


@pytest.mark.parametrize("change", [change_an_image, change_its_time, change_a_label])
def test_cache_misses(unpacked, change):
    load_tiny_imagenet(unpacked.parent)
    (path,) = (unpacked.parents[1] / "cache" / "jgc").iterdir()
    before = path.read_bytes()
    change(unpacked)
    dataset = load_tiny_imagenet(unpacked.parent)
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() != before
    if change is change_an_image:
        np.testing.assert_allclose(dataset.train_images[8], expected([picture(77)])[0], atol=6)
    if change is change_a_label:
        assert dataset.test_labels.tolist() == [0, 0, 1, 0, 0]


# What can be wrong.


def remove(folder: Path, pattern: str) -> None:
    for file in folder.glob(pattern):
        file.unlink()


MISSING = {
    "wnids.txt (No such file or directory)": lambda folder: remove(folder, "wnids.txt"),
    f"{WNIDS[1]}/images has 3 of 4 images": lambda folder: train_file(folder, 1, 3).unlink(),
    f"{WNIDS[0]}/images has 0 images": lambda folder: remove(folder, "train/*/images/*"),
    "val_annotations.txt (No such file": lambda folder: remove(folder, "val/*.txt"),
    "val_3.JPEG is not there, of 4 images": lambda folder: remove(folder, "val/images/val_3.JPEG"),
}
DAMAGES = {
    "wnids.txt is empty": lambda folder: (folder / "wnids.txt").write_text("\n"),
    "wnids.txt ('utf-8' codec can't decode": lambda folder: (folder / "wnids.txt").write_bytes(b"caf\xe9\n"),
    "names no class of wnids.txt in 'val_0.JPEG": lambda folder: (folder / "wnids.txt").write_text(WNIDS[1]),
    "names no class of wnids.txt in 'val_0'": lambda folder: (folder / "val/val_annotations.txt").write_text("val_0"),
    "_2.JPEG must have 64x64 pixels, got 8x16": lambda folder: write(train_file(folder, 0, 2), picture(0)[:8, :16]),
    "_2.JPEG (cannot identify image file": lambda folder: train_file(folder, 0, 2).write_text("<html>not found</html>"),
    "truncated": lambda folder: train_file(folder, 0, 2).write_bytes(train_file(folder, 0, 2).read_bytes()[:-20]),
    "_2.JPEG (Image size (10000000000 pixels)": lambda folder: train_file(folder, 0, 2).write_bytes(bomb()),
}


@pytest.mark.parametrize("message", [*MISSING, *DAMAGES])
def test_bad_files_in_one_line(unpacked, message):
    (MISSING | DAMAGES)[message](unpacked)
    with pytest.raises(MissingDataError) as raised:
        load_tiny_imagenet(unpacked.parent)
    text = str(raised.value)
    assert text.startswith("tiny_imagenet is missing: " if message in MISSING else "tiny_imagenet: ")
    assert message in text and str(unpacked) in text and "\n" not in text
    assert (f"mkdir -p '{unpacked.parent}' && cd '{unpacked.parent}' && curl -LO" in text) == (message in MISSING)
    assert not (unpacked.parents[1] / "cache").exists()


def test_fetch_command(tmp_path):
    for given in (tmp_path, str(tmp_path)):
        with pytest.raises(MissingDataError, match=f"{tmp_path}/tiny-imagenet-200/wnids.txt.*mkdir -p {tmp_path} && "):
            load_tiny_imagenet(given)


@pytest.mark.slow
def test_workload_from_command_line(unpacked, tmp_path, monkeypatch, capsys):
    """Replaces resnet18, which is too large for a test, by a small model."""
    monkeypatch.setattr(setup, "make_model", tiny_conv_model)
    words = "--method topk --workload tiny_imagenet_resnet18 --batch-size 8 --steps 2"
    monkeypatch.chdir(Path(__file__).parents[2])
    assert cli.main([*words.split(), "--data-dir", str(unpacked.parent), "--run-dir", str(tmp_path / "run")]) == 0
    assert "4 nodes" in capsys.readouterr().out
    assert (tmp_path / "run" / "summary.json").exists()
