"""The closing table: cost and score of each phase, and the run's totals compared with an uncompressed run."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jgc.training.data import further_of, score_of
from jgc.training.output.summary import CORRECTED, POSITIONS, SLOTS, uplink

ROLES = ("leader", "worker")
REQUESTS = {"create": "PUT", "list": "LIST", "get": "GET", "delete": "DELETE"}
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: float | None) -> str:
    """A number of bytes in readable units.

    Example:
      >>> size(1234567), size(999_600)
      ('1.23 MB', '1 MB')
    """
    if count is None:
        return "-"
    count, unit = float(f"{count:.3g}"), 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}" if unit else f"{count:.0f} B"


def show(summary: dict[str, Any], console: Console) -> None:
    """Print the closing table of a run."""
    score = score_of(summary)
    title = f"{summary['method']} on {summary['workload']}, {nodes_of(summary)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    evaluated, every = score.title.split()[-1], _every(summary) or 1
    both = ("up a round" if _every(summary) else "up", "ratio")
    for name in ("phase", "steps", evaluated, "s/step", *(f"{role}\n{x}" for x in both for role in ROLES)):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for phase in summary["phases"]:
        seconds, ratio = phase["seconds_per_step"], phase["compression_ratio"]
        up = (size(every * uplink(summary["parameters"], ratio[role])) for role in ROLES)
        ratios = ("sends nothing" if ratio[role] is None else f"{ratio[role]:,.4g}x" for role in ROLES)
        time = "-" if seconds is None else f"{seconds:.3f}"
        table.add_row(phase["name"], str(phase["steps"]), score.text(phase[score.name]), time, *up, *ratios)
    console.print(table)
    for line in _totals(summary):
        console.print(line, highlight=False)


def nodes_of(summary: dict[str, Any]) -> str:
    """The nodes of a run in words."""
    return f"node {summary['rounds']['node']}" if "rounds" in summary else f"{summary['nodes']} nodes"


def _totals(summary: dict[str, Any]) -> list[str]:
    sent, dense, score = summary["total_bytes"], summary["dense_total_bytes"], score_of(summary)
    times = f", {dense / sent:.1f} times as much" if sent and sent != dense else ""
    lines = [
        f"{score.title} after {summary['steps']} steps: {score.text(summary[score.name])}",
        *(f"{figure.title}: {figure.text(summary[figure.name])}" for figure in further_of(summary)),
    ]
    if "rounds" in summary:
        lines += rounds_lines(summary["rounds"])
    else:
        lines.append(
            f"sent up by all nodes in the whole run, trained weights included: {size(sent)}, "
            f"uncompressed {size(dense)}{times}"
        )
    if missing := summary.get("steps_without_metrics"):
        lines.append(f"metrics.jsonl lacks {missing} of {summary['steps']} steps: all figures leave them out")
    if _every(summary) or summary.get("sent", {}).get("unit") == "token":
        lines.append(_sent(summary["sent"]))
    if summary["deflate_position_bytes"] is not None:
        lines.append(_positions(summary))
    if text := slots(summary):
        lines.append(f"message of a node: {text}")
    if summary["validation_loss"] is not None:
        loss, rate = (summary[name] for name in CORRECTED)
        lines.append(f"last validation loss {loss:.4g}; learning rate at the end {rate:.3g}")
    if summary["reconstruction_cosine"] is not None:
        lines.append(f"last phase, cosine with the true mean where values were sent: {_reconstruction(summary)}")
    return lines


def rounds_lines(rounds: dict[str, Any]) -> list[str]:
    """The lines about a node's rounds through a bucket."""
    if not rounds["exchanges"]:
        return [f"no exchange of node {rounds['node']} has ended"]
    reasons = ", ".join(f"{n} {why}" for why, n in rounds["not_counted"].items())
    others = ", ".join(f"{node} {n} times" for node, n in rounds["others_left_out"].items())
    longest, dollars = rounds["longest_wait"], rounds["dollars"]
    requests = ", ".join(f"{rounds[name]} {verb}" for name, verb in REQUESTS.items() if rounds[name])
    return [
        f"utilisation {rounds['utilisation']:.3f}: {rounds['local_seconds']:.1f} s in local steps of "
        f"{rounds['wall_seconds']:.1f} s without joining, compiling and evaluations",
        f"rounds: {rounds['closed']} closed, this node counted in {rounds['counted']} of {rounds['exchanges']}"
        + (f" ({reasons})" if reasons else "") + (f"; others left out: {others}" if others else "")
        + f"; members at the end: {' '.join(rounds['members'])}; "
        + ("once started" if rounds["starts"] == 1 else f"{rounds['starts']} times started"),
        f"waited {rounds['waited_seconds']:.1f} s for others, at most {longest['seconds']:.1f} s, in round "
        f"{longest['round']}",
        f"bucket: {size(rounds['up'])} up, {size(rounds['down'])} down; {requests}; USD {dollars['requests']:.2g} for "
        f"requests, USD {dollars['egress']:.2g} for downloads if this node is outside of the bucket's region (S3's "
        "prices as in docs/rounds.md)",
        f"digest of the shared parameters: {rounds['digest']}",
    ]  # fmt: skip


def _every(summary: dict[str, Any]) -> int | None:
    return summary.get("sent", {}).get("every")


def _sent(sent: dict[str, Any]) -> str:
    every, step, label = sent["every"], sent["step"], sent["label"]
    of_round = f"{size(every * step)} a round of {every} steps, " if every else ""
    of_label = f"{label:.3g} B" if label < 100 else size(label)
    unit = "a token" if sent["unit"] == "token" else "an image"
    return f"a node sends up {of_round}{size(step)} a step, {of_label} {unit}"


def slots(summary: dict[str, Any]) -> str:
    """Use and overflow of a message of fixed size, or "" if neither is known.

    Example:
      >>> slots({"slots_used": 0.973, "overflow": 0.0})
      "97.3 % of node 0's slots in use when diagnosed, 0 values a step did not fit and wait"
    """
    used, overflow = (summary.get(name) for name in SLOTS)
    parts = [] if used is None else [f"{100 * used:.1f} % of node 0's slots in use when diagnosed"]
    if used is not None or overflow:
        parts.append(f"{overflow or 0:.3g} values a step did not fit and wait")
    return ", ".join(parts)


def _positions(summary: dict[str, Any]) -> str:
    sent, bound, deflated = (size(summary[name]) for name in POSITIONS)
    of = "an exchange" if _every(summary) else "a step"
    return f"positions in {of}: {sent} sent, {bound} the entropy bound, {deflated} by DEFLATE, as the papers count them"


def _reconstruction(summary: dict[str, Any]) -> str:
    parts = [f"{summary['reconstruction_cosine']:.3f} (5th percentile {summary['reconstruction_cosine_p5']:.3f})"]
    if summary["ceiling_cosine"] is not None:
        parts.append(f"with exact values instead of codes {summary['ceiling_cosine']:.3f}")
    if summary["signs_means_cosine"] is not None:
        parts.append(f"signs and means only {summary['signs_means_cosine']:.3f}")
    return "; ".join(parts)
