"""What is between the nodes of a cell: namespaces with a rate each, and a server behind a delay."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.rounds.cells import BUCKET, Cell
from jgc.lab.bench.network.namespaces import Network, address, inside, network
from jgc.lab.shared.seaweed import BUCKET as NAME, Seaweed

PORT = 8333  # of the server, as the nodes see it
CHUNK = 1 << 16
MOST_WAITING = 64  # chunks of a connection
# A cable's bucket is two packets. With the 32 kB of bench network, messages of SparseLoCo would be
# free of the rate.
LEAST_BURST = 2 * 1514


class Relay:
    """Passes connections on to a port of 127.0.0.1; what a client sends arrives later.

    A request is late by the delay, whatever its size, and the rate is not changed. An answer is not
    late. A context manager.

    Args:
      listening: a socket that listens, in any namespace.
      target: the port.
      delay: seconds.
    """

    def __init__(self, listening: socket.socket, target: int, delay: float):
        self.listening, self.target, self.delay = listening, target, delay
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.listening.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        start = asyncio.start_server(self._serve, sock=self.listening)
        self.loop.run_until_complete(start)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0.1))
        self.loop.close()

    async def _serve(self, reader: Any, writer: Any) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self.target)
        with contextlib.suppress(asyncio.CancelledError):  # the relay ends; Python 3.11 would log it
            await asyncio.gather(
                passed_on(reader, requests, self.delay), passed_on(answers, writer, 0.0)
            )
        requests.close()
        writer.close()


async def passed_on(reader: Any, writer: Any, delay: float) -> None:
    """Write what a reader gets, each part after the delay, until its end."""
    loop, parts = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](MOST_WAITING)

    async def read() -> None:
        data = b"-"
        with contextlib.suppress(OSError):
            while data:
                data = await reader.read(CHUNK)
                await parts.put((loop.time() + delay, data))
        if data:  # the connection broke
            await parts.put((loop.time(), b""))

    reading = asyncio.ensure_future(read())
    with contextlib.suppress(OSError):
        while True:
            due, data = await parts.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.write_eof()
                break
            writer.write(data)
            await writer.drain()
    reading.cancel()


@contextmanager
def links(cell: Cell, scratch: Path, folder: Path) -> Iterator[tuple[Network, dict[str, Any]]]:
    """The hosts of a cell's nodes, without a rate yet, and how a node opens the bucket.

    Args:
      cell: with a bucket, the server's host has no rate. Otherwise half of the delay is that of
        every packet in either direction.
      scratch: for logs and compiled programs of all cells.
      folder: an empty one, for the server's data.
    """
    delay = cell.delay_ms / 1000
    if cell.via != BUCKET:
        with network(cell.nodes, scratch, delay / 2) as net:
            yield net, {}
        return
    with network(cell.nodes + 1, scratch) as net, Seaweed(folder) as server:
        host = address(cell.nodes)
        with inside(net.name(cell.nodes)):
            listening = socket.create_server((host, PORT), backlog=64)
        environment = server.environment()
        store = {
            "endpoint": f"http://{host}:{PORT}", "region": environment["AWS_REGION"],
            "access_key_id": environment["AWS_ACCESS_KEY_ID"],
            "secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        }  # fmt: skip
        with Relay(listening, server.port, delay):
            yield net._replace(hosts=cell.nodes), {"url": f"s3://{NAME}/run", "store": store}
