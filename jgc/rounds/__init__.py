"""Rounds over an object store: nodes that come and go, with nothing but a bucket between them.

    rounds = jgc.rounds.join("s3://bucket/run7", node="paris", params=params,
                             compressor=jgc.compress.qsgd(bits=4), quorum=2, total=500)
    params = rounds.params
    while rounds.number < 500:
        for batch in batches(30):
            params, opt_state = inner_step(params, opt_state, batch)
        params, outcome = rounds.exchange(params, tokens=30 * batch_tokens)
    rounds.leave()

`bucket` and `names` say what lies where, `arithmetic` what all nodes compute alike; `protocol` has
the rules, and `closing`, `replay` and `opening` their parts, as generators of `requests`.
"""

from jgc.rounds.arithmetic import AdamW, Sgd
from jgc.rounds.bucket import BucketError, NoBucket, open_bucket
from jgc.rounds.context import RoundsError, Rules, Timeout, Twin
from jgc.rounds.joining import check, join
from jgc.rounds.loop import Rounds
from jgc.rounds.outcome import Outcome

__all__ = [
    "AdamW", "BucketError", "NoBucket", "Outcome", "Rounds", "RoundsError", "Rules", "Sgd",
    "Timeout", "Twin", "check", "join", "open_bucket",
]  # fmt: skip
