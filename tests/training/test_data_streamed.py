"""Images decoded while training: crops, batches as pure functions, both of ImageNet's formats, Food-101, and errors."""

import io

import numpy as np
import pytest
from hypothesis import given, strategies as st
from image_helpers import DISHES, TEST, TRAIN, WNIDS, jpeg, write_food101, write_imagenet, write_prepared_imagenet
from PIL import Image

from jgc.compress import Dense
from jgc.training.data import MissingDataError, load_food101, load_imagenet, source_of
from jgc.training.data.crops import AREA, ASPECT, central_box, cut, draw_crops, inception_box
from jgc.training.run.setup import data_of
from jgc.training.settings.config import Config, DataConfig, resolve

CROP = 16


# Crops.


@given(st.integers(8, 900), st.floats(0.34, 3.0), st.integers(0, 2**32 - 1))
def test_inception_crop_bounds(height, shape, seed):
    width = max(1, round(height * shape))
    numbers, _ = draw_crops(np.random.default_rng(seed), 3)
    for one in numbers:
        box = inception_box(one, width, height)
        w, h = box.right - box.left, box.bottom - box.top
        assert box.left >= 0 and box.top >= 0 and box.right <= width and box.bottom <= height
        assert AREA[0] * (1 - 1e-9) <= w * h / (width * height) <= 1 + 1e-9
        assert ASPECT[0] * (1 - 1e-9) <= w / h <= ASPECT[1] * (1 + 1e-9)


def test_inception_crop_distribution():
    """Counts crops whose first try fits, so the area is not uniform near the whole image."""
    numbers, flip = draw_crops(np.random.default_rng(0), 4000)
    boxes = np.array([inception_box(one, 100, 100) for one in numbers])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, aspect = w * h / 1e4, np.log(w / h) / np.log(ASPECT[1])
    small = area < 0.7  # no aspect leaves the image there
    quarters = np.array([0.25, 0.5, 0.75])
    np.testing.assert_allclose(np.quantile(area[small], quarters), 0.08 + 0.62 * quarters, atol=0.02)
    np.testing.assert_allclose(np.quantile(aspect[small], quarters), 2 * quarters - 1, atol=0.05)
    assert abs(flip.mean() - 0.5) < 0.03
    assert abs((boxes[:, 0] / (100 - w + 1e-9))[small].mean() - 0.5) < 0.02


def test_crop_of_a_strip():
    box = inception_box(np.full((10, 4), 0.99), 400, 30)
    assert (box.top, box.bottom, box.left, box.right) == (0, 30, 180, 220)


@pytest.mark.parametrize(("width", "height"), [(400, 300), (320, 640), (30, 40)])
def test_central_crop(width, height):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "PNG")
    short = min(width, height)
    resized = image.resize((round(256 * width / short), round(256 * height / short)), Image.Resampling.BILINEAR)
    left, top = (resized.width - 224) / 2, (resized.height - 224) / 2
    want = resized.crop((round(left), round(top), round(left) + 224, round(top) + 224))
    got = cut(file.getvalue(), 224, central_box)
    assert np.abs(got.astype(int) - np.asarray(want)).mean() < 2


def test_reduced_jpeg_decoding():
    whole = cut(jpeg(1, 640, 481), 20, central_box)
    file = io.BytesIO()
    Image.open(io.BytesIO(jpeg(1, 640, 481))).save(file, "PNG")  # which is always decoded in full
    assert np.abs(whole.astype(int) - cut(file.getvalue(), 20, central_box)).max() <= 2


# Batches.


@pytest.fixture
def imagenet(tmp_path):
    return write_imagenet(tmp_path / "my data")


def small(dataset, **changes):
    return source_of(dataset._replace(crop=CROP, **changes))


def test_batches_are_pure(imagenet):
    one, many = (small(load_imagenet(imagenet), threads=threads) for threads in (1, 5))
    images, labels = one.batch(3, 7, 1, 12)
    assert images.shape == (1, 12, CROP, CROP, 3) and images.dtype == np.float32 and labels.dtype == np.int32
    for nodes in (2, 4):
        x, y = many.batch(3, 7, nodes, 12)
        np.testing.assert_array_equal(x.reshape(images.shape), images)
        np.testing.assert_array_equal(y.reshape(labels.shape), labels)
        part = many.batch(3, 7, nodes, 12, local=slice(1, 2))
        np.testing.assert_array_equal(part[0], x[1:2])
        np.testing.assert_array_equal(part[1], y[1:2])
    assert (one.batch(3, 8, 1, 12)[0] != images).any() and (one.batch(4, 7, 1, 12)[0] != images).any()


