"""A small CamVid of made-up scenes, in the files of the SegNet tutorial."""

from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 48, 36
COUNTS = {"train": 10, "val": 3, "test": 5}
PREFIX = "/SegNet/CamVid"  # of the paths in the tutorial's lists
NONE = 11  # in the files, for no label


def scene(number: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8[h, w, 3] and uint8[h, w]: sky, building and road above each other, a car, and an edge without labels."""
    rng = np.random.default_rng(number)
    labels = np.zeros((HEIGHT, WIDTH), np.uint8)
    top, bottom = rng.integers(6, 12), rng.integers(20, 28)
    labels[top:bottom], labels[bottom:] = 1, 3
    x = rng.integers(4, WIDTH - 16)
    labels[bottom - 4 : bottom + 4, x : x + 12] = 8
    colours = np.zeros((12, 3)) + [[200, 210, 250]]
    colours[[1, 3, 8]] = [[150, 80, 60], [90, 90, 95], [30, 30, 160]]
    image = np.clip(colours[labels] + rng.normal(0, 8, (HEIGHT, WIDTH, 3)), 0, 255).astype(np.uint8)
    labels[:, -3:] = NONE
    return image, labels


def number_of(split: str, i: int) -> int:
    """Which scene is the i-th of a part."""
    return 100 * list(COUNTS).index(split) + i


def paths(folder: Path, split: str, i: int) -> tuple[Path, Path]:
    """Of a scene's image and labels."""
    return folder / split / f"{split}_{i:02d}.png", folder / f"{split}annot" / f"{split}_{i:02d}.png"


def write_camvid(data_dir: Path, name: str = "camvid") -> Path:
    """The data set in `data_dir`/`name`, which is returned."""
    folder = data_dir / name
    for split, count in COUNTS.items():
        lines = []
        for i in range(count):
            files = paths(folder, split, i)
            for file, pixels in zip(files, scene(number_of(split, i)), strict=True):
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
            lines.append(" ".join(f"{PREFIX}/{file.parent.name}/{file.name}" for file in files))
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder
