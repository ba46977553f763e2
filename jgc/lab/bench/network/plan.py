"""The cells to measure, from a command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jgc.lab.bench.network.methods import SHORT, rows
from jgc.lab.bench.network.models import MODELS, task_named
from jgc.lab.bench.network.namespaces import CUBIC, UNLIMITED, check_rate
from jgc.lab.shared.choices import words
from jgc.training.errors import UserError, values_of_the_user

MOST_HOSTS = 100  # addresses of one network
LONGEST_DELAY = 1000.0  # milliseconds; a step waits for many packets in a row


class Plan(NamedTuple):
    """The cells to measure.

    Attributes:
      hosts, rates: each combination of them.
      methods: names; if there are none, the default ones of each number of hosts.
      steps: of each method, or rounds of local steps; slow_steps: if sending its bytes takes more than `SLOW`
        seconds.
      model: of `MODELS`.
      batch: images, or windows of tokens, of a host in a step.
      short: a quick look.
      delay_ms: milliseconds that the switch keeps every packet.
      congestion: TCP's congestion control.
    """

    hosts: tuple[int, ...]
    rates: tuple[str, ...]
    methods: tuple[str, ...] = ()
    steps: int = 20
    slow_steps: int = 4
    model: str = "resnet18"
    batch: int = 2
    short: bool = False
    delay_ms: float = 0.0
    congestion: str = CUBIC


def plan_of(hosts: Sequence[str], rates: Sequence[str], methods: Sequence[str], steps: int, model: str,
            batch: int | None = None, delay_ms: float = 0.0, congestion: str = CUBIC) -> Plan:  # fmt: skip
    """A plan from a command line.

    Raises:
      UserError: a value that does not fit.

    Example:
      >>> plan_of(["2,4"], ["100Mbit", "unlimited"], [], 20, "resnet18").rates
      ('100mbit', 'unlimited')
    """
    counts = words(hosts)
    if not counts or any(not count.isdecimal() or not 2 <= int(count) <= MOST_HOSTS for count in counts):
        raise UserError(f"--hosts must be numbers from 2 to {MOST_HOSTS}, got {' '.join(hosts) or 'none'}")
    if model not in MODELS:
        raise UserError(f"unknown model {model!r} (one of {', '.join(MODELS)})")
    batch = task_named(model).batch if batch is None else batch
    if steps < 1 or batch < 1:
        raise UserError(f"--steps and --batch must be at least 1, got {steps} and {batch}")
    if not 0 <= delay_ms <= LONGEST_DELAY:
        raise UserError(f"--delay-ms must be from 0 to {LONGEST_DELAY:g}, got {delay_ms:g}")
    known = congestion_controls()
    if congestion not in known:
        raise UserError(f"--congestion must be one of this machine's, {', '.join(known)}, got {congestion}")
    with values_of_the_user():
        speeds = tuple(dict.fromkeys(check_rate(rate) for rate in words(rates)))
    if not speeds:
        raise UserError("--rates must be such as 100mbit,unlimited, got none")
    names = tuple(words(methods))
    rows(names, 2, torch=True)
    return Plan(tuple(map(int, counts)), speeds, names, steps, min(4, steps), model, batch, delay_ms=delay_ms,
                congestion=congestion)  # fmt: skip


def congestion_controls() -> list[str]:
    """TCP's congestion controls that this machine has; cubic where it does not say."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return known.read_text().split() if known.is_file() else [CUBIC]


def short(plan: Plan) -> Plan:
    """The plan of a quick look: two hosts, two rates, three methods, a small model, few steps."""
    return plan._replace(hosts=(2,), rates=(UNLIMITED, "100mbit"), methods=plan.methods or SHORT, steps=4, slow_steps=2,
                         model="convnet5", short=True)  # fmt: skip
