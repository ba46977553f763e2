"""`python -m jgc rounds show`: which nodes were in which round, which are late, and whether all agree."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from jgc.lab.rounds.history import History, read_history, senders_in, tokens_sent
from jgc.lab.rounds.opened import opened_bucket
from jgc.lab.shared.tables import table
from jgc.rounds.bucket import Bucket
from jgc.rounds.lists import RoundList, read_list
from jgc.rounds.messages import BadObject, secret_of_environment
from jgc.rounds.names import checkpoint_name, close_name, nodes_with
from jgc.rounds.replay import read_checkpoint
from jgc.training.errors import FAILED, UserError
from jgc.training.output.table import size


@dataclass(frozen=True)
class Show:
    """List a bucket's rounds: which nodes took part, which are late, goodput and digests.

    Reads lists and names, and the messages that did not count; changes nothing. With a secret, set JGC_ROUNDS_SECRET.

        python -m jgc rounds show s3://bucket/run7
        python -m jgc rounds show bucket --last 100 --json

        | round | members | left out | tokens | waited | closed by | digest |
        | ---: | --- | --- | ---: | ---: | --- | --- |
        | 41 | a b | | 15,360 | 5.0 | a, by the grace | 5dbb0bf4 |

    Exit code 1 if nodes disagreed on the parameters in one of these rounds, or its list is gone.
    """

    bucket: Annotated[str, tyro.conf.Positional]
    """s3://..., gs://..., az://... or a folder"""
    last: int = 20
    """closed rounds to show"""
    verify: bool = False
    """read the newest checkpoint, too, and compare its digest with the lists"""
    json: bool = False
    """print one JSON object instead"""

    def run(self, line: str) -> None:
        """Print the rounds."""
        if self.last < 1:
            raise UserError(f"--last must be at least 1, got {self.last}")
        with opened_bucket(self.bucket) as bucket:
            secret = secret_of_environment()
            history = read_history(bucket, secret, self.last)
            found = figures(history, *tokens_sent(bucket, secret, history))
            if self.verify:
                found["checkpoint"] = verified(bucket, secret, history)
        print(json.dumps(found, indent=2) if self.json else "\n".join(text(found)))
        if history.lost:
            numbers = " ".join(map(str, history.lost))
            raise UserError(f"the bucket forgets: rounds without a list, and later ones have theirs: {numbers}", FAILED)
        if found["dissent"]:
            raise UserError("nodes disagreed on the shared parameters: see the rounds with dissent above", FAILED)
        if found.get("checkpoint", {}).get("agrees") is False:
            number = found["checkpoint"]["round"]
            raise UserError(f"{checkpoint_name(number)} holds other parameters than the list of round {number} names: "
                            "delete it, and nodes that join start from the checkpoint before it", FAILED)  # fmt: skip


def figures(history: History, counted: int, lost: int) -> dict[str, Any]:
    """The page as plain data."""
    rounds: list[dict[str, Any]] = [
        {
            "round": x.round, "members": list(x.nodes), "left_out": left_out(history, x),
            "tokens": sum(entry.tokens for entry in x.members), "waited": x.waited, "closed_by": x.by, "full": x.full,
            "digest": x.theta, "bytes": sum(entry.size for entry in x.members),
        }
        for x in history.lists
    ]  # fmt: skip
    sent = counted + lost
    return {
        "run": history.run.token,
        "closed": history.number,
        "rounds": rounds,
        "nodes": nodes(history),
        "open": {"round": history.number, "came": history.senders, "missing": history.missing},
        "goodput": counted / sent if sent else None,
        "dissent": [x["round"] for x in rounds if "dissent" in x["left_out"].values()],
        "checkpoints": list(history.checkpoints),
    }


def left_out(history: History, closed: Any) -> dict[str, str]:
    """Nodes whose message does not count, with the reason; "late" if it came after the list."""
    late = [x for x in senders_in(history.objects.get(closed.round, {})) if not closed.counts(x)]
    return dict.fromkeys(late, "late") | dict(closed.left_out)


