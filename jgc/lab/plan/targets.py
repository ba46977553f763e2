"""Machines that are not here: hosts of H100 GPUs and TPU slices, by the names that `jgc plan --target` takes.

XLA's compilers for them come from PyPI and need neither driver nor device: libtpu, and JAX's plugin for CUDA.
Devices made here can be compiled for (`jax.jit(f).lower(...).compile()`), and nothing can run on them.
"""

import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

import jgc
from jgc.nodes.layouts import from_mesh, make_nodes
from jgc.training.errors import UserError
from jgc.types import Nodes

SLOW, FAST = "slow", "fast"  # mesh axes: between hosts or slices, and inside one
GPU, TPU = "gpu", "tpu"
DESCRIPTION = Path(__file__).with_name("h100.txtpb")  # of one H100, as its driver would give it


class Chip(NamedTuple):
    """A kind of chip.

    Attributes:
      kind: GPU or TPU.
      group: what its devices are joined by a fast link in.
      grid: dimensions of a group.
      examples: of targets.
    """

    kind: str
    group: str
    grid: int
    examples: tuple[str, ...]


CHIPS = {
    "h100": Chip(GPU, "host", 1, ("h100:8", "h100:4x8")),
    "v5e": Chip(TPU, "slice", 2, ("v5e:2x4", "v5e:16x16", "v5e:2x4x2slices")),
    "v5p": Chip(TPU, "slice", 3, ("v5p:2x2x1", "v5p:4x4x4")),
    "v6e": Chip(TPU, "slice", 2, ("v6e:2x4", "v6e:16x16")),
}


class Target(NamedTuple):
    """Devices that programs are compiled for.

    Attributes:
      name: as the user wrote it.
      chip: of every device.
      groups: hosts or slices; between them the link is slow.
      devices: group after group.
    """

    name: str
    chip: Chip
    groups: int
    devices: tuple[Any, ...]

    @property
    def per_group(self) -> int:
        """Devices of a host or slice."""
        return len(self.devices) // self.groups

    @property
    def slow_link(self) -> str:
        """The ends of the slow link, in words."""
        return f"between {self.chip.group}s"

    def nodes(self) -> Nodes:
        """One node on each device; of several hosts or slices, one node on each of these."""
        if self.groups == 1:
            return make_nodes(len(self.devices), self.devices)
        grid = np.array(self.devices).reshape(self.groups, self.per_group)
        return from_mesh(Mesh(grid, (SLOW, FAST), axis_types=(AxisType.Auto,) * 2), SLOW, FAST)


class Spec(NamedTuple):
    """A target's name, taken apart: the chip, the grid of a group, and how many groups."""

    chip: str
    grid: tuple[int, ...]
    groups: int


def known() -> str:
    """Examples of every kind of target."""
    return ", ".join(name for chip in CHIPS.values() for name in chip.examples)


def spec_of(name: str) -> Spec:
    """Take a target's name apart.

    Raises:
      UserError: an unknown chip, or a form that its targets do not have.

    Example:
      >>> spec_of("h100:4x8"), spec_of("v5e:2x4x2slices")
      (Spec(chip='h100', grid=(8,), groups=4), Spec(chip='v5e', grid=(2, 4), groups=2))
    """
    form = re.fullmatch(r"(\w+):(\d+(?:x\d+)*?)(?:x(\d+)slices)?", name)
    chip = CHIPS.get(form[1]) if form else None
    if form is None or chip is None:
        raise UserError(f"unknown target {name!r}: known are {known()}, and the like")
    grid, groups = [int(size) for size in form[2].split("x")], int(form[3] or 1)
    if chip.kind == GPU and form[3] is None and len(grid) == chip.grid + 1:
        groups, *grid = grid
    if (chip.kind == GPU and form[3]) or len(grid) != chip.grid or 0 in (*grid, groups):
        raise UserError(f"unknown target {name!r}: {form[1]} has {', '.join(chip.examples)}, and the like")
    return Spec(form[1], tuple(grid), groups)


