"""`python -m jgc rounds close` and `clean`: a person's interventions in a run."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jgc.lab.rounds.history import History, is_good_checkpoint, read_history
from jgc.lab.rounds.opened import opened_bucket
from jgc.rounds.bucket import Bucket
from jgc.rounds.lists import RoundList, make_list, pack_list
from jgc.rounds.messages import BadObject, Message, read_message, secret_of_environment
from jgc.rounds.names import (
    CHECKPOINTS,
    CLOSE,
    ROUNDS,
    close_name,
    message_name,
    messages_in,
    number_of,
)
from jgc.training.errors import FAILED, UserError
from jgc.training.output.table import size

PERSON = "a-person"  # in the place of the node that made a list


@dataclass(frozen=True)
class Close:
    """Close the open round with the messages that have arrived, whatever quorum and grace say.

    For a run that waits below its quorum for nodes that will not come back. The nodes that run go on; in the next round
    they wait for the quorum again.

        python -m jgc rounds close s3://bucket/run7

        closed round 41 with a b; not waited for: c
    """

    bucket: Annotated[str, tyro.conf.Positional]
    """s3://..., gs://..., az://... or a folder"""

    def run(self, line: str) -> None:
        """Close the round."""
        with opened_bucket(self.bucket) as bucket:
            history = read_history(bucket, secret_of_environment(), 1)
            made = close_open(bucket, secret_of_environment(), history)
        missing = f"; not waited for: {' '.join(history.missing)}" if history.missing else ""
        others = "".join(f"; {node} left out: {why}" for node, why in made.left_out.items())
        print(f"closed round {made.round} with {' '.join(made.nodes)}{others}{missing}")


def close_open(bucket: Bucket, secret: bytes | None, history: History) -> RoundList:
    """Make the list of the open round, of all valid messages.

    Raises:
      UserError: no valid message has come, or a node made the list meanwhile.
    """
    number, run = history.number, history.run
    if history.lost:
        raise UserError(f"the bucket forgets: {close_name(history.lost[0])} is gone; no round was closed", FAILED)
    messages: dict[str, Message] = {}
    broken: dict[str, str] = {}
    names = messages_in(history.objects.get(number, {}))
    objects = bucket.get([message_name(number, *name) for name in names])
    for (node, attempt), data in zip(names, objects, strict=True):
        try:
            message = read_message(data or b"", run.token, node, number, run.shapes(number), secret)
            messages.setdefault(node, message._replace(attempt=attempt))
        except BadObject as error:
            broken[node] = str(error)
    broken = {node: why for node, why in broken.items() if node not in messages}
    if not messages:
        why = "".join(f"; {node}: {text}" for node, text in broken.items())
        raise UserError(f"round {number} has no message to close it with{why}", FAILED)
    # without the method nothing is decoded, so there are no outliers; nodes skip non-finite messages themselves
    norms, before = dict.fromkeys(messages, 0.0), history.lists[-1].nodes if history.lists else ()
    made = make_list(number, messages, norms, broken, 0.0, PERSON, before, False, 0.0)
    if not bucket.create(close_name(number), pack_list(run.token, made, secret)):
        raise UserError(f"round {number} was closed by a node meanwhile; nothing was done", FAILED)
    return made


@dataclass(frozen=True)
class Clean:
    """Delete old messages and checkpoints of a run.

    Nodes do that themselves when they write a checkpoint (--rounds.keep). Everything that a newcomer needs stays: the
    newest checkpoint, and the messages after it. Lists stay for good: a process that stood still for long must find
    its round closed. A node that was away for longer than N rounds comes back without its residual.

        python -m jgc rounds clean s3://bucket/run7 --keep 10

        deleted 124 messages and notices and 3 checkpoints, 21.9 MB
    """

    bucket: Annotated[str, tyro.conf.Positional]
    """s3://..., gs://..., az://... or a folder"""
    retained: Annotated[int, tyro.conf.arg(name="keep", prefix_name=False)] = 50
    """newest closed rounds whose messages stay"""

    def run(self, line: str) -> None:
        """Delete."""
        if self.retained < 0:
            raise UserError(f"--keep must be at least 0 rounds, got {self.retained}")
        with opened_bucket(self.bucket) as bucket:
            secret = secret_of_environment()
            names = old_names(bucket, secret, read_history(bucket, secret, 1), self.retained)
            bucket.delete(names)
        checkpoints = sum(name.startswith(f"{CHECKPOINTS}/") for name in names)
        total = size(sum(names.values()))
        print(f"deleted {len(names) - checkpoints} messages and notices and {checkpoints} checkpoints, {total}")


def old_names(bucket: Bucket, secret: bytes | None, history: History, retained: int) -> dict[str, int]:
    """Names and sizes of the objects that no node needs any more: never a list, never the newest good checkpoint.

    Raises:
      UserError: no checkpoint can be read, so every message is needed.
    """
    numbers = (x for x in reversed(history.checkpoints) if x <= history.number)
    newest = next((x for x in numbers if is_good_checkpoint(bucket, history.run, secret, x)), None)
    if newest is None:
        raise UserError("the bucket forgets: it has no checkpoint that can be read; nothing was deleted", FAILED)
    limit = min(newest, history.number - retained)
    objects = {**bucket.list(CHECKPOINTS), **bucket.list(ROUNDS)}

    def is_old(name: str) -> bool:
        number = number_of(name.split("/")[1])
        return number is not None and number < limit and not name.endswith(f"/{CLOSE}")

    return {name: length for name, length in objects.items() if is_old(name)}

