"""Ctrl-C and SIGTERM end a run of the benchmark, and what it has set up is removed on the way out."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_received: list[int] = []


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside the block both signals raise, so that everything around it is cleaned up.

    What is raised inside a callback of the garbage collector, of which JAX has one, goes nowhere. So `go_on` raises
    again.
    """
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    _received.clear()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    _received.append(number)
    go_on()


def go_on() -> None:
    """Do nothing, or end the run where a signal has come.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
      SystemExit: after SIGTERM, with 128 and its number.
    """
    if signal.SIGINT in _received:
        raise KeyboardInterrupt
    if _received:
        raise SystemExit(128 + _received[-1])