def test_process_reads_only_its_images(imagenet):
    dataset, read = load_imagenet(imagenet), []
    counted = dataset._replace(train=dataset.train._replace(read=lambda i: read.append(i) or dataset.train.read(i)))
    small(counted).batch(0, 0, 4, 12, local=slice(2, 3))
    assert len(read) == 3


def test_epoch_covers_every_image(imagenet):
    source = small(load_imagenet(imagenet))
    _, labels = source.batch(0, 0, 2, 3 * TRAIN)
    assert source.epoch_steps(3 * TRAIN) == 1
    assert sorted(labels.ravel()) == sorted([*range(3)] * TRAIN)
    batches = list(source.evaluation(4))
    assert [batch.inputs.shape for batch in batches] == [(12, CROP, CROP, 3)]
    assert batches[0].labels[batches[0].mask].tolist() == sorted([*range(3)] * TEST)
    assert source.classes == 3 and source.inputs(2).shape == (2, CROP, CROP, 3)


def test_held_out_images(imagenet):
    dataset, read = load_imagenet(imagenet), set()
    watched = dataset._replace(train=dataset.train._replace(read=lambda i: read.add(i) or dataset.train.read(i)))
    source = source_of(watched._replace(crop=CROP), validation=1 / 3)
    source.batch(0, 0, 1, 12)
    trained = set(read)
    read.clear()
    held = [batch.mask.sum() for batch in source.validation(1)]
    assert (sum(held), source.epoch_steps(12)) == (6, 1)
    assert not trained & read and len(trained | read) == 3 * TRAIN
    with pytest.raises(ValueError, match=r"at least one of the 18 training images of imagenet .* share 0.01"):
        source_of(watched, validation=0.01)


def test_tfds_matches_class_folders(tmp_path):
    source = small(load_imagenet(write_prepared_imagenet(tmp_path)))
    assert (source.classes, source.epoch_steps(3 * TRAIN)) == (3, 1)
    (batch,) = source.evaluation(1)
    want = np.stack([cut(jpeg(100 + i, 40 + i, 30), CROP, central_box) for i in range(3 * TEST)])
    mean, std = np.array([123.675, 116.28, 103.53]), np.array([58.395, 57.12, 57.375])
    np.testing.assert_allclose(batch.inputs, (want - mean) / std, atol=1e-5)
    assert batch.labels.tolist() == [i % 3 for i in range(3 * TEST)]


def test_food101_labels(tmp_path):
    dataset = load_food101(write_food101(tmp_path))
    assert (dataset.train.size, dataset.test.size, dataset.num_classes) == (3 * TRAIN, 3 * TEST, 3)
    encoded = dataset.test.read(TEST)
    assert encoded.name.endswith(f"{DISHES[1]}/{1000 + TRAIN}.jpg") and encoded.label == 1
    assert encoded.content == jpeg(10 + TRAIN)
    assert load_food101(tmp_path / "food-101").test.facts == dataset.test.facts


@pytest.mark.parametrize("name", ["crop", "threads"])
def test_streamed_settings(imagenet, name):
    def config(data, **settings):
        return resolve(Config(Dense(), data=DataConfig(data, str(imagenet), **settings)))

    assert data_of(config("imagenet", crop=20, threads=3)).inputs(1).shape == (1, 20, 20, 3)
    assert data_of(config("imagenet")).inputs(1).shape == (1, 224, 224, 3)
    with pytest.raises(ValueError, match=rf"--data.{name} is a setting of images .* while training, not of digits"):
        data_of(config("digits", **{name: 8}))
    with pytest.raises(ValueError, match="at least 1 and `threads` at least 0, got -1, 0"):
        source_of(load_imagenet(imagenet)._replace(crop=-1))


# What can be wrong: in a folder.


def rename(folder, old, new):
    (folder / old).rename(folder / new)