def target_of(name: str) -> Target:
    """The devices of a target.

    Raises:
      UserError: an unknown target, a compiler that is not installed, or a topology that the compiler refuses.
    """
    spec = spec_of(name)
    chip = CHIPS[spec.chip]
    check_installed(name, chip.kind)
    try:
        devices = _gpus(spec) if chip.kind == GPU else _tpus(spec)
    except Exception as error:  # errors of the compiler: XlaRuntimeError, NotImplementedError, ...
        reason = " ".join(str(error).split())
        raise UserError(f"the compiler refuses the target {name!r}: {reason[:300]}") from error
    if len(devices) != spec.groups * math.prod(spec.grid):
        raise UserError(f"the compiler refuses the target {name!r}: it makes {len(devices)} devices of it")
    return Target(name, chip, spec.groups, tuple(devices))


def _gpus(spec: Spec) -> list[Any]:
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=DESCRIPTION.read_text(), topology=f"1x{spec.groups}x{spec.grid[0]}"
    )
    return list(topology.devices)


def _tpus(spec: Spec) -> list[Any]:
    slices: Mapping[str, int] = {"num_slices": spec.groups} if spec.groups > 1 else {}
    name = f"{spec.chip}:{'x'.join(map(str, spec.grid))}"
    with _without_xla_flags():
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **slices).devices
        _compile_something(devices[0])
    return sorted(devices, key=lambda device: device.slice_index) if slices else list(devices)


@contextmanager
def _without_xla_flags() -> Iterator[None]:
    """libtpu reads XLA_FLAGS when it compiles first, and ends the process at flags of a different compiler."""
    jax.devices()  # JAX's compiler reads them now
    flags = os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        os.environ |= {} if flags is None else {"XLA_FLAGS": flags}


@cache
def _compile_something(device: Any) -> None:
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=SingleDeviceSharding(device))
    compiled_for(jax.jit(lambda x: x + 1).lower(shape))


def compiled_for(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """A compiled program for devices that are not here, which JAX's cache of compiled programs cannot read back.

    `options`: XLA's, as `jax.stages.Lowered.compile` takes them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
        return lowered.compile(None if options is None else dict(options))


# --- the compilers ------------------------------------------------------------------------------------------------

PACKAGES = {
    TPU: {"libtpu": "libtpu"},
    GPU: {
        "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
        "jax_cuda12_plugin": "jax-cuda12-plugin",
        "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
    },
}
"""The package of each module that a compiler consists of."""


def missing_packages(kind: str) -> list[str]:
    """The packages that the compiler for a kind of devices still needs."""
    return [package for module, package in PACKAGES[kind].items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def versions(targets: Sequence[Target]) -> dict[str, str]:
    """Versions of jgc, JAX and the compilers' packages."""
    names = {"jgc": jgc.__version__, "jax": jax.__version__}
    for package in dict.fromkeys(name for target in targets for name in PACKAGES[target.chip.kind].values()):
        try:
            names[package] = version(package)
        except PackageNotFoundError:  # not installed by pip
            names[package] = "unknown"
    return names


def check_installed(name: str, kind: str) -> None:
    """Raise UserError, with the command that installs it, unless the compiler for a kind of devices is installed."""
    missing = missing_packages(kind)
    if not missing:
        return
    if kind == TPU:
        install = "pip install 'jgc[targets]', or in a clone of jgc: pip install -e '.[targets]'"
    else:  # not an extra: what these packages depend on, 2 GB of CUDA, is not needed for compiling
        pins = {"jax-cuda12-pjrt": f"=={jax.__version__}", "jax-cuda12-plugin": f"=={jax.__version__}"}
        install = f"pip install --no-deps {' '.join(p + pins.get(p, '') for p in PACKAGES[GPU].values())}"
    raise UserError(f"the target {name!r} needs {', '.join(missing)}: {install}")


def stay_on_cpu() -> None:
    """Keep JAX from looking for the devices of the compilers' packages. Call it before JAX starts."""
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes may compile together
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks a cloud's metadata server for minutes
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
