"""The figures of a cell from what its nodes have noted."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from experiments.rounds.cells import BUCKET, WARM_UP, Cell, Measured
from experiments.rounds.record import Round
from experiments.rounds.trace import serial_latencies
from jgc.rounds.bucket import Counts
from jgc.rounds.prices import dollars
from jgc.training.errors import FAILED, UserError


def measured_of(
    cell: Cell, joined: Sequence[Mapping[str, Any]], ran: Sequence[Mapping[str, Any]],
    curve: Sequence[Sequence[float]],
) -> Measured:  # fmt: skip
    """The figures of a cell. The first round is left out, but for bytes on the link and the losses.

    Args:
      cell: the cell.
      joined: what `Node.join` returned, by node.
      ran: what `Node.run` returned.
      curve: seconds, rounds and validation loss.

    Raises:
      UserError: nodes ended with different parameters.
    """
    if len({node["digest"] for node in ran}) > 1:
        raise UserError(f"{cell.label}: the nodes ended with different parameters", FAILED)
    of_nodes = [[Round(*line) for line in node["rounds"]] for node in ran]
    timed = [lines[WARM_UP if len(lines) > WARM_UP else 0 :] for lines in of_nodes]
    shares = [utilisation(lines) for lines in timed]
    every = [line for lines in timed for line in lines]
    waits = [line.waited for line in every if line.waited is not None]
    rounds = mean(len(lines) for lines in of_nodes)
    figures = {
        "utilisation": mean(shares), "least_utilisation": min(shares),
        "rounds": min(map(len, timed)), "closed": min(node["closed"] for node in ran),
        "seconds_round": median(line.ended - line.began for line in every),
        "seconds_step": median(line.local for line in every) / cell.every,
        "seconds_exchange": median(line.ended - line.began - line.local for line in every),
        "waited": median(waits) if waits else None,
        "link_up": mean(node["link"]["tx_bytes"] for node in ran) / rounds,
        "link_down": mean(node["link"]["rx_bytes"] for node in ran) / rounds,
        **{name: joined[0][name] for name in ("payload", "version", "data")},
        "curve": [list(point) for point in curve], "loss": curve[-1][2],
    }  # fmt: skip
    return figures | (of_bucket(of_nodes, timed, ran) if cell.via == BUCKET else {})


def utilisation(lines: Sequence[Round]) -> float:
    """Seconds in local steps over all seconds.

    Example:
      >>> utilisation([Round(0, 0.0, 9.0, 10.0, None, ()), Round(1, 10.0, 7.0, 20.0, None, ())])
      0.8
    """
    return sum(x.local for x in lines) / sum(x.ended - x.began for x in lines)


def of_bucket(
    of_nodes: Sequence[Sequence[Round]], timed: Sequence[Sequence[Round]],
    ran: Sequence[Mapping[str, Any]],
) -> Measured:  # fmt: skip
    """Bytes of objects, requests, their cost and serial latencies, a node and round."""
    spent = [
        Counts(*lines[-1].counts).since(Counts(*lines[-len(chosen) - 1].counts))
        if len(lines) > len(chosen)
        else Counts(*lines[-1].counts)
        for lines, chosen in zip(of_nodes, timed, strict=True)
    ]
    rounds = len(timed[0])
    total = Counts(*np.sum(spent, axis=0).tolist())
    share = {name: x / len(spent) / rounds for name, x in total._asdict().items()}
    cost = dollars(total)
    requests = {str(i): node["requests"] for i, node in enumerate(ran)}
    numbers = {line.number for line in timed[0]}
    series = [
        latencies
        for number, of in serial_latencies(requests).items()
        if number in numbers
        for latencies in of.values()
    ]
    return {
        **share, "dollars_requests": cost.requests / len(spent) / rounds,
        "dollars_egress": cost.egress / len(spent) / rounds,
        "latencies": median(series) if series else None,
        "most_latencies": max(series, default=None),
    }  # fmt: skip


def loss_at(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """The validation loss after some seconds, between the two nearest points.

    Example:
      >>> loss_at([[0.0, 0, 4.0], [10.0, 5, 2.0]], 5.0)
      3.0
    """
    return float(np.interp(seconds, [x[0] for x in curve], [x[2] for x in curve]))
