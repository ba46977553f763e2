"""CIFAR through TensorFlow Datasets: the cache, a missing data set's one line, and the real images.

All but the last test run on a data set of 12 + 8 images, written as TensorFlow Datasets would write it.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from image_helpers import bomb, png_of, write_prepared

from jgc.training import data
from jgc.training.data import MissingDataError, load_cifar

TFDS = Path(os.environ.get("JGC_TEST_DATA") or Path(__file__).parents[2] / "../shared/data/tfds").resolve()


def random_images(n: int) -> np.ndarray:
    """uint8[n, 32, 32, 3], equal at each call."""
    return np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), np.uint8)


def examples(n: int) -> list[tuple[bytes, int]]:
    """The random images as PNG files, and their labels."""
    return [(png_of(image), i % 10) for i, image in enumerate(random_images(n))]


def write(data_dir: Path, train: list[tuple[bytes, int]], test: list[tuple[bytes, int]]) -> Path:
    write_prepared(data_dir, "cifar10", {"train": train, "test": test}, ("32", "32", "3"), 10)
    return data_dir / "cifar10/3.0.2"


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def prepared(tmp_path, no_cache):
    """A folder with a very small cifar10/3.0.2, and an empty cache directory."""
    return write(tmp_path / "tfds", examples(12), examples(8))


def cache_files(folder: Path) -> list[Path]:
    return list((folder.parents[2] / "cache/jgc").iterdir())


def no_decode(*args):
    raise AssertionError("decoded although the cache has it")


def test_cache_hits(prepared, monkeypatch):
    first = load_cifar("cifar10", prepared.parents[1])
    np.testing.assert_array_equal(first.train_images, random_images(12))
    np.testing.assert_array_equal(first.test_labels, np.arange(8))
    assert first.test_labels.dtype == np.int32
    monkeypatch.setattr("jgc.training.data.cifar._decode", no_decode)
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared.parents[1]))
    second = data.load_dataset("cifar10")
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [path.suffix for path in cache_files(prepared)] == [".npz"]  # nothing temporary is left


def test_cache_misses(prepared):
    load_cifar("cifar10", prepared.parents[1])
    (path,) = cache_files(prepared)
    before = path.read_bytes()
    os.utime(prepared / "cifar10-test.array_record-00000-of-00001", ns=(0, 0))
    load_cifar("cifar10", prepared.parents[1])
    assert cache_files(prepared) == [path]
    assert path.read_bytes() != before


@pytest.mark.parametrize("damage", [b"", b"not a zip file", None])
def test_damaged_cache(prepared, damage):
    want = load_cifar("cifar10", prepared.parents[1])
    (path,) = cache_files(prepared)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one flipped bit inside an image
    path.write_bytes(content if damage is None else damage)
    again = load_cifar("cifar10", prepared.parents[1])
    np.testing.assert_array_equal(again.train_images, want.train_images)
    assert path.stat().st_size > 60_000


def test_unwritable_cache(prepared, monkeypatch, caplog):
    (prepared / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(prepared / "file"))  # a file where a directory should be
    assert len(load_cifar("cifar10", prepared.parents[1]).train_images) == 12
    assert "cannot write the cache" in caplog.text


# A missing data set.


def message(name: str, data_dir: Path) -> str:
    with pytest.raises(MissingDataError) as raised:
        load_cifar(name, data_dir)
    assert isinstance(raised.value, FileNotFoundError)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_missing_data_set(tmp_path):
    text = message("cifar100", tmp_path)
    assert str(tmp_path / "cifar100") in text
    assert "pip install tensorflow" in text
    assert f'tfds.builder("cifar100", data_dir="{tmp_path}", file_format="array_record")' in text


def test_unusable_data_set(prepared):
    (prepared / "cifar10-test.array_record-00000-of-00001").unlink()
    assert "has 0 of the 1 files of the test split" in message("cifar10", prepared.parents[1])
    info = json.loads((prepared / "dataset_info.json").read_text()) | {"fileFormat": "tfrecord"}
    (prepared / "dataset_info.json").write_text(json.dumps(info))
    assert "holds tfrecord files, not array_record" in message("cifar10", prepared.parents[1])


def test_newest_complete_version(prepared):
    for version in ("3.0.10", "10.0.0"):
        shutil.copytree(prepared, prepared.parent / version)
    (prepared.parent / "10.0.0/cifar10-test.array_record-00000-of-00001").unlink()
    load_cifar("cifar10", prepared.parents[1])
    (path,) = cache_files(prepared)
    assert path.name.startswith("cifar10-3.0.10-")


INFOS = {
    b"": "cannot read {file} (Expecting value",
    b'{"name": "\xff"}': "cannot read {file} ('utf-8' codec can't decode",
    b"[]": "{file} must list `splits`, each with a `name` and its `shardLengths`",
    b'{"fileFormat": "array_record"}': "{file} must list `splits`",
    b'{"fileFormat": "array_record", "splits": 3}': "{file} must list `splits`",
    b'{"fileFormat": "array_record", "splits": [{"name": "train"}]}': "{file} must list `splits`",
    b'{"fileFormat": "array_record", "splits": [{"shardLengths": ["12"]}]}': "{file} must list `splits`",
}


@pytest.mark.parametrize("content", INFOS)
def test_damaged_dataset_info(prepared, content):
    newer = prepared.parent / "3.0.10"
    shutil.copytree(prepared, newer)
    (newer / "dataset_info.json").write_bytes(content)
    load_cifar("cifar10", prepared.parents[1])
    (path,) = cache_files(prepared)
    assert path.name.startswith("cifar10-3.0.2-")
    shutil.rmtree(prepared)
    text = message("cifar10", prepared.parents[1])
    assert text.startswith(f"cifar10: {INFOS[content].format(file=newer / 'dataset_info.json')}")
    assert "is missing" not in text and "to fetch it" not in text


# A damaged one.


GOOD = png_of(random_images(1)[0])
EXAMPLES = {
    "cannot read image 3 of the train split in {folder} (cannot identify image file)": (b"<html>not found</html>", 1),
    "cannot read image 3 of the train split in {folder} (image file is truncated)": (GOOD[:-60], 1),
    "cannot read image 3 of the train split in {folder} (Image size (10000000000 pixels) exceeds limit": (bomb(), 1),
    "image 3 of the train split in {folder} must be 32x32x3, got 64x48x3": (png_of(np.zeros((64, 48, 3), np.uint8)), 1),
    "image 3 of the train split in {folder} must be 32x32x3, got 1x1x3": (png_of(np.zeros((1, 1, 3), np.uint8)), 1),
    "the label of image 3 of the train split in {folder} must be from 0 to 9, got 10": (GOOD, 10),
    "the label of image 3 of the train split in {folder} must be from 0 to 9, got -1": (GOOD, -1),
}


@pytest.mark.parametrize("said", EXAMPLES)
def test_damaged_image_or_label(tmp_path, no_cache, said):
    folder = write(tmp_path, [*examples(3), EXAMPLES[said]], examples(2))
    assert message("cifar10", tmp_path).startswith(said.format(folder=folder))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kept", [0, 0.5, 0.9999])
def test_truncated_shard(prepared, kept):
    shard = prepared / "cifar10-test.array_record-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[: int(kept * shard.stat().st_size)])
    said = message("cifar10", prepared.parents[1])
    assert said.startswith(f"cannot read image 0 of the test split in {prepared} (")


def test_missing_images_and_damaged_features(prepared):
    info = (prepared / "dataset_info.json").read_text()
    (prepared / "dataset_info.json").write_text(info.replace('"12"', '"13"'))
    assert f"cannot read image 12 of the train split in {prepared} (" in message("cifar10", prepared.parents[1])
    (prepared / "features.json").write_text("{")
    said = message("cifar10", prepared.parents[1])
    assert said.startswith(f"cannot read {prepared} as TensorFlow Datasets prepares it (Expecting ")


def test_unknown_name():
    with pytest.raises(ValueError, match="got 'cifar11'; did you mean cifar1"):
        data.load_dataset("cifar11")
    with pytest.raises(ValueError, match="got 'digits'"):
        load_cifar("digits")


@pytest.mark.skipif(not (TFDS / "cifar10").is_dir(), reason=f"no CIFAR-10 in {TFDS} (set JGC_TEST_DATA)")
@pytest.mark.slow
def test_real_data():
    """Uses the user's cache, because decoding is too slow for every test run."""
    dataset = load_cifar("cifar10", TFDS)
    assert dataset.train_images.shape == (50_000, 32, 32, 3) and dataset.test_images.shape == (
        10_000,
        32,
        32,
        3,
    )
    assert set(Counter(dataset.train_labels.tolist()).values()) == {5000}
    assert set(Counter(dataset.test_labels.tolist()).values()) == {1000}
    for channel in range(3):
        counts = np.bincount(dataset.train_images[..., channel].ravel(), minlength=256)
        mean = np.average(np.arange(256), weights=counts)
        std = np.sqrt(np.average((np.arange(256) - mean) ** 2, weights=counts))
        np.testing.assert_allclose([mean, std], [dataset.mean[channel], dataset.std[channel]], atol=0.002)
