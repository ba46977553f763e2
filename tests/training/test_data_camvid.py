"""CamVid in SegNet's folders: decoding, one-line errors, batches of scenes."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from camvid_helpers import COUNTS, HEIGHT, NONE, WIDTH, number_of, paths, scene, write_camvid
from hypothesis import given, strategies as st
from image_helpers import bomb
from PIL import Image

from jgc.training import data
from jgc.training.data import VOID, MissingDataError, load_camvid, shrunk, source_of
from jgc.training.data.scenes import NO_LABEL, Labelled, Warp, scene_batch
from jgc.training.data.warp import Draw, coefficients, draw, warped

# JGC_TEST_DATA is the folder of TensorFlow Datasets; CamVid lies beside it
REAL = Path(os.environ.get("JGC_TEST_DATA") or Path(__file__).parents[2] / "../shared/data/tfds").resolve().parent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A very small CamVid, and an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_camvid(tmp_path / "my data")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load_camvid(write_camvid(tmp_path_factory.mktemp("data")))._replace(crop=33)


# Reading.


def test_decoding_matches_files(folder):
    found = load_camvid(folder.parent)
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        images, labels = zip(*(scene(number_of(split, i)) for i in range(COUNTS[split])), strict=True)
        np.testing.assert_array_equal(getattr(found, name).images, images)
        np.testing.assert_array_equal(getattr(found, name).labels, np.where(np.equal(labels, NONE), NO_LABEL, labels))
        assert getattr(found, name).images.dtype == getattr(found, name).labels.dtype == np.uint8
    assert len(found.classes) == len(found.colours) == 11 and found.classes[3] == "road" and found.crop == 473
    pixels = found.train.images.reshape(-1, 3)
    np.testing.assert_allclose(found.mean, pixels.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.std, pixels.std(0), rtol=1e-4)


def test_cache_hits_and_misses(folder, monkeypatch):
    first = load_camvid(folder.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jgc.training.data.camvid._decode", None)
        patch.setenv("TFDS_DATA_DIR", str(folder.parent))
        for again in (load_camvid(folder), data.load_dataset("camvid")):
            np.testing.assert_array_equal(again.test.labels, first.test.labels)
    (entry,) = (folder.parents[1] / "cache" / "jgc").iterdir()
    _, labels = paths(folder, "test", 0)
    Image.fromarray(np.full((HEIGHT, WIDTH), 5, np.uint8)).save(labels)
    os.utime(labels, ns=(0, 0))
    assert np.all(load_camvid(folder).test.labels[0] == 5) and list(entry.parent.iterdir()) == [entry]


def test_tutorial_folder_and_jpeg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_camvid(tmp_path, "CamVid")
    image, _ = paths(folder, "train", 0)
    Image.open(image).save(image.with_suffix(".jpg"), quality=95, subsampling=0)
    image.unlink()
    listed = folder / "train.txt"
    listed.write_text(listed.read_text().replace("/train/train_00.png", "/train/train_00.jpg"))
    found = load_camvid(tmp_path)
    np.testing.assert_allclose(found.train.images[0].astype(int), scene(0)[0], atol=40)
    assert found.train.labels[0][0, 0] == 0


def save(pixels, *where) -> None:
    Image.fromarray(np.asarray(pixels, np.uint8)).save(paths(*where[:3])[where[3]])


def cut(folder: Path) -> None:
    image, _ = paths(folder, "train", 2)
    image.write_bytes(image.read_bytes()[:-300])


def relist(folder: Path, text: str) -> None:
    (folder / "val.txt").write_text(text)


MISSING = {
    "{folder}/test.txt (No such file or directory)": lambda folder: (folder / "test.txt").unlink(),
    "{folder}/val/val_01.png is not there, though {folder}/val.txt names it":
        lambda folder: paths(folder, "val", 1)[0].unlink(),
    "{folder}/testannot/test_04.png is not there": lambda folder: paths(folder, "test", 4)[1].unlink(),
}  # fmt: skip
DAMAGES = {
    "{folder}/val.txt is empty": lambda folder: relist(folder, "\n"),
    "cannot read {folder}/val.txt ('utf-8' codec can't decode": lambda f: (f / "val.txt").write_bytes(b"caf\xe9.png a"),
    "cannot read {folder}/val.txt (Is a directory)": lambda f: ((f / "val.txt").unlink(), (f / "val.txt").mkdir()),
    "cannot read {folder}/aaaa": lambda folder: relist(folder, f"{300 * 'a'} b"),  # too long for a name
    "line 1 of {folder}/val.txt must name an image and its labels, got 'val/a.png'": lambda f: relist(f, "val/a.png\n"),
    "cannot read {folder}/train/train_02.png (": cut,
    "cannot read {folder}/trainannot/train_03.png (cannot identify image file":
        lambda folder: paths(folder, "train", 3)[1].write_text("<html>not found</html>"),
    "cannot read {folder}/test/test_02.png (Image size (10000000000 pixels) exceeds limit":
        lambda folder: paths(folder, "test", 2)[0].write_bytes(bomb()),
    "{folder}/valannot/val_00.png must have labels 0 to 10, or 11 for none, got 12":
        lambda folder: save(np.full((HEIGHT, WIDTH), 12), folder, "val", 0, 1),
    "{folder}/valannot/val_02.png must have one label a pixel, got 3 channels":
        lambda folder: save(np.zeros((HEIGHT, WIDTH, 3)), folder, "val", 2, 1),
    "{folder}/trainannot/train_01.png must have 48x36 pixels, as {folder}/train/train_01.png has, got 36x48":
        lambda folder: save(np.zeros((WIDTH, HEIGHT)), folder, "train", 1, 1),
    "{folder}/test/test_03.png must have 48x36 pixels, as {folder}/train/train_00.png has, got 8x4":
        lambda folder: save(np.zeros((4, 8, 3)), folder, "test", 3, 0),
}  # fmt: skip


@pytest.mark.parametrize("message", [*MISSING, *DAMAGES])
def test_bad_files_in_one_line(folder, message):
    (MISSING | DAMAGES)[message](folder)
    with pytest.raises(MissingDataError) as raised:
        load_camvid(folder.parent)
    text = str(raised.value)
    assert text.startswith("camvid is missing: " if message in MISSING else "camvid: ")
    assert message.format(folder=folder) in text and "\n" not in text
    assert ("to fetch it once: git clone" in text) == (message in MISSING)
    assert not (folder.parents[1] / "cache").exists()


@pytest.mark.parametrize("there", ["", "my data", "my data/camvid"])
def test_fetch_command(tmp_path, monkeypatch, there):
    """With a fake git that creates the tutorial's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    write_camvid(tmp_path / "tutorial", "CamVid")
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text('#!/bin/sh\ncp -r tutorial "$(basename "$4")"\n')
    git.chmod(0o755)
    with pytest.raises(MissingDataError) as raised:
        load_camvid(tmp_path / "my data")
    command = str(raised.value).partition("to fetch it once: ")[2]
    path = {"PATH": f"{git.parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=path)
    assert len(load_camvid(tmp_path / "my data").train.labels) == COUNTS["train"]


@pytest.mark.skipif(not (REAL / "camvid").is_dir(), reason=f"no CamVid in {REAL} (set JGC_TEST_DATA)")
@pytest.mark.slow
def test_real_data():
    found = load_camvid(REAL)
    assert [len(x.labels) for x in (found.train, found.validation, found.test)] == [367, 101, 233]
    assert found.train.images.shape[1:] == (360, 480, 3)
    counts = np.bincount(found.test.labels.ravel())
    assert counts[:11].argmax() == 3 and 0.03 < counts[NO_LABEL] / counts.sum() < 0.05  # mostly road


# Warps.


@given(seed=st.integers(0, 2**32 - 1), crop=st.integers(5, 60))
def test_warp_matches_coefficients(seed, crop):
    """The colours are coordinates, which bilinear interpolation keeps; labels come from the nearest pixel."""
    one = Draw(*(x[0] for x in draw(np.random.default_rng(seed), 1, Warp())))
    how = np.reshape(coefficients(one, WIDTH, HEIGHT, crop), (2, 3))
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([5 * x, 5 * y, np.zeros_like(x)], -1).astype(np.uint8)
    labels = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 251
    colours = warped(image, tuple(how.ravel()), crop, (1, 2, 255)).astype(float)
    classes = warped(labels.astype(np.uint8), tuple(how.ravel()), crop, NO_LABEL)
    rows, columns = np.mgrid[:crop, :crop] + 0.5
    at = np.stack([columns, rows, np.ones_like(rows)], -1) @ how.T  # [crop, crop, 2], x and y
    inside = np.all((at > 0.6) & (at < np.array([WIDTH, HEIGHT]) - 0.6), axis=-1)
    outside = np.any((at < -0.1) | (at > np.array([WIDTH, HEIGHT]) + 0.1), axis=-1)
    np.testing.assert_allclose(colours[inside][:, :2], 5 * (at[inside] - 0.5), atol=1.1)
    np.testing.assert_array_equal(colours[outside], np.broadcast_to([1, 2, 255], (outside.sum(), 3)))
    assert np.all(classes[outside] == NO_LABEL) and not np.any(classes[inside] == NO_LABEL)
    clear = inside & np.all(np.abs(at - np.round(at)) > 0.01, axis=-1)  # not on the edge of two pixels
    nearest = np.floor(at[clear]).astype(int)
    np.testing.assert_array_equal(classes[clear], labels[nearest[:, 1], nearest[:, 0]])
    # the area that the crop is taken from is that of the scale
    np.testing.assert_allclose(abs(np.linalg.det(how[:, :2])), one.scale**-2)


def test_identity_and_mirror_warp(scenes):
    image, size = scenes.train.images[0][:, :HEIGHT], HEIGHT
    for flip, want in ((False, image), (True, image[:, ::-1])):
        how = coefficients(Draw(1.0, 0.0, flip, 0.0, 0.0), size, size, size)  # type: ignore[arg-type]
        np.testing.assert_array_equal(warped(image, how, size, (0, 0, 0)), want)


def test_warp_ranges():
    found = draw(np.random.default_rng(0), 4000, Warp())
    assert 0.5 <= found.scale.min() < 0.51 and 1.99 < found.scale.max() <= 2 and abs(found.scale.mean() - 1.25) < 0.03
    degrees = np.degrees(found.angle)
    assert -10 <= degrees.min() < -9.9 and 9.9 < degrees.max() <= 10 and abs(found.flip.mean() - 0.5) < 0.03
    assert not draw(np.random.default_rng(0), 50, Warp(flip=False)).flip.any()


# Batches.


def test_batches_are_pure(scenes):
    images, labels = scene_batch(scenes, 3, 7, nodes=4, batch_size=8)
    assert images.shape == (4, 2, 33, 33, 3) and labels.shape == (4, 2, 33, 33)
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    for local in (slice(0, 1), slice(2, 4)):
        part = scene_batch(scenes, 3, 7, 4, 8, local)
        np.testing.assert_array_equal(part[0], images[local])
        np.testing.assert_array_equal(part[1], labels[local])
    one = scene_batch(scenes, 3, 7, nodes=1, batch_size=8)
    np.testing.assert_array_equal(one[0][0], images.reshape(8, 33, 33, 3))
    for seed, step in ((4, 7), (3, 8)):
        assert not np.array_equal(scene_batch(scenes, seed, step, 4, 8)[0], images)
    with pytest.raises(ValueError, match="`nodes` must divide `batch_size`, got 3 nodes and a batch of 8"):
        scene_batch(scenes, 0, 0, 3, 8)


def test_padding_is_mean_and_void(scenes):
    images, labels = scene_batch(scenes._replace(crop=120, warp=Warp((1.0, 1.0), 0.0, False)), 0, 0, 1, 4)
    inside = np.zeros((120, 120), bool)
    inside[42:78, 36:84] = True
    assert np.all(labels[..., ~inside] == VOID) and np.abs(images[0, :, ~inside]).max() < 0.5 / scenes.std.min()
    assert np.mean(labels[..., inside] == VOID) == 3 / WIDTH and labels.max() <= 10
    back = images[0, :, inside].transpose(1, 0, 2) * scenes.std + scenes.mean
    taken = {image.tobytes() for image in scenes.train.images}
    assert {np.round(x).astype(np.uint8).tobytes() for x in back} <= taken


@pytest.mark.parametrize("multiple", [1, 3])
def test_evaluation_covers_labelled_pixels(scenes, multiple):
    batches = list(source_of(scenes).evaluation(multiple))
    assert len({batch.inputs.shape for batch in batches}) == 1 and len(batches[0].labels) % multiple == 0
    inputs, labels, mask = (np.concatenate([getattr(batch, name) for batch in batches])
                            for name in ("inputs", "labels", "mask"))  # fmt: skip
    count = COUNTS["test"]
    np.testing.assert_array_equal(mask[:count], scenes.test.labels != NO_LABEL)
    assert not mask[count:].any() and labels.min() == 0
    np.testing.assert_array_equal(labels[mask], scenes.test.labels[scenes.test.labels != NO_LABEL])
    np.testing.assert_allclose(inputs[:count] * scenes.std + scenes.mean, scenes.test.images, atol=1e-3)


def test_validation_split(scenes):
    source = source_of(scenes)
    (batch,) = source.validation(1)
    assert len(batch.labels) == COUNTS["val"] and source.epoch_steps(4) == 2.5
    with pytest.raises(ValueError, match=r"camvid comes with validation images: nothing can be held out, got 0\.1"):
        source_of(scenes, 0.1)


def test_shrinking(scenes):
    small = shrunk(scenes, 3)
    blocks = scenes.test.images.reshape(-1, 12, 3, 16, 3, 3).astype(float)
    np.testing.assert_allclose(small.test.images, blocks.mean((2, 4)), atol=0.6)  # Pillow's numbers of fixed point
    np.testing.assert_array_equal(small.train.labels, scenes.train.labels[:, 1::3, 1::3])
    odd = shrunk(scenes, 5)  # 48 and 36 are no multiples of it
    assert odd.test.images.shape[1:] == (7, 9, 3) and odd.test.labels.shape[1:] == (7, 9)
    assert shrunk(scenes, 1) is scenes
    for by in (0, -2, 37):
        with pytest.raises(ValueError, match=f"images of 48x36 pixels can be shrunk by 1 or more .*, got {by}"):
            shrunk(scenes, by)


def test_empty_crop(scenes):
    with pytest.raises(ValueError, match="the crop must be at least 1 pixel on each side, got 0"):
        source_of(scenes._replace(crop=0))


def test_facts_depend_on_labels(scenes):
    changed = scenes._replace(test=Labelled(scenes.test.images, scenes.test.labels.copy()))
    changed.test.labels[0, 0, 0] = 7
    assert source_of(changed).facts != source_of(scenes).facts
