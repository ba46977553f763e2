"""A model small enough to compile in a moment, and configs for it."""

import contextlib
import dataclasses
import resource
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jgc import compress
from jgc.training.config import Config, resolve
from jgc.training.models import Model, WithAuxiliary, gpt, lstm
from jgc.training.models.pspnet import stretched

SHORT = {"warmup_steps": 2, "autoencoder_steps": 2, "alpha": 0.05}


class Tiny(nn.Module):
    """Two dense layers and a batch norm."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16, name="first")(x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.Dense(16, name="middle")(nn.relu(x))
        return nn.Dense(self.classes, name="head")(nn.relu(x)).astype(jnp.float32)


class Wide(nn.Module):
    """Two dense layers of 150,010 values, which take no time to compile."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(2000, name="first")(x.reshape(len(x), -1)))
        return nn.Dense(self.classes, name="head")(x)


class TinyConv(nn.Module):
    """A convolution and a dense layer."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(4, (3, 3), strides=4, name="conv")(x))
        return nn.Dense(self.classes, name="head")(x.reshape(len(x), -1)).astype(jnp.float32)


class TinyScenes(nn.Module):
    """A convolution with a batch norm, and two heads for every pixel."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        size = x.shape[1:3]
        x = nn.Conv(8, (4, 4), strides=4, name="conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="norm")(x))
        heads = (nn.Conv(self.classes, (1, 1), name=name)(x) for name in ("head", "other"))
        logits, auxiliary = (stretched(x, *size) for x in heads)
        return WithAuxiliary(logits, auxiliary) if train else logits


def wide_model(name, num_classes, **settings):
    """In place of `jgc.training.models.make_model`, where shares of a layer are to be counted."""
    return Model(Wide(num_classes), r"^first/bias", r"^head/")


def tiny_conv_model(name, num_classes, **settings):
    """In place of `jgc.training.models.make_model`, where a method needs a convolution."""
    return Model(TinyConv(num_classes), r"^conv/", r"^head/")


def tiny_model(name, num_classes, **settings):
    """In place of `jgc.training.models.make_model`."""
    if name == "lstm":
        return lstm(num_classes, units=8, **settings)
    if name.startswith("gpt"):
        return gpt(num_classes, units=16, layers=1, heads=2, **settings)
    if name.startswith("pspnet"):
        return Model(TinyScenes(num_classes), r"^conv/", r"^head/", "scenes")
    return Model(Tiny(num_classes), r"^first/", r"^head/")


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


def with_flipped_bit(x, device, bit):
    """An array of which the copy on one device has one bit flipped."""
    shards = []
    for shard in x.addressable_shards:
        data = shard.data
        if shard.device == device:
            host = np.array(data)
            octets = host.reshape(-1).view(np.uint8)
            octets[bit // 8 % octets.size] ^= 1 << bit % 8
            data = jax.device_put(host, device)
        shards.append(data)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@contextlib.contextmanager
def small_files(size: int):
    """No file of this process can grow beyond `size` bytes: a full disk that needs no root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
