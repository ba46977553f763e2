"""rounds.jsonl of a node, a line for each start and each exchange, and their summary."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jgc.rounds import Outcome, Rounds
from jgc.rounds.bucket import Counts
from jgc.rounds.prices import dollars
from jgc.training.errors import cannot_write
from jgc.training.output.table import size
from jgc.training.run.folder import ROUNDS

Line = dict[str, Any]


def append(folder: Path, line: Line) -> None:
    """Add a line to a run folder's file."""
    path = folder / ROUNDS
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error


def join_line(rounds: Rounds, step: int, seconds: float) -> Line:
    """The line of a start. `step`: local steps of this node before it."""
    counts = rounds.bucket.counts._asdict()
    return {"step": step, "run": rounds.run, "joined": rounds.number, "seconds": seconds, **counts}


def exchange_line(
    rounds: Rounds, step: int, steps: int, tokens: int, outcome: Outcome | None, seconds: Any, sent: Counts
) -> Line:
    """The line of an exchange: `steps` and `tokens` of the round whose message was sent, the `outcome` that ended
    (with overlap that of the round before; None if none did), and the requests and bytes `sent`."""
    line = {"step": step, "run": rounds.run, "steps": steps, "tokens": tokens, **seconds._asdict(), **sent._asdict()}
    if outcome is not None:
        line |= {name: value for name, value in outcome._asdict().items() if name != "discarded"}
        line |= {"members": list(outcome.members), "left_out": dict(outcome.left_out)}
    return line


def round_text(line: Line) -> str:
    """The printed line of an exchange; "" while none has ended.

    Example:
      >>> round_text({"round": 7, "members": ["a", "b"], "counted": True, "left_out": {}, "waited": 0.5, "up": 7400,
      ...             "down": 7400, "digest": "0123456789abcdef"})
      'round 7: members a b; waited 0.5 s; 7.4 kB up, 7.4 kB down; digest 01234567'
    """
    if "round" not in line:
        return ""
    members = " ".join(line["members"]) or "none"
    reason = "" if line["counted"] else f"; this node's message did not count: {line['reason']}"
    others = "".join(f"; {node} left out: {why}" for node, why in line["left_out"].items())
    return (
        f"round {line['round']}: members {members}{reason}{others}; waited {line['waited']:.1f} s; "
        f"{size(line['up'])} up, {size(line['down'])} down; digest {line['digest'][:8]}"
    )


def summarised(lines: Sequence[Line], bucket: str, node: str) -> dict[str, Any]:
    """A node's exchanges, for summary.json: seconds, bytes, requests and dollars of all its starts."""
    exchanges = [line for line in lines if "steps" in line]
    ended = [line for line in exchanges if "round" in line]
    counts = Counts(*(sum(line[name] for line in lines) for name in Counts._fields))
    local, wall = (sum(line[name] for line in exchanges) for name in ("local", "wall"))
    left_out = Counter(line["reason"].split(":")[0] for line in ended if not line["counted"])
    others = Counter(other for line in ended for other in line["left_out"])
    longest = max(ended, key=lambda line: line["waited"], default=None)
    newest = ended[-1] if ended else None
    return {
        "bucket": bucket,
        "node": node,
        "run": lines[-1]["run"] if lines else None,
        "closed": newest["number"] if newest else 0,
        "exchanges": len(ended),
        "counted": sum(line["counted"] for line in ended),
        "not_counted": dict(left_out),
        "others_left_out": dict(others),
        "members": newest["members"] if newest else [],
        "digest": newest["digest"] if newest else None,
        "tokens": sum(line["tokens"] for line in exchanges),
        "utilisation": local / wall if wall else None,
        "local_seconds": local,
        "wall_seconds": wall,
        "exchange_seconds": sum(line["exchange"] for line in exchanges),
        "waited_seconds": sum(line["waited"] for line in ended),
        "longest_wait": {"seconds": longest["waited"], "round": longest["round"]} if longest else None,
        "starts": sum("joined" in line for line in lines),
        **counts._asdict(),
        "dollars": dollars(counts)._asdict(),
    }
