"""The backend that a program is traced for, which decides between variants with equal results.

A scatter is cheap on a CPU, and costs a pass through memory for every value on a TPU. A program can
be compiled for devices that are not present (`jax.experimental.topologies`), so the devices of its
mesh decide.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import Mesh

from jgc.types import Nodes

_backend: ContextVar[str | None] = ContextVar("jgc_backend", default=None)
_plain: ContextVar[bool | None] = ContextVar("jgc_plain", default=None)


def backend() -> str:
    """ "cpu", "gpu" or "tpu": the mesh's in `jgc.on_nodes`, elsewhere `jax.default_backend()`."""
    return _backend.get() or jax.default_backend()


def backend_of(nodes: Nodes) -> str:
    """The backend of a layout; the default if all nodes are emulated on one device."""
    if not isinstance(nodes.mesh, Mesh):  # an AbstractMesh has no devices
        return jax.default_backend()
    platform = nodes.mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "rocm") else platform


@contextmanager
def traced_for(nodes: Nodes) -> Iterator[None]:
    """Trace the block for the devices of a layout.

    Example:
      >>> with traced_for(Nodes(8, 8)):
      ...     backend()
      'cpu'
    """
    token = _backend.set(backend_of(nodes))
    try:
        yield
    finally:
        _backend.reset(token)


def plain() -> bool:
    """Whether tuned operations run their plain references: in `plain_operations`, or JGC_PLAIN=1.

    A tuned operation asks this while it is traced, before it asks for the `backend`.
    """
    chosen = _plain.get()
    return os.environ.get("JGC_PLAIN", "0") == "1" if chosen is None else chosen


@contextmanager
def plain_operations(use: bool = True) -> Iterator[None]:
    """Trace the block with plain references: short, slow, and right on every device.

    Compiled programs do not change.

    Example:
      >>> with plain_operations():
      ...     plain()
      True
    """
    token = _plain.set(use)
    try:
        yield
    finally:
        _plain.reset(token)
