"""A run's bucket for a command; what goes wrong with it is one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jgc.rounds.bucket import BucketError, ObjectStore, open_bucket
from jgc.rounds.context import RoundsError
from jgc.training.errors import FAILED, UserError


@contextmanager
def opened_bucket(url: str) -> Iterator[ObjectStore]:
    """Open a bucket that exists.

    Raises:
      UserError: there is none, or no run in it; inside the block, too.
    """
    folder = url.removeprefix("file://")
    if "://" not in folder and not Path(folder).is_dir():
        raise UserError(f"{url}: there is no such folder; give that of --rounds.bucket, or a URL such as s3://...")
    try:
        yield open_bucket(url)
    except (BucketError, RoundsError) as error:
        text = str(error)
        raise UserError(text if url in text else f"{url}: {text}", FAILED) from error
