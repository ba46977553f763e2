"""The page of a campaign of rounds."""

import math
from collections import Counter
from statistics import median

from jgc.lab.chaos.rounds.campaign import RUN, Results, most_tokens
from jgc.lab.chaos.rounds.faults import line_of
from jgc.lab.chaos.rounds.run import Plan
from jgc.lab.chaos.verdict import GOOD, KINDS, Outcome
from jgc.lab.shared.progress import clock
from jgc.lab.shared.tables import table


def markdown(plan: Plan, server: str, results: Results) -> str:
    """Figures of the run, the table of faults, and bad outcomes."""
    head = ["fault", "tried", *KINDS, "until it counts again: median, most, s", "what"]
    rows, total = [], Counter[str]()
    for fault, outcomes in sorted(results.outcomes.items()):
        kinds = Counter(outcome.kind for outcome in outcomes)
        total += kinds
        seconds = results.recoveries.get(fault) or [0.0]
        again = f"{median(seconds):.1f}, {max(seconds):.1f}" if max(seconds) else ""
        text = "Outside of any fault" if fault == RUN else line_of(fault)
        rows.append([fault, len(outcomes), *(kinds[kind] for kind in KINDS), again, text])
    rows.append(["all", total.total(), *(total[kind] for kind in KINDS), "", ""])
    lines = [*_figures(plan, server, results), "", table(head, rows), ""]
    lines += [f"- {fault}: {o.kind}: {o.what}" for fault, o in bad(results)]
    return "\n".join(lines)


def _figures(plan: Plan, server: str, results: Results) -> list[str]:
    settings = plan.settings
    goodputs = (results.undisturbed, results.spared, results.everyone)
    undisturbed, spared, everyone = (_rate(x) for x in goodputs)
    worst, accounts = max(results.balances, default=0.0), len(results.balances)
    without = "not measured" if math.isnan(undisturbed) else f"{undisturbed:.1f} of at most {most_tokens(settings):.1f}"
    return [
        f"{plan.nodes} nodes on {server}, local steps of {settings.seconds:g} s a round, grace "
        f"{settings.grace:g} s, quorum {settings.quorum}, overlap {settings.overlap}, seed "
        f"{plan.seed}; {clock(results.seconds)} minutes, {results.rounds} rounds, {results.begun} faults.",
        "",
        table(["figure", "value"], [
            ["goodput of nodes that are not hit", _share(spared, undisturbed)],
            ["goodput of all nodes, hit or not", _share(everyone, undisturbed)],
            ["tokens a node and second without faults", without],
            ["largest relative error of conservation", f"{worst:.1e} in {accounts} accounts"],
            ["digests of nodes that equal their list", f"{results.digests:,}"],
        ]),
    ]  # fmt: skip


def bad(results: Results) -> list[tuple[str, Outcome]]:
    """Outcomes that are neither survived nor said."""
    return [(fault, o) for fault, of in results.outcomes.items() for o in of if o.kind not in GOOD]


def _rate(tokens: tuple[float, float]) -> float:
    """Tokens a second; NaN without a second."""
    return tokens[0] / tokens[1] if tokens[1] else math.nan


def _share(x: float, whole: float) -> str:
    return "not measured" if math.isnan(x) or not whole > 0 else f"{100 * x / whole:.1f} %"
