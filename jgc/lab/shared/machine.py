"""The machine of a measurement, in one line."""

import os
import platform

import flax
import jax
import jaxlib
import optax


def describe() -> str:
    """Devices, cores and versions.

    Example:
      >>> "jax" in describe()
      True
    """
    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    return f"{kind}, {os.cpu_count()} CPU cores; {versions}, flax {flax.__version__}, optax {optax.__version__}"
