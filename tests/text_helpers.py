"""A small text of made-up words, in the files that Penn Treebank comes in."""

from pathlib import Path

import numpy as np

WORDS = tuple("abcdefgh")
SIZES = {"train": 600, "valid": 130, "test": 90}  # words, ends of sentences not counted


def write_text(data_dir: Path, sizes: dict[str, int] = SIZES) -> Path:
    """Three files in `data_dir`/ptb, sentences in which the next letter of the alphabet mostly follows. Returns it."""
    rng = np.random.default_rng(0)
    folder = data_dir / "ptb"
    folder.mkdir(parents=True)
    for split, size in sizes.items():
        steps = np.where(rng.random(size) < 0.9, 1, rng.integers(0, len(WORDS), size))
        words = np.array(WORDS)[np.cumsum(steps) % len(WORDS)]
        ends = np.flatnonzero(rng.random(size) < 0.1)
        lines = (" ".join(line) for line in np.split(words, ends[ends > 0]))
        (folder / f"ptb.{split}.txt").write_text("".join(f" {line} \n" for line in lines))
    return data_dir
