"""What requests and bytes cost: prices of S3 Standard in us-east-1, in US dollars.

Assumed, not looked up by the program; docs/rounds.md has the table with its date and sources. Bytes
that leave the region cost most. Within a region, and with R2, they are free.
"""

from typing import NamedTuple

from jgc.rounds.bucket import Counts

WRITE = 0.005  # a thousand creates or listings
READ = 0.0004  # a thousand reads
EGRESS = 0.09  # a GB (1e9 bytes) read


class Dollars(NamedTuple):
    """What a node's traffic costs; `egress` only if the node is outside of the bucket's region."""

    requests: float
    egress: float


def dollars(counts: Counts) -> Dollars:
    """The cost of a bucket's counts. Deleting is free.

    Example:
      >>> dollars(Counts(create=1400, get=2600, list=2200, down=10**9))
      Dollars(requests=0.01904, egress=0.09)
    """
    requests = (counts.create + counts.list) * WRITE / 1000 + counts.get * READ / 1000
    return Dollars(round(requests, 12), round(counts.down * EGRESS / 1e9, 12))
