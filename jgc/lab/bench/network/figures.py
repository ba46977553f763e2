"""The figures of a row from the steps of a cell: medians, the time of each part, bytes, and the floor."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jgc.lab.bench.network.methods import PLAIN_TORCH, label_of
from jgc.lab.bench.network.namespaces import HEADERS, UNLIMITED
from jgc.lab.bench.network.results import BLOCK, COMPUTATION, Results, key, sessions
from jgc.wire.rate import bytes_per_second

DRAWS, COVER = 2000, 90  # of the bootstrap; percent
TWENTY = "twenty_lines"


class Interval(NamedTuple):
    """A median or a difference of two medians, with the range of 90 % of bootstrap draws."""

    middle: float
    low: float
    high: float


class Figures(NamedTuple):
    """A cell in numbers: seconds of the slowest host, bytes of one host's interface in a step.

    Attributes:
      method, label: its name, and for people.
      steps: how many.
      step: the whole step.
      added: the step minus the same framework's own computation, with its interval.
      computation: gradients and update of that framework.
      compression: the step with local copies instead of collectives, minus computation; None if not measured.
      communication: the rest.
      cpu: processor seconds of a host over those of its computation.
      sent, received: bytes at the interface without packet headers, with framing.
      headers: bytes of packet headers sent.
      framing: bytes that Gloo adds to the collectives of this method; None if not measured.
      physical: `Wire.physical`; None for other libraries' rows.
      compiled: bytes of the compiled program's collectives; None if there is no program.
      audit: how the two differ, or "".
      floor: seconds to send the interface's bytes, headers included, at the rate; None without a rate.
      of_twenty: `sent` over that of the twenty lines of JAX.
    """

    method: str
    label: str
    steps: int
    step: Interval
    added: Interval
    computation: float
    compression: float | None
    communication: float | None
    cpu: float
    sent: float
    received: float
    headers: float
    framing: float | None
    physical: float | None
    compiled: float | None
    audit: str
    floor: float | None
    of_twenty: float | None = None


def of_cells(found: Results, hosts: int, rate: str) -> list[Figures]:
    """The figures of all methods measured in a cell, in the order of measurement."""
    cells = [c for c in found["cells"].values() if (c["hosts"], c["rate"]) == (hosts, rate) and c.get("full")]
    rows = [_figures(found, cell) for cell in cells]
    twenty = next((row.sent for row in rows if row.method == TWENTY), 0.0)
    return [row._replace(of_twenty=row.sent / twenty if twenty else None) for row in rows]


def _figures(found: Results, cell: dict[str, Any]) -> Figures:
    hosts, rate, method = cell["hosts"], cell["rate"], cell["method"]
    framework = "torch" if method in PLAIN_TORCH else "jax"
    own = found["cells"][key(hosts, rate, f"{COMPUTATION}_{framework}")]
    full, alone = cell["full"], cell.get("alone", [])
    computation, busy = (_of_sessions(own, part, cell) for part in (COMPUTATION, f"cpu_{COMPUTATION}"))
    told = found["methods"].get(f"{hosts}/{method}", {})
    each = {name: cell[name] / cell["steps_counted"] for name in ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")}
    on_cable = max(each["tx_bytes"], each["rx_bytes"])
    return Figures(
        method,
        label_of(method),
        len(full),
        median(full),
        median(full, computation),
        float(np.median(computation)),
        float(np.median(alone) - np.median(computation)) if alone else None,
        float(np.median(full) - np.median(alone)) if alone else None,
        float(np.median(cell["cpu_full"]) - np.median(busy)),
        each["tx_bytes"] - HEADERS * each["tx_packets"],
        each["rx_bytes"] - HEADERS * each["rx_packets"],
        HEADERS * each["tx_packets"],
        _framing(found, hosts, told),
        told.get("physical"),
        told.get("compiled"),
        told.get("audit", ""),
        None if rate == UNLIMITED else on_cable / bytes_per_second(rate),
    )


def _of_sessions(own: dict[str, Any], part: str, cell: dict[str, Any]) -> list[float]:
    """Computation in the sessions of a row's steps; in all sessions if those have none."""
    mine = set(sessions(cell, "full"))
    found = [x for x, session in zip(own[part], sessions(own, COMPUTATION), strict=True) if session in mine]
    return found or own[part]


def _framing(found: Results, hosts: int, told: dict[str, Any]) -> float | None:
    """Bytes that Gloo adds to a step: for each collective of the program, the bytes measured for one like it."""
    of_one, counts = found.get("framing", {}).get(str(hosts), {}), told.get("collectives")
    if not counts or not counts.keys() <= of_one.keys():
        return None
    return float(sum(times * of_one[name] for name, times in counts.items()))


def median(values: Sequence[float], less: Sequence[float] | None = None) -> Interval:
    """The median of values, or its difference from another median, with the bootstrap's interval.

    Whole blocks are drawn: consecutive steps are more alike than steps of two blocks.

    Example:
      >>> median([1.0, 1.0, 1.0], less=[0.5, 0.5])
      Interval(middle=0.5, low=0.5, high=0.5)
    """
    random = np.random.default_rng(0)
    draws, middle = _drawn(values, random), float(np.median(values))
    if less is not None:
        draws, middle = draws - _drawn(less, random), middle - float(np.median(less))
    low, high = np.percentile(draws, [(100 - COVER) / 2, (100 + COVER) / 2])
    return Interval(middle, float(low), float(high))


def _drawn(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """Medians of bootstrap draws of whole blocks with replacement, f64[DRAWS]; the last block may be shorter."""
    size = BLOCK if len(values) > BLOCK else 1
    blocks = np.full((-(-len(values) // size), size), np.nan)
    blocks.flat[: len(values)] = values
    drawn = random.integers(len(blocks), size=(DRAWS, len(blocks)))
    return np.nanmedian(blocks[drawn].reshape(DRAWS, -1), axis=1)
