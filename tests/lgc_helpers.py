"""One small problem for the tests of `lgc_ps`: three layers, four nodes, the leader's positions."""

import functools

import jax
import jax.numpy as jnp

import jgc

K = 4
PARAMS = {"a": jnp.zeros((10, 16)), "b": jnp.zeros((8, 10)), "bias": jnp.zeros(10)}  # 160 + 80 + 10 values
SHORT = {"warmup_steps": 1, "autoencoder_steps": 1, "momentum_correction": False, "alpha": 0.1, "innovation": 0.2,
         "autoencoder_optimizer": "sgd", "positions": "leader"}  # fmt: skip
NO_CODE = {"code_dtype": "none", "autoencoder_optimizer": "adam"}  # an autoencoder that is not there has the defaults
MU, LAYERS = 16 + 8 + 1, 3  # selected at alpha = 0.1; the autoencoder sees them padded to 32


@functools.cache
def nodes_of(layout: str = "emulated"):
    return jgc.make_nodes(K, jax.devices()[: {"emulated": 1, "two per device": K // 2}.get(layout, K)])
