"""Errors that reach the user as one line and an exit code, without a traceback."""

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BAD_INPUT = 2
FAILED = 1
LAST_WORD = 1.0  # seconds that a process which must end spends on printing why

# looked for in the long messages of storage libraries
_DISK = tuple(os.strerror(e) for e in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EIO))


class UserError(Exception):
    """An error that the user sees as one line, without a traceback.

    Attributes:
      exit_code: of the process, never 0.
    """

    def __init__(self, message: str, exit_code: int = BAD_INPUT):
        super().__init__(" ".join(str(message).split()))
        self.exit_code = exit_code


class NonFinite(UserError):
    """A loss or a gradient became NaN or infinite at `step`."""

    def __init__(self, step: int, what: str, kept: str):
        super().__init__(f"stopped at step {step}: {what}; {kept}", FAILED)
        self.step = step


class Drift(UserError):
    """Devices hold different values at `step` where they should hold the same. Every process raises the same error."""

    def __init__(self, step: int, what: str, newest: str):
        super().__init__(f"stopped at step {step}: {what}; {newest}", FAILED)
        self.step = step


@contextmanager
def values_of_the_user() -> Iterator[None]:
    """Turn a ValueError into a UserError: the value came from the user."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def cannot_write(path: Path | str, error: Exception) -> UserError:
    """The error for a file that cannot be written, such as on a full or read-only disk."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    known = next((text for text in _DISK if text in reason), reason[:300])
    return UserError(f"cannot write {path}: {known}", FAILED)


def did_you_mean(word: str, known: list[str], cutoff: float = 0.6) -> str:
    """A suggestion to append to an error message, or "".

    Example:
      >>> did_you_mean("--stpes", ["--steps", "--nodes"])
      '; did you mean --steps?'
    """
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def say(text: str) -> None:
    """Print a line on standard error. Never raises, and never waits long for a reader: see `briefly`."""
    if sys.stderr is not None:  # as Python sets it where the process began with a closed descriptor
        briefly(lambda: print(text, file=sys.stderr, flush=True))


def leave_stdout() -> None:
    """Let standard output go nowhere, after its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def briefly(write: Callable[[], object]) -> None:
    """Call `write`, which prints or flushes, and go on after `LAST_WORD` seconds at the latest.

    The other end of a pipe may be closed, which raises, or it may be full with nobody reading, which blocks for ever.
    """

    def attempt() -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed on this side
            write()

    writer = threading.Thread(target=attempt, daemon=True)
    writer.start()
    writer.join(LAST_WORD)
