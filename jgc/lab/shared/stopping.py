"""Ctrl-C, SIGTERM and a closed terminal end a run of the benchmark, which removes its namespaces and processes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_received: list[int] = []


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside the block the first signal raises, so that all is cleaned up; later signals are ignored.

    Python drops an exception raised inside a callback of the garbage collector, and JAX has one. So `go_on` raises
    again. Under `nohup` a closed terminal is ignored.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    _received.clear()
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    _received.append(number)
    if len(_received) == 1:
        go_on()


def go_on() -> None:
    """Raise if a signal has come.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
      SystemExit: after a different signal, with 128 and its number.
    """
    if _received and _received[0] == signal.SIGINT:
        raise KeyboardInterrupt
    if _received:
        raise SystemExit(128 + _received[0])
