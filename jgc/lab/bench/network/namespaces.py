"""Hosts on one machine: network namespaces joined by a bridge in a separate namespace, at a given rate.

The namespaces are called `jgc{pid}-{part}`, with the pid of the process that made them. Deleting them deletes cables,
bridge and rates, runs do not collide, and leftovers of a dead run are found by its pid. Segmentation and receive
offloads are off, so that an interface counts the packets that a cable would carry.

Packets wait at the sender's end of each cable, the host's or the bridge's: `tc tbf` on both. Routes name TCP's
congestion control, so that measurements do not depend on the machine's.
"""

import array
import ctypes
import errno
import fcntl
import ipaddress
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from jgc.lab.bench.network import delay as delay_program
from jgc.lab.bench.network.channel import die_with_parent
from jgc.lab.shared.rate import bytes_per_second
from jgc.training.errors import FAILED, UserError

UNLIMITED = "unlimited"
INTERFACE = "eth0"  # of a host
CUBIC = "cubic"  # Linux's default congestion control
MTU = 1500
HEADERS = 14 + 20 + 32  # bytes of a packet: Ethernet, IP, TCP with time stamps
SUBNET = ipaddress.ip_network("10.77.0.0/24")
QUEUE_SECONDS = 0.2  # how long a packet may wait at a full cable before it is dropped
BURST_SECONDS, LEAST_BURST = 0.0005, 32_000  # size of a bucket: half a millisecond's bytes

_SIOCETHTOOL, _CLONE_NEWNET = 0x8946, 0x40000000
_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}  # ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO of linux/ethtool.h
_CHECKSUMS = {"checksums": 0x17}  # ETHTOOL_STXCSUM: a process that forwards packets would forward unfinished ones
_NAME = re.compile(r"^jgc(\d+)-\w+$")


class Network(NamedTuple):
    """Hosts that can reach each other.

    Attributes:
      prefix: of the names of its namespaces.
      hosts: K.
      offloads: which offloads are off, in words.
      folder: of the hosts' /etc/hosts files.
      delay: seconds that the switch keeps every packet.
    """

    prefix: str
    hosts: int
    offloads: str
    folder: Path
    delay: float = 0.0

    def name(self, host: int) -> str:
        """The namespace of a host."""
        return f"{self.prefix}-h{host}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a host. There, this machine's name resolves to the host's address.

        `ip netns exec` gives the process separate mounts, so that it sees a different /etc/hosts.
        """
        script = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
        names = str(self.folder / f"hosts-{host}")
        return ["ip", "netns", "exec", self.name(host), "sh", "-c", script, "sh", names, *argv]


def address(host: int) -> str:
    """The address of a host. Namespaces are isolated, so every network uses the same addresses."""
    return str(SUBNET[host + 1])


def check_rate(rate: str) -> str:
    """The rate in lower case.

    Raises:
      ValueError: it is neither "unlimited" nor written as 100mbit.

    Example:
      >>> check_rate("100Mbit")
      '100mbit'
    """
    rate = rate.strip().lower()
    if rate != UNLIMITED:
        bytes_per_second(rate)
    return rate


def why_not() -> str | None:
    """Why this process cannot make namespaces, in a line; None if it can."""
    if os.geteuid() != 0:
        return "this benchmark needs root: it makes network namespaces and sets their rates"
    missing = [tool for tool in ("ip", "tc", "mount", "sh") if shutil.which(tool) is None]
    if missing:
        return f"this benchmark needs {' and '.join(missing)} (iproute2 has ip and tc)"
    name = f"jgc{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
        _run("tc", "-n", name, "qdisc", "add", "dev", "one", "root", *_bucket("100mbit"))
        _run("ip", "netns", "exec", name, "mount", "--bind", "/etc/hosts", "/etc/hosts")
    except UserError as error:
        return f"this machine does not allow network namespaces with rates: {error}"
    finally:
        _delete(name)
    return None


def _delete(name: str) -> None:
    """Remove a namespace unless it is gone."""
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def remove_leftovers() -> list[str]:
    """Delete the namespaces of runs whose process is gone; return their names."""
    gone = [name for name in _names() if not alive(int(_NAME.match(name)[1]))]  # type: ignore[index]
    for name in gone:
        _delete(name)
    return gone


@contextmanager
def network(hosts: int, folder: Path, delay: float = 0.0, congestion: str = CUBIC) -> Iterator[Network]:
    """Hosts that can reach each other without a rate limit; removed after the block, however it ends.

    Args:
      hosts: K, at least 2.
      folder: for the hosts' /etc/hosts files.
      delay: seconds that the switch keeps every packet, in either direction.
      congestion: TCP's congestion control between hosts, one that this machine has.

    Raises:
      UserError: a tool refused.
    """
    prefix = f"jgc{os.getpid()}"
    try:
        net = _made(prefix, hosts, folder, congestion)
        with _delayed(net, delay) if delay else nullcontext(net) as reachable:
            yield reachable
    finally:
        for name in _names():
            if name.startswith(f"{prefix}-"):
                _delete(name)


def _made(prefix: str, hosts: int, folder: Path, congestion: str) -> Network:
    switch = f"{prefix}-switch"
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    warnings = []
    for host in range(hosts):
        name, port = f"{prefix}-h{host}", f"port{host}"
        _ip("netns", "add", name)
        _without_ipv6(name)
        _ip("-n", name, "link", "add", INTERFACE, "mtu", str(MTU), "address", _card(host), "type", "veth", "peer",
            "name", port, "mtu", str(MTU), "netns", switch)  # fmt: skip
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", name, "route", "replace", str(SUBNET), "dev", INTERFACE, "src", address(host), "congctl", congestion)
        for other in range(hosts):
            if other != host:
                _ip("-n", name, "neigh", "add", address(other), "lladdr", _card(other), "dev", INTERFACE)
        warnings += [offloads_off(name, INTERFACE), offloads_off(switch, port)]
        (folder / f"hosts-{host}").write_text(f"127.0.0.1 localhost\n{address(host)} {socket.gethostname()}\n")
    return Network(prefix, hosts, "; ".join(dict.fromkeys(warnings)), folder)


@contextmanager
def _delayed(net: Network, delay: float) -> Iterator[Network]:
    """The network with a process in the place of its bridge, which keeps every packet for `delay` seconds."""
    switch, ends = f"{net.prefix}-switch", []
    for host in range(net.hosts):
        offloads_off(net.name(host), INTERFACE, _CHECKSUMS)
        _ip("-n", switch, "link", "set", f"port{host}", "nomaster")
        ends += [f"port{host}", _card(host)]
    argv = [sys.executable, delay_program.__file__, str(delay), *ends]
    command = ["ip", "netns", "exec", switch, *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=die_with_parent) as process:
        try:
            if process.stdout.readline() != b"ready\n":  # type: ignore[union-attr]
                raise UserError(f"this machine does not let a process forward packets: {' '.join(argv)}", FAILED)
            yield net._replace(delay=delay)
        finally:
            process.kill()


def _card(host: int) -> str:
    """The hardware address of a host's interface, set beforehand so that no host sends ARP requests."""
    return f"02:00:00:00:00:{host + 1:02x}"


