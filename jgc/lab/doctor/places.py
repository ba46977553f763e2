"""The devices, run folder, data, free disk and descriptors of each process."""

import contextlib
import os
import resource
import shutil
import socket
import uuid
from pathlib import Path

import jax

from jgc.training.data import MissingDataError
from jgc.training.errors import cannot_write
from jgc.training.processes.distributed import OWN_NAME, TOKEN, Team
from jgc.training.run.setup import data_of
from jgc.training.settings.config import Config

FREE = 10**9  # bytes on the run folder's disk
DESCRIPTORS = 512  # of a process: 64 strangers may wait at the coordinator's port, and files and libraries need some

Words = tuple[str, str]  # the error, or ""; and the finding


def devices(team: Team) -> Words:
    """Rank, host and devices of this process."""
    kinds = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
    text = f"{jax.local_device_count()} x {kinds} of {jax.device_count()} in all, on {socket.gethostname()}"
    return "", f"process {team.process} of {team.count} has {text}"


def data(config: Config) -> Words:
    """The data set of this process: sizes and checksum of its labels."""
    try:
        return "", data_of(config).facts
    except (MissingDataError, ValueError, OSError) as error:
        return str(error), ""


def descriptors() -> Words:
    """The number of files and connections that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} of a process"
    return ("" if soft >= DESCRIPTORS else f"{text}, should be at least {DESCRIPTORS} (ulimit -n)"), text


def run_folder(folder: Path, team: Team) -> Words:
    """Whether this process's run folder holds what process 0 has just written into its run folder.

    Process 0 creates a folder that is not there, and removes it again. All processes must call it.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    told = team.lead(lambda: _write(folder))
    wrong, text = told["wrong"], ""
    if not wrong:
        probe = folder / told["name"]
        try:
            if probe.read_text() != told["name"]:
                wrong = f"{probe} has other contents than process 0 wrote"
        except OSError as error:
            wrong = f"{folder} is not the folder of process 0, or not on a shared file system: {error.strerror}"
        if not wrong:
            free = shutil.disk_usage(folder).free
            text = f"{folder}: {free / 1e9:,.1f} GB free"
            wrong = "" if free >= FREE else f"{text}, should be at least {FREE / 1e9:.0f} GB"
    team.wait()
    if team.leads:
        for remove in ((folder / told["name"]).unlink, *(path.rmdir for path in new)):  # the deepest first
            with contextlib.suppress(OSError):
                remove()
    return wrong, text


def _write(folder: Path) -> dict[str, str]:
    name = f".doctor-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        return {"name": name, "wrong": ""}
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
        return {"name": name, "wrong": str(cannot_write(folder, error))}


def address(team: Team) -> Words:
    """Whether other hosts can reach the address of this host's name, where Gloo listens. All must call it."""
    name = socket.gethostname()
    hosts = {name} if team.meeting is None else set(team.meeting.gather("doctor hosts", name))
    try:
        ip = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return f"{name} cannot resolve its name: {OWN_NAME}", ""
    lost = len(hosts) > 1 and jax.default_backend() == "cpu" and (ip.startswith("127.") or ip == "::1")
    return f"{name} stands for {ip} on that host: {OWN_NAME}" if lost else "", f"{name} is {ip}"


def token() -> Words:
    """Whether strangers can join."""
    if os.environ.get(TOKEN):
        return "", f"{TOKEN} is set"
    return "", f"{TOKEN} is not set: whoever reaches the coordinator's port can pose as a process"
