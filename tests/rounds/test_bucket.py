"""Buckets by obstore: a folder and memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("obstore")

from jgc.rounds.bucket import BucketError, NoBucket, open_bucket
from jgc.rounds.names import before_round


@pytest.fixture(params=["folder", "memory"])
def bucket(request, tmp_path):
    return open_bucket("memory:///" if request.param == "memory" else tmp_path / "run")


def test_one_of_many_creates_an_object(bucket):
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: bucket.create("close", b"%d" % i), range(16)))
    assert sum(won) == 1
    assert bucket.get(["close", "none"]) == [b"%d" % won.index(True), None]


def test_a_listing_after_a_round_has_all_of_the_next(bucket):
    for name in ("rounds/00000001/z.msg", "rounds/00000002/a.msg", "rounds/00000002/close"):
        bucket.create(name, b"12")
    names = bucket.list("rounds", before_round(2))
    assert names == {"rounds/00000002/a.msg": 2, "rounds/00000002/close": 2}
    bucket.delete([*names, "rounds/none"])
    assert list(bucket.list("rounds")) == ["rounds/00000001/z.msg"]
    assert (bucket.counts.create, bucket.counts.list, bucket.counts.delete) == (3, 2, 3)


@pytest.mark.parametrize("url, text", [
    ("bogus://x", "bogus"), ("/nowhere/at/all", "existing folder"), ("az://container/run", "AZURE_STORAGE"),
])  # fmt: skip
def test_a_bucket_that_cannot_be_opened_is_one_line(url, text):
    with pytest.raises(NoBucket, match=text) as error:
        open_bucket(url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line, kind, text", [
    ("Generic LocalFileSystem error: ... No space left on device (os error 28)", BucketError, "is full"),
    ("Server returned non-2xx status code: 507 Insufficient Storage: ", BucketError, "is full"),
    ("Client error with status 403 Forbidden: AccessDenied", NoBucket, "refused"),
    ("Client error with status 401: sign in", NoBucket, "refused"),
    ("Client error with status 403 Forbidden: <Code>RequestTimeTooSkewed</Code>", NoBucket, "clock is wrong"),
    ("Error performing PUT http://169.254.169.254/latest/api/token", NoBucket, "no credentials"),
    ("404: <Code>NoSuchBucket</Code>", NoBucket, "no such bucket"),
])  # fmt: skip
def test_errors_of_a_store_say_what_is_wrong(bucket, line, kind, text):
    error = bucket._error(RuntimeError(f"{line}\n\nDebug source:\nGeneric"))
    assert type(error) is kind and text in str(error) and "\n" not in str(error)
