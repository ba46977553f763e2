"""`run.json` and the first checkpoint: the first node decides, the others compare."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from jgc.rounds.arithmetic import Vector, shared_state
from jgc.rounds.context import Context, RoundsError, persistently
from jgc.rounds.messages import BadObject, opened, sealed
from jgc.rounds.names import CHECKPOINTS, ROUNDS, RUN, by_round, checkpoint_name, checkpoints_in
from jgc.rounds.replay import pack_checkpoint
from jgc.rounds.requests import Create, Get, List, Requests

SHOWN, NAMED = 60, 6  # characters of a value, and values, in a message


def compared_run(context: Context, settings: Mapping[str, Any]) -> Requests[str | None]:
    """The run's token if the run has begun, else None."""
    (data,) = yield from persistently(context, Get((RUN,)))
    if data is None:
        return None
    try:
        header = opened(data, context.secret)[0]
    except BadObject as error:
        raise RoundsError(f"{RUN}: {error}") from None
    if header.get("kind") != "run":
        raise RoundsError(f"{RUN} is not of a run of jgc.rounds")
    _compare(header["settings"], json.loads(json.dumps(settings)))  # tuples are lists there, too
    return header["run"]


def opened_run(context: Context, theta: Vector, settings: Mapping[str, Any]) -> Requests[str]:
    """The run's token. The first node makes it, with checkpoint 0 from its theta."""
    token = yield from compared_run(context, settings)
    if token is None:
        run = {"kind": "run", "run": secrets.token_hex(8), "settings": settings}
        yield from persistently(context, Create(RUN, sealed(run, {}, context.secret)))
        token = yield from compared_run(context, settings)  # this node's, or that of a faster one
    if token is None:
        raise RoundsError(f"the bucket forgets: {RUN} was written and cannot be read")
    # also if a different node made run.json, and was killed in between
    if not checkpoints_in((yield from persistently(context, List(CHECKPOINTS)))):
        # in this order: a node that announces itself in a round has seen a checkpoint
        begun = yield from persistently(context, List(ROUNDS))
        there = yield from persistently(context, List(CHECKPOINTS))
        if by_round(begun) and not checkpoints_in(there):
            raise RoundsError("the bucket forgets: it has rounds, and no checkpoint")
        first = shared_state(0, theta, context.outer.init(theta.size))
        data = pack_checkpoint(token, first, context.secret)
        yield from persistently(context, Create(checkpoint_name(0), data))
    return token


def _compare(run: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    different = [name for name in sorted({*run, *settings}) if run.get(name) != settings.get(name)]
    if different:
        pairs = [(x, _shown(run.get(x)), _shown(settings.get(x))) for x in different]
        values = "; ".join(f"{name}={there}, here {here}" for name, there, here in pairs[:NAMED])
        values += f"; and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
        raise RoundsError(f"the bucket has a run with other settings: {values}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
