"""The figures of a row from the steps of a cell: medians, the time of each part, bytes, and the floor."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jgc.lab.bench.network.methods import NO_EXCHANGE, PLAIN_TORCH, label_of, split
from jgc.lab.bench.network.models import task_named
from jgc.lab.bench.network.namespaces import HEADERS, UNLIMITED
from jgc.lab.bench.network.results import BLOCK, COMPUTATION, Results, key, sessions
from jgc.lab.shared.rate import bytes_per_second

DRAWS, COVER = 2000, 90  # of the bootstrap; percent
TWENTY = "twenty_lines"


class Interval(NamedTuple):
    """A median or a difference of two medians, with the range of 90 % of bootstrap draws."""

    middle: float
    low: float
    high: float


class Figures(NamedTuple):
    """A cell in numbers: seconds of the slowest host, bytes of one host's interface in a step.

    With local steps they are a round's, divided by its steps.

    Attributes:
      method, label: its name, and for people.
      steps: how many, or rounds.
      step: the whole step.
      added: the step minus the same framework's computation, with its interval.
      over: the step divided by that computation.
      computation: gradients and update of that framework, with local steps of a round without an exchange.
      each: seconds of a token or an image: the step divided by the number on all hosts.
      sent_each: bytes that a host sends in a step, headers included, divided by its tokens or images.
      compression: the step with local copies instead of collectives, minus computation; None if not measured.
      communication: the rest.
      cpu: processor seconds of a host over its computation's.
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
    over: Interval
    computation: float
    each: Interval
    sent_each: float
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


def of_cells(measured: Results, hosts: int, rate: str) -> list[Figures]:
    """The figures of all methods measured in a cell, in the order of measurement."""
    cells = [c for c in measured["cells"].values() if (c["hosts"], c["rate"]) == (hosts, rate) and c.get("full")]
    rows = [_figures(measured, cell) for cell in cells]
    twenty = next((row.sent for row in rows if row.method == TWENTY), 0.0)
    return [row._replace(of_twenty=row.sent / twenty if twenty else None) for row in rows]


def _figures(measured: Results, cell: dict[str, Any]) -> Figures:
    hosts, rate, method = cell["hosts"], cell["rate"], cell["method"]
    full, alone, every = cell["full"], cell.get("alone", []), split(method)[1]
    computation, busy = _computation(measured, cell)
    told = _of_step(measured["methods"].get(f"{hosts}/{method}", {}), every or 1)
    s = measured["settings"]
    units = task_named(s["model"]).units(s["batch"])  # of a host
    each = {name: cell[name] / cell["steps_counted"] for name in ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")}
    on_cable = max(each["tx_bytes"], each["rx_bytes"])
    return Figures(
        method,
        label_of(method),
        len(full),
        median(full),
        median(full, computation),
        median(full, computation, np.divide),
        float(np.median(computation)),
        Interval(*(x / hosts / units for x in median(full))),
        each["tx_bytes"] / units,
        float(np.median(alone) - np.median(computation)) if alone else None,
        float(np.median(full) - np.median(alone)) if alone else None,
        float(np.median(cell["cpu_full"]) - np.median(busy)),
        each["tx_bytes"] - HEADERS * each["tx_packets"],
        each["rx_bytes"] - HEADERS * each["rx_packets"],
        HEADERS * each["tx_packets"],
        _framing(measured, hosts, told),
        told.get("physical"),
        told.get("compiled"),
        told.get("audit", ""),
        None if rate == UNLIMITED else on_cable / bytes_per_second(rate),
    )


def _computation(measured: Results, cell: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds and processor seconds of steps that exchange nothing, in the sessions of a row's steps, else in all.

    For local steps of rounds as long, if they were measured: within a round no host waits for the others.
    """
    hosts, rate, method = cell["hosts"], cell["rate"], cell["method"]
    rounds = measured["cells"].get(key(hosts, rate, f"{NO_EXCHANGE}:every={split(method)[1]}"), {})
    source, part = rounds, "full"
    if not rounds.get("full"):
        framework = "torch" if method in PLAIN_TORCH else "jax"
        source, part = measured["cells"][key(hosts, rate, f"{COMPUTATION}_{framework}")], COMPUTATION
    of_cell = set(sessions(cell, "full"))
    chosen = [i for i, session in enumerate(sessions(source, part)) if session in of_cell] or range(len(source[part]))
    return [source[part][i] for i in chosen], [source[f"cpu_{part}"][i] for i in chosen]


def _of_step(told: dict[str, Any], steps: int) -> dict[str, Any]:
    """Measured bytes of a program, divided by the steps of a round."""
    shared = {name: told[name] / steps for name in ("physical", "compiled") if told.get(name) is not None}
    counts = {name: times / steps for name, times in told.get("collectives", {}).items()}
    return {**told, **shared, "collectives": counts}


def _framing(measured: Results, hosts: int, told: dict[str, Any]) -> float | None:
    """Bytes that Gloo adds to a step: for each collective of the program, the bytes measured for one like it."""
    of_one, counts = measured.get("framing", {}).get(str(hosts), {}), told.get("collectives")
    if not counts or not counts.keys() <= of_one.keys():
        return None
    return float(sum(times * of_one[name] for name, times in counts.items()))


def median(values: Sequence[float], less: Sequence[float] | None = None, by: Any = np.subtract) -> Interval:
    """The median of values, or its difference from a different median, with the bootstrap's interval; or their ratio.

    Whole blocks are drawn: consecutive steps are more alike than steps of two blocks.

    Example:
      >>> median([1.0, 1.0, 1.0], less=[0.5, 0.5])
      Interval(middle=0.5, low=0.5, high=0.5)
      >>> median([1.0, 1.0, 1.0], [0.5, 0.5], by=np.divide).middle
      2.0
    """
    random = np.random.default_rng(0)
    draws, middle = _drawn(values, random), float(np.median(values))
    if less is not None:
        draws, middle = by(draws, _drawn(less, random)), float(by(middle, np.median(less)))
    low, high = np.percentile(draws, [(100 - COVER) / 2, (100 + COVER) / 2])
    return Interval(middle, float(low), float(high))


def _drawn(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """Medians of bootstrap draws of whole blocks with replacement, f64[DRAWS]; the last block may be shorter."""
    size = BLOCK if len(values) > BLOCK else 1
    blocks = np.full((-(-len(values) // size), size), np.nan)
    blocks.flat[: len(values)] = values
    drawn = random.integers(len(blocks), size=(DRAWS, len(blocks)))
    return np.nanmedian(blocks[drawn].reshape(DRAWS, -1), axis=1)
