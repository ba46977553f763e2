"""A model small enough to compile in a moment, configs for it, and a full disk."""

import dataclasses
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import flax.linen as nn

from jgc import compress
from jgc.training.models import Model
from jgc.training.settings.config import Config, resolve

SHORT = {"warmup_steps": 2, "autoencoder_steps": 2, "alpha": 0.05}


class Wide(nn.Module):
    """Two dense layers of 150,010 values, which take no time to compile."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(2000, name="first")(x.reshape(len(x), -1)))
        return nn.Dense(self.classes, name="head")(x)


def wide_model(name, num_classes, **settings):
    """In place of `jgc.training.models.make_model`, where shares of a layer are to be counted."""
    return Model(Wide(num_classes), r"^first/bias", r"^head/")


def tiny_config(run_dir: Path | str | None = None, method=None, **changes) -> Config:
    """A resolved config of a few steps on the digits."""
    method = compress.LgcPs(**SHORT) if method is None else method
    settings = {
        "nodes": 2,
        "batch_size": 16,
        "steps": 6,
        "checkpoint_every": 2,
        "evaluate_every": 0,
        "diagnose_every": 1,
    }
    config = resolve(Config(compressor=method))
    return dataclasses.replace(config, run_dir=None if run_dir is None else str(run_dir), **{**settings, **changes})


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes: a full disk that needs no root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
