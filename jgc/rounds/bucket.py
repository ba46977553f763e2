"""The bucket in which the nodes of a run meet: an object store behind four requests.

    bucket = open_bucket("s3://bucket/run7")      # also gs://, az://, file:// and a folder's path
    bucket.create("rounds/00000003/paris.msg", data)

A bucket must guarantee

  1. Strong read-after-write: every later request of any node sees a created object, also in lists.
  2. Conditional create: of several processes that create a name, exactly one succeeds.
  3. Atomic objects: a reader sees a whole object or none.

S3, GCS, Azure Blob Storage, R2, MinIO and SeaweedFS do; so does a local folder, and a shared one if
its file system has atomic hard links. No clock of the bucket is read.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

PARALLEL = 16  # concurrent requests of `get`


class BucketError(Exception):
    """A request that failed, in one line; the object may have been written nevertheless."""


class NoBucket(BucketError):
    """The bucket does not exist, or access is denied: trying again does not help."""


_MISSING = "there is no such bucket; create it first"
_FAILURES: tuple[tuple[str, type[BucketError], str], ...] = (  # patterns of errors, in order
    (r"NoSuchBucket|bucket does not exist|Unable to canonicalize", NoBucket, _MISSING),
    (r"No space left|507 Insufficient|File too large|StorageFull|QuotaExceeded|Disk quota",
     BucketError, "the bucket is full; delete old rounds or make room"),
    (r"169\.254\.169\.254|metadata\.google|MissingAccount|Account must",
     NoBucket, "no credentials in the environment"),
    ("RequestTimeTooSkewed", NoBucket, "this machine's clock is wrong; set it"),  # a 403, too
    (r"\b40[13]\b|Unauth|PermissionDenied|AccessDenied|InvalidAccessKey",
     NoBucket, "the credentials are refused"),
)  # fmt: skip


class Counts(NamedTuple):
    """Requests by type, and bytes of objects up and down; a listing counts 300 bytes an entry."""

    create: int = 0
    get: int = 0
    list: int = 0
    delete: int = 0
    up: int = 0
    down: int = 0

    def since(self, before: "Counts") -> "Counts":
        """The difference from earlier counts."""
        return Counts(*(a - b for a, b in zip(self, before, strict=True)))


class Bucket(Protocol):
    """The requests of the protocol. Names are relative, parts joined by "/"."""

    counts: Counts

    def create(self, name: str, data: bytes) -> bool:
        """Write an object. False if the name exists, even if this process wrote it."""

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """The objects, in parallel; None for a name that does not exist."""

    def list(self, folder: str, after: str = "") -> dict[str, int]:
        """Names and sizes of the objects below a folder, in order, if greater than `after`."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that does not exist is no error."""


class ObjectStore:
    """A bucket by `obstore`. Safe to use by several threads."""

    def __init__(self, store: Any, url: str):
        self.store, self.url, self.counts = store, url, Counts()
        self._lock = Lock()  # the thread of checkpoints counts, too
        self._pool = ThreadPoolExecutor(PARALLEL, "jgc-rounds-get")

    def create(self, name: str, data: bytes) -> bool:
        import obstore

        self._count(create=1, up=len(data))
        try:
            self._asked(lambda: obstore.put(self.store, name, data, mode="create"))
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise NoBucket(f"{self.url}: {_MISSING}") from None
        return True

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        # `map` carries an error of a thread to the caller
        run = map if len(names) == 1 else self._pool.map
        objects = list(run(self._get, names))
        self._count(get=len(names), down=sum(len(x) for x in objects if x))
        return objects

    def _get(self, name: str) -> bytes | None:
        import obstore

        try:
            return self._asked(lambda: bytes(obstore.get(self.store, name).bytes()))
        except FileNotFoundError:
            return None

    def list(self, folder: str, after: str = "") -> dict[str, int]:
        import obstore

        def listed() -> dict[str, int]:
            pages = obstore.list(self.store, prefix=folder, offset=after or None)
            return {x["path"]: x["size"] for page in pages for x in page}

        try:
            sizes = self._asked(listed)
        except FileNotFoundError:
            raise NoBucket(f"{self.url}: {_MISSING}") from None
        self._count(list=1, down=300 * len(sizes))
        return dict(sorted(sizes.items()))

    def delete(self, names: Iterable[str]) -> None:
        import obstore

        for name in names:
            self._count(delete=1)
            try:
                self._asked(partial(obstore.delete, self.store, name))
            except FileNotFoundError:
                continue

    def _count(self, **more: int) -> None:
        with self._lock:
            sums = {name: getattr(self.counts, name) + n for name, n in more.items()}
            self.counts = self.counts._replace(**sums)

    def _asked(self, request: Callable[[], T]) -> T:
        """The answer to a request; its errors as a `BucketError` of one line."""
        from obstore import exceptions

        try:
            return request()
        except (FileNotFoundError, FileExistsError):
            raise
        except exceptions.AlreadyExistsError as error:
            raise FileExistsError from error
        except Exception as error:  # classes of obstore and of the interpreter
            raise self._error(error) from None

    def _error(self, error: Exception) -> BucketError:
        line = str(error).split("\n")[0][:400]
        for pattern, error_type, reason in _FAILURES:
            if re.search(pattern, str(error)):
                return error_type(f"{self.url}: {reason} ({line})")
        return BucketError(f"{self.url}: {line}")


def open_bucket(url: str | os.PathLike, seconds: float = 300, **options: Any) -> ObjectStore:
    """Open a bucket.

    Args:
      url: s3://bucket/prefix, gs://..., az://container/..., file:///folder, memory:///, or the path
        of a folder, which is made if its parent exists.
      seconds: limit of a request, enough for a message on the slowest link.
      options: of `obstore.store.from_url`, e.g. `endpoint`, `region`; credentials come from the
        environment (AWS_ACCESS_KEY_ID, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME ...).

    Raises:
      NoBucket: obstore is not installed, or the URL or the credentials are invalid.

    Example:
      >>> bucket = open_bucket("memory:///")
      >>> bucket.create("a", b"first"), bucket.create("a", b"second"), bucket.get(["a", "b"])
      (True, False, [b'first', None])
    """
    url = os.fspath(url)
    if not url.strip():
        raise NoBucket("the bucket has no name: give a folder or a URL, such as s3://bucket/run")
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise NoBucket("jgc.rounds needs obstore: pip install 'jgc[rounds]'") from None
    folder = url.removeprefix("file://")
    try:
        if "://" not in url or url.startswith("file://"):
            Path(folder).mkdir(exist_ok=True)
            return ObjectStore(LocalStore(Path(folder).resolve()), url)
        if url.startswith("memory://"):
            return ObjectStore(from_url(url), url)
        options.setdefault("client_options", {}).setdefault("timeout", timedelta(seconds=seconds))
        endpoint = str(options.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", "")))
        if endpoint.startswith("http://"):
            options["client_options"].setdefault("allow_http", True)
        # few retries: the protocol itself waits and tries again, and says so
        options["retry_config"] = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
        return ObjectStore(from_url(url, **options), url)
    except OSError as error:
        raise NoBucket(f"{url}: {error.strerror}; give an existing folder or a URL") from None
    except Exception as error:
        line = str(error).split("\n")[0]
        if "Account must" in line:
            line += ": set AZURE_STORAGE_ACCOUNT_NAME and a key"
        elif "recognise" in line:
            line = "not the URL of a bucket: give s3://NAME/FOLDER, gs://..., az://... or a folder"
        raise NoBucket(f"{url}: {line}") from None
