"""A switch that keeps every packet for a while: its kernel has no `netem`, or this would be one line of `tc`.

    python delay.py SECONDS PORT CARD [PORT CARD ...]

Runs in the switch's namespace, whose ports it takes packets from and gives them to; CARD is the
hardware address of the host behind a port. Prints a line when it is ready. Imports only the
standard library, so that it starts fast.
"""

import asyncio
import contextlib
import socket
import sys

ALL_PROTOCOLS = 0x0003
LARGEST = 65_535  # bytes of a packet
BUFFER = 2**22  # bytes that may wait until this process reads them


def opened(port: str) -> socket.socket:
    """A socket for all packets of a port."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    sock.bind((port, ALL_PROTOCOLS))
    sock.setblocking(False)
    return sock


def take(loop: asyncio.AbstractEventLoop, sock: socket.socket, ports: dict[bytes, socket.socket], delay: float) -> None:
    """Read all packets of a port, and send each to the port of its receiver after the delay."""
    with contextlib.suppress(BlockingIOError):
        while True:
            packet, about = sock.recvfrom(LARGEST)
            if about[2] != socket.PACKET_OUTGOING and packet[:6] in ports:
                loop.call_later(delay, give, ports[packet[:6]], packet)


def give(sock: socket.socket, packet: bytes) -> None:
    """Send a packet. A full queue drops it, as a switch's does."""
    with contextlib.suppress(OSError):
        sock.send(packet)


def main(delay: str, *ports: str) -> None:
    """Delay packets between two network interfaces."""
    by_card = {bytes.fromhex(card.replace(":", "")): opened(port)
               for port, card in zip(ports[::2], ports[1::2], strict=True)}  # fmt: skip
    loop = asyncio.new_event_loop()
    for sock in by_card.values():
        loop.add_reader(sock, take, loop, sock, by_card, float(delay))
    print("ready", flush=True)
    loop.run_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
