"""Ctrl-C and SIGTERM: noted when they come, acted on between two steps."""

import signal
from types import FrameType
from typing import Any


class Interrupts:
    """Inside the block a first Ctrl-C or SIGTERM is only noted; a second one acts as it does without this class.

    Attributes:
      received: the signal's number, 0 before one came.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in self.SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: whoever owns that has the signals
                break
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def name(self) -> str:
        """What people call the signal."""
        return "Ctrl-C" if self.received == signal.SIGINT else "SIGTERM"

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells have it."""
        return 128 + self.received
