"""The table of a campaign of rounds."""

from collections import Counter
from statistics import median

from jgc.lab.chaos.rounds.campaign import RUN, Found, Plan
from jgc.lab.chaos.rounds.faults import what
from jgc.lab.chaos.verdict import GOOD, KINDS, Outcome
from jgc.lab.shared.progress import clock
from jgc.lab.shared.tables import table


def markdown(plan: Plan, server: str, found: Found) -> str:
    """Figures of the run, the table of faults, and what went badly."""
    head = ["fault", "tried", *KINDS, "until it counts again: median, most, s", "what"]
    rows, total = [], Counter[str]()
    for fault, outcomes in sorted(found.outcomes.items()):
        kinds = Counter(outcome.kind for outcome in outcomes)
        total += kinds
        seconds = found.recoveries.get(fault) or [0.0]
        again = f"{median(seconds):.1f}, {max(seconds):.1f}" if max(seconds) else ""
        text = "Outside of any fault" if fault == RUN else what(fault)
        rows.append([fault, len(outcomes), *(kinds[kind] for kind in KINDS), again, text])
    rows.append(["all", total.total(), *(total[kind] for kind in KINDS), "", ""])
    lines = [*_figures(plan, server, found), "", table(head, rows), ""]
    lines += [f"- {fault}: {o.kind}: {o.what}" for fault, o in bad(found)]
    return "\n".join(lines)


def _figures(plan: Plan, server: str, found: Found) -> list[str]:
    settings = plan.settings
    undisturbed, spared, everyone = (_rate(x) for x in (found.undisturbed, found.spared, found.everyone))
    worst = max(found.balances, default=0.0)
    return [
        f"{plan.nodes} nodes on {server}, local steps of {settings.seconds:g} s a round, grace {settings.grace:g} s, "
        f"quorum {settings.quorum}, overlap {settings.overlap}, seed {plan.seed}; {clock(found.seconds)} minutes, "
        f"{found.rounds} rounds, a fault each {plan.between:g} s on average.",
        "",
        table(["figure", "value"], [
            ["goodput of nodes that are not hit", _share(spared, undisturbed)],
            ["goodput of all nodes, also while they are dead or stopped", _share(everyone, undisturbed)],
            ["tokens a node and second without faults", f"{undisturbed:.1f}"],
            ["largest error of conservation, of the largest value", f"{worst:.1e} in {len(found.balances)} accounts"],
            ["digests of nodes that equal those of the lists", f"{found.digests:,}"],
        ]),
    ]  # fmt: skip


def bad(found: Found) -> list[tuple[str, Outcome]]:
    """Outcomes that are neither survived nor said."""
    return [(fault, o) for fault, of in found.outcomes.items() for o in of if o.kind not in GOOD]


def _rate(tokens: tuple[float, float]) -> float:
    return tokens[0] / tokens[1] if tokens[1] else 0.0


def _share(x: float, whole: float) -> str:
    return f"{100 * x / whole:.1f} %" if whole else "not measured"
