"""Small data sets of images in the formats that the real ones have on disk."""

import io
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

WNIDS = ("n01440764", "n01443537", "n01484850")
DISHES = ("apple_pie", "baklava", "sushi")
TRAIN, TEST = 6, 3  # images of each class


def pixels(number: int, width: int = 40, height: int = 30) -> np.ndarray:
    """uint8[height, width, 3], a colour that says which image it is, brighter to the right."""
    colour = np.random.default_rng(number).integers(20, 200, 3)
    ramp = 50 * np.arange(width) / width
    return np.broadcast_to(colour + ramp[:, None], (height, width, 3)).astype(np.uint8)


def jpeg(number: int, width: int = 40, height: int = 30, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number, width, height)).convert(mode).save(file, "JPEG", quality=95)
    return file.getvalue()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_imagenet(folder: Path) -> Path:
    """ImageNet's class folders; images of several sizes, one of them grayscale and one CMYK."""
    for split, count in (("train", TRAIN), ("val", TEST)):
        for label, wnid in enumerate(WNIDS):
            for i in range(count):
                mode = {(1, 2): "L", (2, 1): "CMYK"}.get((label, i), "RGB")
                content = jpeg(100 * (split == "val") + 10 * label + i, 40 + 3 * i, 30 + label, mode)
                write(folder / split / wnid / f"{wnid}_{i}.JPEG", content)
    return folder


def write_food101(folder: Path) -> Path:
    """Food-101: all images of a class in one folder, and two lists."""
    root = folder / "food-101"
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for label, dish in enumerate(DISHES):
        for i in range(TRAIN + TEST):
            write(root / "images" / dish / f"{1000 + i}.jpg", jpeg(10 * label + i))
            lists["train" if i < TRAIN else "test"].append(f"{dish}/{1000 + i}")
    for split, names in lists.items():
        write(root / "meta" / f"{split}.txt", ("\n".join(names) + "\n").encode())
    return folder


def write_tiny_imagenet(folder: Path) -> Path:
    """Tiny ImageNet's folders."""
    root = folder / "tiny-imagenet-200"
    rows = []
    for label, wnid in enumerate(WNIDS):
        for i in range(TRAIN):
            write(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", jpeg(10 * label + i, 64, 64))
        for i in range(TEST):
            write(root / "val" / "images" / f"val_{label}{i}.JPEG", jpeg(100 + 10 * label + i, 64, 64))
            rows.append(f"val_{label}{i}.JPEG\t{wnid}\t0\t0\t9\t9")
    write(root / "wnids.txt", ("\n".join(WNIDS) + "\n").encode())
    write(root / "val" / "val_annotations.txt", ("\n".join(rows) + "\n").encode())
    return folder


def write_cifar100(folder: Path) -> Path:
    """CIFAR-100 as TensorFlow Datasets prepares it."""
    examples = {
        split: [(png(number), number % 100) for number in range(count)] for split, count in (("train", 18), ("test", 9))
    }
    return write_prepared(folder, "cifar100", examples, ("32", "32", "3"), 100)


def write_prepared_imagenet(folder: Path) -> Path:
    """ImageNet as TensorFlow Datasets prepares it."""
    examples = {
        split: [(jpeg(first + i, 40 + i, 30), i % 3) for i in range(count)]
        for split, count, first in (("train", 3 * TRAIN, 0), ("validation", 3 * TEST, 100))
    }
    return write_prepared(folder, "imagenet2012", examples, ("-1", "-1", "3"), 3)


def png(number: int) -> bytes:
    return png_of(pixels(number, 32, 32))


def png_of(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def bomb() -> bytes:
    """A PNG file that says that it has 100,000 pixels on each side, more than Pillow decodes."""
    content = png(0)
    header = b"IHDR" + struct.pack(">II", 10**5, 10**5) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def write_prepared(
    folder: Path,
    name: str,
    examples: Mapping[str, Sequence[tuple[bytes, int]]],
    shape: tuple[str, str, str],
    classes: int,
) -> Path:
    """A data set of images and labels as array_record, with the files beside it that say so."""
    root = folder / name / "3.0.2"
    root.mkdir(parents=True)
    splits = [write_split(root, name, split, pairs) for split, pairs in examples.items()]
    info = {"fileFormat": "array_record", "name": name, "version": "3.0.2", "splits": splits}
    (root / "dataset_info.json").write_text(json.dumps(info))
    features = {
        "image": feature("image_feature.Image", {"image": {"dtype": "uint8", "shape": {"dimensions": shape}}}),
        "label": feature("class_label_feature.ClassLabel", {"classLabel": {"numClasses": str(classes)}}),
    }
    body = feature("features_dict.FeaturesDict", {"featuresDict": {"features": features}})
    (root / "features.json").write_text(json.dumps(body))
    return folder


def feature(kind: str, body: dict) -> dict:
    return {"pythonClassName": f"tensorflow_datasets.core.features.{kind}"} | body


def write_split(root: Path, name: str, split: str, pairs: Sequence[tuple[bytes, int]]) -> dict:
    """One shard, and the split's entry in dataset_info.json."""
    from array_record.python import array_record_module
    from tensorflow_datasets.proto import tf_example_pb2

    shard = root / f"{name}-{split}.array_record-00000-of-00001"
    writer = array_record_module.ArrayRecordWriter(str(shard), "group_size:1")
    for content, label in pairs:
        example = tf_example_pb2.Example()
        example.features.feature["image"].bytes_list.value.append(content)
        example.features.feature["label"].int64_list.value.append(label)
        writer.write(example.SerializeToString())
    writer.close()
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    return {"filepathTemplate": template, "name": split, "numBytes": "1", "shardLengths": [str(len(pairs))]}
