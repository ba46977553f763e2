"""Index of this process, number of processes and coordinator: from the settings, or detected by JAX."""

import os
from typing import NamedTuple

from jgc.training.errors import UserError
from jgc.training.settings.config import DistributedConfig


class Place(NamedTuple):
    """The coordinator's address, the number of processes, this one's index and its devices (None: all)."""

    host: str
    port: int
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None


def place_of(settings: DistributedConfig) -> Place | None:
    """This process's place, from the settings or detected by JAX; None in a run of one process."""
    options = {"coordinator HOST:PORT": settings.coordinator != "", "num-processes N": settings.num_processes != 0,
               "process-id I": settings.process_id != -1}  # fmt: skip
    if settings.auto:
        if any(options.values()):
            names = " and ".join(f"--distributed.{name}" for name, is_given in options.items() if is_given)
            raise UserError(f"--distributed.auto detects {names}: leave out one of them")
        return _detected(settings)
    if not any(options.values()):
        return None
    for name, is_given in options.items():
        if not is_given:
            raise UserError(f"--distributed.{name} is missing: a run of several processes needs all three")
    host, port = _address(settings.coordinator)
    if settings.num_processes < 1:
        raise UserError(f"--distributed.num-processes must be at least 1, got {settings.num_processes}")
    if not 0 <= settings.process_id < settings.num_processes:
        last = settings.num_processes - 1
        raise UserError(f"--distributed.process-id must be from 0 to {last}, got {settings.process_id}")
    return Place(host, port, settings.num_processes, settings.process_id)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--distributed.coordinator must be HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def _detected(settings: DistributedConfig) -> Place:
    from jax._src.clusters import ClusterEnv  # jax.distributed.initialize() without arguments uses it

    try:
        unset = (None,) * 5
        place = ClusterEnv.auto_detect_unset_distributed_params(*unset, int(settings.connect_timeout))
    except Exception as error:
        raise UserError(f"--distributed.auto: JAX cannot tell how the processes were started: {error}") from error
    address, processes, process, devices = place
    if address is None or processes is None or process is None:
        raise UserError(
            "--distributed.auto: JAX finds none of Slurm, Kubernetes, Cloud TPU and Open MPI here; give "
            "--distributed.coordinator, --distributed.num-processes and --distributed.process-id"
        )
    # jax.distributed.initialize() reads JAX_LOCAL_DEVICE_IDS
    local = None if devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ else tuple(devices)
    return Place(*_address(address), processes, process, local)
