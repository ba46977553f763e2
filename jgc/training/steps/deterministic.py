"""`--deterministic`: flags of XLA for GPU that give a step the same bits in every call and every compilation.

XLA reads XLA_FLAGS when JAX starts, so they are set before. XLA for TPU ends the process at unknown flags: they are set
only where JAX would use a GPU.
"""

import os
from collections.abc import MutableMapping
from importlib.metadata import entry_points
from importlib.util import find_spec

FLAGS = {
    "--xla_gpu_deterministic_ops": "true",  # no atomics in scatters, convolutions and products
    "--xla_gpu_autotune_level": "0",  # else XLA takes the kernel that was the fastest while it compiled
}
GPUS = ("cuda", "rocm", "gpu")


def set_flags(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add the flags to XLA_FLAGS where JAX would take a GPU. Flags that the user has set stay."""
    if takes_gpu(environment.get("JAX_PLATFORMS", "")):
        environment["XLA_FLAGS"] = with_flags(environment.get("XLA_FLAGS", ""))


def takes_gpu(platforms: str) -> bool:
    """Whether JAX would look for a GPU, before it starts: by $JAX_PLATFORMS, or if that is empty by its plugins.

    Example:
      >>> takes_gpu("cpu"), takes_gpu("cuda,cpu")
      (False, True)
    """
    if not platforms and find_spec("libtpu"):  # JAX would look for a TPU first: the user may set the flags
        return False
    names = platforms.lower() or " ".join(plugin.name for plugin in entry_points(group="jax_plugins"))
    return any(gpu in names for gpu in GPUS)


def with_flags(given: str) -> str:
    """XLA_FLAGS and the missing ones of `FLAGS`.

    Example:
      >>> with_flags("--xla_gpu_autotune_level=1 --xla_dump_to=x")
      '--xla_gpu_autotune_level=1 --xla_dump_to=x --xla_gpu_deterministic_ops=true'
    """
    names = {word.partition("=")[0] for word in given.split()}
    return " ".join([*given.split(), *(f"{name}={value}" for name, value in FLAGS.items() if name not in names)])


def note(deterministic: bool, resume: bool, backend: str, given: str) -> str:
    """A line on a run's reproducibility, or ""; `given` is XLA_FLAGS, as it was when JAX started."""
    if deterministic and backend != "gpu":
        return f"note: --deterministic does nothing on {backend.upper()}: it sets flags for GPUs"
    missing = [f"{name}={value}" for name, value in FLAGS.items() if f"{name}={value}" not in given.split()]
    if deterministic and missing:
        return f"note: --deterministic needs {' '.join(missing)} in XLA_FLAGS before JAX starts"
    if resume and not deterministic and backend == "gpu":
        return ("note: on a GPU this run rounds differently than without the stop, unless it began with "
                "--deterministic (docs/train.md)")  # fmt: skip
    return ""