def _without_ipv6(name: str) -> None:
    """Switch IPv6 off: its neighbour announcements would be counted with the run's packets."""
    script = "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6"
    subprocess.run(["ip", "netns", "exec", name, "sh", "-c", script], capture_output=True, check=False)


def set_rate(net: Network, rate: str, least_burst: int = LEAST_BURST) -> None:
    """Give every host's cable a rate in both directions, or none.

    Args:
      net: the network.
      rate: such as "100mbit", or "unlimited".
      least_burst: bytes that a cable passes on at once, at least; they are free of the rate.
    """
    ends = [(net.name(host), INTERFACE) for host in range(net.hosts)]
    ends += [(f"{net.prefix}-switch", f"port{host}") for host in range(net.hosts)]
    for name, device in ends:
        subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
        if rate != UNLIMITED:
            _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *_bucket(rate, least_burst))


def _bucket(rate: str, least_burst: int = LEAST_BURST) -> list[str]:
    """A token bucket filter for `tc`.

    Example:
      >>> " ".join(_bucket("1gbit"))
      'tbf rate 1000000000bit burst 62500 limit 25000000'
    """
    speed = bytes_per_second(rate)
    burst, limit = max(least_burst, int(BURST_SECONDS * speed)), max(1_000_000, int(QUEUE_SECONDS * speed))
    return ["tbf", "rate", f"{round(8 * speed)}bit", "burst", str(burst), "limit", str(limit)]


def offloads_off(name: str, device: str, features: dict[str, int] = _OFFLOADS) -> str:
    """Switch segmentation and receive offloads of an interface off; return in words which are off.

    Uses `ioctl` from inside the namespace, so that ethtool need not be installed.
    """
    with inside(name):
        refused = [feature for feature, command in features.items() if not _ethtool(device, command, 0)]
    done = [feature for feature in features if feature not in refused]
    return f"{', '.join(done)} off" + (f" ({', '.join(refused)} could not be switched off)" if refused else "")


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Put this thread into a namespace. Sockets that it opens there stay there."""
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{name}") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(here.fileno())


def _enter(namespace: int) -> None:
    """`os.setns`, which Python 3.11 does not have."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ethtool(device: str, command: int, value: int) -> bool:
    request = array.array("B", struct.pack("II", command, value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP", device.encode(), request.buffer_info()[0]))
        except OSError:
            return False
    return True


def _names() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [name for name in (line.split()[0] for line in listed.splitlines() if line.split()) if _NAME.match(name)]


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}", FAILED)
