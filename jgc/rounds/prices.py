"""What requests and bytes cost: prices of S3 Standard in us-east-1, in US dollars.

Assumed, not looked up by the program; docs/rounds.md has the table with its date and sources. Bytes
that leave the region cost most. Within a region, and with R2, they are free.
"""

from typing import NamedTuple

from jgc.rounds.bucket import Counts


class Prices(NamedTuple):
    """US dollars: a thousand creates or listings, a thousand reads, and a GB (1e9 bytes) read."""

    write: float = 0.005
    read: float = 0.0004
    egress: float = 0.09


S3 = Prices()


class Dollars(NamedTuple):
    """What a node's traffic costs; `egress` only if the node is outside of the bucket's region."""

    requests: float
    egress: float


def dollars(counts: Counts, prices: Prices = S3) -> Dollars:
    """The cost of a bucket's counts. Deleting is free.

    Example:
      >>> dollars(Counts(create=1400, get=2600, list=2200, down=10**9))
      Dollars(requests=0.01904, egress=0.09)
    """
    writes = counts.create + counts.list
    requests = writes * prices.write / 1000 + counts.get * prices.read / 1000
    return Dollars(round(requests, 12), round(counts.down * prices.egress / 1e9, 12))