def nodes(history: History) -> dict[str, dict[str, Any]]:
    """For each node of these rounds: in how many it counted, the newest of them, and where it is now."""
    counted = Counter(node for x in history.lists for node in x.nodes)
    newest = {node: x.round for x in history.lists for node in x.nodes}
    names = history.objects.get(history.number, {})
    everyone = sorted({*counted, *history.senders, *history.missing, *nodes_with(names, "left")})
    return {
        node: {"counted": counted[node], "newest": newest.get(node), "now": _now(history, node)} for node in everyone
    }


def _now(history: History, node: str) -> str:
    number, names = history.number, history.objects.get(history.number, {})
    if node in history.senders:
        return f"has sent for round {number}"
    if node in nodes_with(names, "left"):
        return "has left"
    if node in history.missing:
        return f"round {number} waits for it"
    return "away"


def text(found: dict[str, Any]) -> list[str]:
    """The lines for people."""
    rows = [
        [x["round"], " ".join(x["members"]), ", ".join(f"{node}: {why}" for node, why in x["left_out"].items()),
         f"{x['tokens']:,}", f"{x['waited']:.1f}", x["closed_by"] + ("" if x["full"] else ", by the grace"),
         size(x["bytes"]), x["digest"][:8]]
        for x in found["rounds"]
    ]  # fmt: skip
    head = ["round", "members", "left out", "tokens", "waited", "closed by", "messages", "digest"]
    total, waits = len(found["rounds"]), found["open"]
    lines = [f"run {found['run']}: {found['closed']} rounds closed", "", table(head, rows), ""] if rows else []
    lines += [f"{node}: counted in {x['counted']} of {total} rounds; {x['now']}" for node, x in found["nodes"].items()]
    came = " ".join(waits["came"]) or "nobody"
    lines.append(f"open: round {waits['round']}; came: {came}; waits for: {' '.join(waits['missing']) or 'nobody'}")
    if found["goodput"] is not None:
        lines.append(f"goodput {found['goodput']:.3f}: tokens that count over tokens in messages that are still here")
    lines.append(f"checkpoints after rounds {' '.join(map(str, found['checkpoints'])) or '(none)'}")
    if found["dissent"]:
        lines.append(f"dissent in rounds {' '.join(map(str, found['dissent']))}")
    elif rows:
        lines.append("digests: the members of each round started from the same parameters")
    if "checkpoint" in found:
        checkpoint = found["checkpoint"]
        agrees = {
            True: "agrees with its list",
            False: "does NOT agree with its list",
            None: "can be read; its round is still open, or has no list here any more",
        }
        lines.append(f"checkpoint {checkpoint['round']} {agrees[checkpoint['agrees']]}")
    return lines


def _list_of(bucket: Bucket, history: History, number: int, secret: bytes | None) -> RoundList | None:
    """The list of a round, also of one older than the rounds that are shown."""
    (data,) = bucket.get([close_name(number)])
    try:
        return None if data is None else read_list(data, history.run.token, number, secret)
    except BadObject as error:
        raise UserError(f"{close_name(number)}: {error}", FAILED) from error


def verified(bucket: Bucket, secret: bytes | None, history: History) -> dict[str, Any]:
    """Whether the newest checkpoint is of its round, and has the digest that the round's list names; None without a
    list."""
    if not history.checkpoints:
        raise UserError("the bucket forgets: it has run.json, and no checkpoint", FAILED)
    number = history.checkpoints[-1]
    (data,) = bucket.get([checkpoint_name(number)])
    try:
        shared = read_checkpoint(data or b"", history.run.token, secret)
    except BadObject as error:
        raise UserError(f"{checkpoint_name(number)}: {error}", FAILED) from error
    closed = _list_of(bucket, history, number, secret)
    agrees = None if closed is None else (shared.number, shared.digest) == (number, closed.theta)
    return {"round": number, "digest": shared.digest, "agrees": agrees}
