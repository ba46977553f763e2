"""Networks that compile in a moment, a quick XLA, and flipped bits."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jgc.checks.misuse import leaves_by_path
from jgc.training.models import Model
from jgc.types import Array, PyTree

# XLA's older code generator compiles in 40 % of the time. Later versions have only the newer one.
HAS_OLDER_GENERATOR = jax.__version_info__ < (0, 11)

# The same HLO but for fusions; slower code.
XLA_FLAGS = {
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_parallel_codegen_split_count": "1",  # not a module in 32 parts, each with a copy of all
}
if HAS_OLDER_GENERATOR:
    XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"

FILTERS = (4, 8, 8, 4), (4, 4, 8, 8, 4)  # of LGC's encoder and decoder: with the paper's, one phase trains for 50 s


def narrow() -> None:
    """Make LGC's autoencoder narrow."""
    from jgc.compress.lgc import autoencoder

    autoencoder.ENCODER_FILTERS, autoencoder.DECODER_FILTERS = FILTERS


class Tiny(nn.Module):
    """Two dense layers and a batch norm."""

    classes: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Logits."""
        x = nn.Dense(16, name="first")(x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.Dense(16, name="middle")(nn.relu(x))
        return nn.Dense(self.classes, name="head")(nn.relu(x)).astype(jnp.float32)


class TinyConv(nn.Module):
    """A convolution and a dense layer."""

    classes: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Logits."""
        x = nn.relu(nn.Conv(4, (3, 3), strides=4, name="conv")(x))
        return nn.Dense(self.classes, name="head")(x.reshape(len(x), -1)).astype(jnp.float32)


def tiny_conv_model(name: str, num_classes: int, **settings: Any) -> Model:
    """Instead of `jgc.training.models.make_model`, where a method needs a convolution."""
    return Model(TinyConv(num_classes), r"^conv/", r"^head/")


def tiny_model(name: str, num_classes: int, **settings: Any) -> Model:
    """Instead of `jgc.training.models.make_model`."""
    return Model(Tiny(num_classes), r"^first/", r"^head/")


def with_flipped_bit(x: Array, device: jax.Device, bit: int) -> Array:
    """An array whose copy on one device has one bit flipped."""
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


def flipped(state: PyTree, name: str, device: jax.Device, bit: int) -> PyTree:
    """A train state with a bit flipped in one device's copy of the array of that name, such as params.head.kernel."""
    arrays = leaves_by_path(state, ".")
    arrays[name] = with_flipped_bit(arrays[name], device, bit)
    return jax.tree.unflatten(jax.tree.structure(state), arrays.values())
