"""Progress of long commands: a count and the time left on standard error, and Ctrl-C keeps finished work."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jgc.training.errors import say

T = TypeVar("T")
R = TypeVar("R")

cut_short: list[str] = []
"""A sentence for each piece of work that Ctrl-C stopped in this process, for `jgc.lab.shared.page`."""


def each(items: Sequence[T], work: Callable[[T], R], name: Callable[[T], str] = str) -> list[R]:
    """`work` of each item, after a line of progress each; if Ctrl-C stops it, of those that are done.

    Raises:
      KeyboardInterrupt: nothing is done yet.

    Example:
      >>> each([1, 2], lambda x: x * x)
      [1, 4]
    """
    done: list[R] = []
    started = time.monotonic()
    for item in items:
        say(f"{count(len(done), len(items), time.monotonic() - started)} {name(item)}")
        try:
            done.append(work(item))
        except KeyboardInterrupt:
            if not done:
                raise
            say(f"interrupted at {name(item)}: results are of the {len(done)} before it")
            cut_short.append(f"Stopped by Ctrl-C at {name(item)}: {len(done)} of {len(items)} are here.")
            break
    return done


def count(done: int, of: int, seconds: float) -> str:
    """Progress of a command, and its time left if the rest takes as long as the work done.

    Example:
      >>> count(0, 4, 0.0), count(3, 4, 90.0)
      ('[1/4]', '[4/4, 1:30, about 0:30 left]')
    """
    so_far = f", {clock(seconds)}" if done else ""
    return f"[{done + 1}/{of}{so_far}{left(done, of, seconds)}]"


def left(done: int, of: int, seconds: float) -> str:
    """The time left if the rest takes as long as the work done; nothing at the start.

    Example:
      >>> left(0, 4, 0.0), left(3, 4, 90.0)
      ('', ', about 0:30 left')
    """
    return f", about {clock(seconds / done * (of - done))} left" if done else ""


def clock(seconds: float) -> str:
    """Minutes and seconds.

    Example:
      >>> clock(125.4)
      '2:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
