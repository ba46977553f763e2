"""The warm-up of sparse methods, from sending everything to sending the share alpha: three
strategies.

    "warmup"       everything for `warmup_steps`, then alpha
    "fixed"        alpha from the first step
    "exponential"  25 %, 6.25 %, 1.5625 % and 0.4 % of the values, in equal parts of `warmup_steps`,
                   then alpha

Phase values: "dense", (name, share) for a stage of the ramp, and the bare name for alpha.

Source: Lin et al. 2018, Section 3.3 (the ramp); LGC paper, Section VI-F and Fig. 13 (the three
compared).
"""

from collections.abc import Callable, Hashable
from typing import Literal

from jgc.compress.dense import identity
from jgc.method import phases
from jgc.method.exchange import Codec, Exchange, Stages, all_reduce
from jgc.selection.selector import check_alpha
from jgc.types import Phase

Strategy = Literal["warmup", "fixed", "exponential"]

RAMP = (0.25, 0.0625, 0.015625, 0.004)  # shares sent: sparsity 75 %, 93.75 %, 98.4375 %, 99.6 %


def sparse_schedule(
    strategy: Strategy, alpha: float, warmup_steps: int, name: str = "top-k"
) -> tuple[Phase, ...]:
    """The phases of a sparse method. The value of the last one is `name`.

    The ramp has only the stages that send more than alpha; they divide `warmup_steps` equally.

    Example:
      >>> [(phase.value, phase.start) for phase in sparse_schedule("exponential", 0.01, 30)]
      [(('top-k', 0.25), 0), (('top-k', 0.0625), 10), (('top-k', 0.015625), 20), ('top-k', 30)]
    """
    check_alpha(alpha)
    # checks warmup_steps for all strategies
    warmup = phases.in_sequence((phases.DENSE, warmup_steps), (name, 0))
    if strategy != "exponential":
        return warmup if strategy == "warmup" else phases.single(name)
    shares = [share for share in RAMP if share > alpha]
    if warmup_steps and not shares:
        raise ValueError(
            f"strategy='exponential' goes from {RAMP[0]:.0%} down to alpha, and alpha={alpha} is "
            "no less: give strategy='warmup', or warmup_steps=0")
    starts = [i * warmup_steps // len(shares) for i in range(len(shares) + 1)] if shares else [0]
    ramp = [Phase(f"{name} {100 * share:g} %", start, (name, share))
            for share, start, end in zip(shares, starts, starts[1:], strict=False)
            if start < end]  # fmt: skip  # leave out a stage without steps
    return (*ramp, Phase(name, starts[-1], name))


def shares_of(schedule: tuple[Phase, ...], alpha: float) -> dict[Hashable, float]:
    """The share of the values that each phase sends, by its value, but for the uncompressed one."""
    values = [phase.value for phase in schedule if phase.value != phases.DENSE]
    return {value: value[1] if isinstance(value, tuple) else alpha for value in values}


def sparse_stages(
    schedule: tuple[Phase, ...], alpha: float, codec: Callable[[float], Codec], exchange: Exchange
) -> Stages:
    """Stages for `compose_phases`: dense by all-reduce, or `codec(share)` by the exchange."""
    shares = shares_of(schedule, alpha).items()
    sparse = {value: (codec(share), exchange) for value, share in shares}
    return {phases.DENSE: (identity(), all_reduce()), **sparse}
