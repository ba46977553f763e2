"""LGC's autoencoder with few filters: what a test compiles and runs takes a fraction of the time."""

import flax.linen as nn
import jax.numpy as jnp
import pytest

from jgc.compress.lgc import autoencoder as ae


class Encoder(nn.Module):
    """Table I with 4 filters a layer: f32[..., m, 1] -> code f32[..., m / 16, 4]."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.leaky_relu(nn.Conv(4, (3,), strides=(2,))(x))
        return nn.Conv(ae.CHANNELS, (1,))(x)


class Decoder(nn.Module):
    """Table II with 4 filters a layer: code f32[..., m / 16, 4] -> f32[..., m, 1]."""

    linear: bool = False

    @nn.compact
    def __call__(self, code, innovation=None):
        x = code
        for stride in (1, 2, 2, 2, 2):
            x = nn.ConvTranspose(4, (3,), strides=(stride,))(x)
            x = x if self.linear else nn.leaky_relu(x)
        return nn.Conv(1, (1,))(x if innovation is None else jnp.concatenate([x, innovation], axis=-1))


@pytest.fixture(scope="module")
def narrow_autoencoder():
    """Every autoencoder of the module's tests is narrow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ae, "Encoder", Encoder)
        patch.setattr(ae, "Decoder", Decoder)
        yield