IMAGENET = {
    f"{WNIDS[1]} is missing, and": lambda f: rename(f, f"val/{WNIDS[1]}", f"val/.{WNIDS[1]}"),
    "val (No such file or directory)": lambda f: rename(f, "val", "elsewhere"),
    "must hold a folder for each class": lambda f: [rename(f, f"train/{w}", f"train/.{w}") for w in WNIDS],
    f"train/{WNIDS[2]} has no images": lambda f: [x.unlink() for x in (f / "train" / WNIDS[2]).iterdir()],
}
FOOD_DAMAGED = {
    "meta/test.txt is empty": lambda f: (f / "meta/test.txt").write_text("\n"),
    "meta/test.txt ('utf-8' codec can't decode": lambda f: (f / "meta/test.txt").write_bytes(b"cr\xe8me/1\n"),
    "test.txt names no class of train.txt in 'soup/1'": lambda f: (f / "meta/test.txt").write_text("soup/1"),
    "images/baklava (Not a directory)": lambda f: (rename(f, "images/baklava", "x"), (f / "images/baklava").touch()),
}
FOOD_MISSING = {
    "meta/train.txt (No such file": lambda f: (f / "meta/train.txt").unlink(),
    "images/sushi/1003.jpg is not there, of 26 images": lambda f: (f / "images/sushi/1003.jpg").unlink(),
    "images/baklava (No such file": lambda f: rename(f, "images/baklava", "images/x"),
}


@pytest.mark.parametrize("message", IMAGENET)
def test_bad_imagenet_folders(imagenet, message):
    IMAGENET[message](imagenet)
    with pytest.raises(MissingDataError) as raised:
        load_imagenet(imagenet)
    assert message in str(raised.value) and str(imagenet) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("message", [*FOOD_MISSING, *FOOD_DAMAGED])
def test_bad_food101_files(tmp_path, message):
    (FOOD_MISSING | FOOD_DAMAGED)[message](write_food101(tmp_path) / "food-101")
    with pytest.raises(MissingDataError) as raised:
        load_food101(tmp_path)
    text = str(raised.value)
    assert text.startswith("food101 is missing: " if message in FOOD_MISSING else "food101: ")
    assert message in text and str(tmp_path / "food-101") in text and "\n" not in text
    assert (f"mkdir -p {tmp_path} && cd {tmp_path} && curl -LO" in text) == (message in FOOD_MISSING)


def test_missing_imagenet(tmp_path):
    with pytest.raises(MissingDataError, match=rf"imagenet2012 is missing: .*{tmp_path}.*array_record.*class folders"):
        load_imagenet(tmp_path)


@pytest.mark.parametrize("file", ["dataset_info.json", "features.json"])
def test_damaged_dataset_info(tmp_path, file):
    folder = write_prepared_imagenet(tmp_path) / "imagenet2012/3.0.2"
    (folder / file).write_text("{")
    with pytest.raises(MissingDataError) as raised:
        load_imagenet(tmp_path)
    text = str(raised.value)
    assert f"cannot read {folder}" in text and "Expecting property name" in text and "\n" not in text
    assert "is missing" not in text and "class folders" not in text


def test_truncated_shard(tmp_path):
    shard = write_prepared_imagenet(tmp_path) / "imagenet2012/3.0.2/imagenet2012-train.array_record-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(MissingDataError, match=rf"cannot read image 4 of the train split in {shard.parent} \("):
        load_imagenet(tmp_path).train.read(4)


# In an image, found out only when it is decoded.


def broken(content):
    return lambda dataset: dataset._replace(
        train=dataset.train._replace(read=lambda i: dataset.train.read(i)._replace(content=content))
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "cannot identify image file"),
        (b"", "cannot identify image file"),
        (jpeg(0, 400, 300)[:-900], "truncated"),
    ],
)
def test_broken_image(imagenet, content, message):
    with pytest.raises(MissingDataError) as raised:
        small(broken(content)(load_imagenet(imagenet))).batch(0, 0, 2, 4)
    text = str(raised.value)
    assert text.startswith(f"cannot decode {imagenet}/train/n0") and message in text
    assert "\n" not in text and "BytesIO" not in text


def test_bad_label_and_missing_file(imagenet, tmp_path):
    dataset = load_imagenet(imagenet)
    with pytest.raises(MissingDataError, match=r"the label of .*JPEG must be from 0 to 1, got 2"):
        list(small(dataset, num_classes=2).evaluation(1))
    prepared = load_imagenet(write_prepared_imagenet(tmp_path / "tfds"))
    with pytest.raises(MissingDataError, match=r"the label of image 2 of the validation split in .*imagenet2012/3.0.2"):
        list(small(prepared, num_classes=2).evaluation(1))
    for file in (imagenet / "val" / WNIDS[0]).iterdir():
        file.unlink()
    with pytest.raises(MissingDataError, match=rf"cannot read .*val/{WNIDS[0]}/.*\(No such file or directory\)"):
        list(small(dataset).evaluation(1))
