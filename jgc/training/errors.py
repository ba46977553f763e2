"""What a user did wrong or a machine could not do, told in one line, and the exit code that goes with it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BAD_INPUT = 2
FAILED = 1

# what a storage library's long message comes down to
_DISK = tuple(os.strerror(e) for e in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EIO))


class UserError(Exception):
    """Something to tell the user in one line, without a traceback.

    Attributes:
      exit_code: what the process ends with, never 0.
    """

    def __init__(self, message: str, exit_code: int = BAD_INPUT):
        super().__init__(" ".join(str(message).split()))
        self.exit_code = exit_code


class NonFinite(UserError):
    """A loss or a gradient became NaN or infinite at `step`."""

    def __init__(self, step: int, what: str, kept: str):
        super().__init__(f"stopped at step {step}: {what}; {kept}", FAILED)
        self.step = step


@contextmanager
def values_of_the_user() -> Iterator[None]:
    """What is wrong with a value is told in one line: the user gave it."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def cannot_write(path: Path | str, error: Exception) -> UserError:
    """The error for a full or read-only disk, or whatever else keeps a file from being written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    known = next((text for text in _DISK if text in reason), reason[:300])
    return UserError(f"cannot write {path}: {known}", FAILED)


def did_you_mean(word: str, known: list[str], cutoff: float = 0.6) -> str:
    """A suggestion to append to an error message, or nothing.

    Example:
      >>> did_you_mean("--stpes", ["--steps", "--nodes"])
      '; did you mean --steps?'
    """
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
