"""A bucket that writes down its requests, and the serial latencies that follow from them."""

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jgc.rounds.bucket import PARALLEL, Bucket, Counts

T = TypeVar("T")
BACKGROUND = "jgc-rounds-checkpoint"
_MESSAGE = re.compile(r"rounds/(\d{8})/[^/]*\.msg")


class Request(NamedTuple):
    """A request of a node's exchanges.

    Attributes:
      round: of the node's newest message.
      sends: whether it is that message.
      latencies: requests in series: more than 16 objects do not go in parallel.
      began, ended: seconds of the monotonic clock.
    """

    round: int
    sends: bool
    latencies: int
    began: float
    ended: float


class TracedBucket:
    """See `jgc.rounds.bucket.Bucket`. Requests of the thread that writes checkpoints are left out.

    Attributes:
      requests: in order.
    """

    def __init__(self, bucket: Bucket):
        self.bucket, self.requests = bucket, list[Request]()
        self._round = -1

    @property
    def counts(self) -> Counts:
        """Of all requests."""
        return self.bucket.counts

    def create(self, name: str, data: bytes) -> bool:
        """See `Bucket`."""
        match = _MESSAGE.fullmatch(name)
        if match:
            self._round = int(match[1])
        return self._traced(lambda: self.bucket.create(name, data), 1, bool(match))

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See `Bucket`."""
        return self._traced(lambda: self.bucket.get(names), -(-len(names) // PARALLEL))

    def list(self, folder: str, after: str = "") -> dict[str, int]:
        """See `Bucket`."""
        return self._traced(lambda: self.bucket.list(folder, after), 1)

    def delete(self, names: Iterable[str]) -> None:
        """See `Bucket`."""
        self.bucket.delete(names)

    def _traced(self, work: Callable[[], T], latencies: int, sends: bool = False) -> T:
        began = time.monotonic()
        try:
            return work()
        finally:
            if not threading.current_thread().name.startswith(BACKGROUND):
                line = Request(self._round, sends, latencies, began, time.monotonic())
                self.requests.append(line)


def serial_latencies(of_nodes: Mapping[str, Sequence[Any]]) -> dict[int, dict[str, int]]:
    """Requests in series that each node needed to close a round, by round and node.

    The last message is one of them; of the others those count that ended after it had come. Before
    that a node waits for the sender, and looks for its message while that is on its way.

    Args:
      of_nodes: the requests of every node, as `Request` or as lists of its fields.

    Example:
      >>> a = [Request(0, True, 1, 0.0, 0.1), Request(0, False, 1, 0.1, 0.2)]
      >>> a += [Request(0, False, 1, 0.5, 0.6)]
      >>> b = [Request(0, True, 1, 0.4, 0.5), Request(0, False, 1, 0.5, 0.6)]
      >>> serial_latencies({"a": a, "b": b})
      {0: {'a': 2, 'b': 2}}
    """
    requests = {node: [Request(*x) for x in lines] for node, lines in of_nodes.items()}
    sent: dict[int, dict[str, float]] = {}
    for node, lines in requests.items():
        for x in lines:
            if x.sends:
                sent.setdefault(x.round, {})[node] = x.ended
    result = {}
    for number, ends in sorted(sent.items()):
        if len(ends) == len(requests):
            last = max(ends.values())
            result[number] = {
                node: 1 + sum(x.latencies for x in lines if x.round == number and x.ended > last)
                for node, lines in requests.items()
            }
    return result
