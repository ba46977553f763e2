"""Requests to a bucket as values, so that tests can step the protocol in any order.

A part of the protocol is a generator: it yields a request and gets the answer, or `BucketError` at
the yield. `perform` runs one against a bucket and a clock; tests interleave many.
"""

import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from jgc.rounds.bucket import Bucket, BucketError

T = TypeVar("T")


class Create(NamedTuple):
    """Write an object; the answer is False if the name existed."""

    name: str
    data: bytes


class Get(NamedTuple):
    """Read objects; the answer is a list of bytes, None for a name that does not exist."""

    names: tuple[str, ...]


class List(NamedTuple):
    """Names and sizes below a folder that are greater than `after`, as a dict in order."""

    folder: str
    after: str = ""


class Delete(NamedTuple):
    """Delete objects."""

    names: tuple[str, ...]


class Wait(NamedTuple):
    """Do nothing for some seconds."""

    seconds: float


Request = Create | Get | List | Delete | Wait
Requests = Generator[Request, Any, T]


def answer(request: Request, bucket: Bucket, wait: Callable[[float], Any] = time.sleep) -> Any:
    """The bucket's answer to a request. Raises BucketError."""
    match request:
        case Create(name, data):
            return bucket.create(name, data)
        case Get(names):
            return bucket.get(names)
        case List(folder, after):
            return bucket.list(folder, after)
        case Delete(names):
            return bucket.delete(names)
        case Wait(seconds):
            return wait(seconds)


def perform(requests: Requests[T], bucket: Bucket, wait: Callable[[float], Any] = time.sleep) -> T:
    """Run a part of the protocol to its end, and return its result."""
    value: Any = None
    error: BucketError | None = None
    while True:
        try:
            request = requests.throw(error) if error else requests.send(value)
        except StopIteration as end:
            return end.value
        value, error = None, None
        try:
            value = answer(request, bucket, wait)
        except BucketError as failure:
            error = failure
