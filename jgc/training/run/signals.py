"""Ctrl-C and SIGTERM: recorded on arrival, acted on between two steps."""

import signal
from types import FrameType
from typing import Any


class Interrupts:
    """Inside the block a first Ctrl-C or SIGTERM is only recorded; a second one has its usual effect.

    Attributes:
      received: the signal's number, or 0.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in self.SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # Python allows handlers only in the main thread
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
        """The signal's name for messages."""
        return "Ctrl-C" if self.received == signal.SIGINT else "SIGTERM"

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in shells."""
        return 128 + self.received
