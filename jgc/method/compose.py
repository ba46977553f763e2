"""Build methods from a codec (the payload), a memory (the residual) and an exchange (collectives).

    compressor = compose(codec, memory, exchange)

All-reduce adds payloads up before it decodes them, which is right only for linear codes; for any
other code `compose` raises ValueError.
"""

from functools import partial

import jax

from jgc.method import phases
from jgc.method.exchange import AGREED, Codec, Exchange, Stages, payload_sizes, vector_of
from jgc.method.from_step import from_step
from jgc.method.memory import Memory
from jgc.method.messages import both_ways, sizes_of
from jgc.types import Compressor, Phase


def compose(codec: Codec, memory: Memory, exchange: Exchange, form: str = "joined") -> Compressor:
    """A method with one phase, named after the codec.

    Raises:
      ValueError: the exchange adds payloads up and the codec is not linear.
    """
    return compose_phases(
        {codec.name: (codec, exchange)}, memory, phases.single(codec.name), form=form
    )


def compose_phases(
    stages: Stages,
    memory: Memory,
    schedule: tuple[Phase, ...],
    clip_norm: float = 0.0,
    form: str = "joined",
) -> Compressor:
    """A method with several phases over one memory.

    Args:
      stages: codec and exchange of every phase value.
      memory: the memory of each node.
      schedule: the phases.
      clip_norm: each node first clips its whole gradient to the norm clip_norm / sqrt(K); 0 for no
        clipping.

    Raises:
      ValueError: an exchange adds payloads up and its codec is not linear.
    """
    for codec, exchange in stages.values():
        if exchange.needs_linear and not codec.linear:
            raise ValueError(
                f"{exchange.name} adds payloads up, and the code {codec.name!r} is not linear: "
                "the sum would decode to a wrong gradient; use an exchange that gathers")

    def messages(phase, layers, nodes):
        codec, exchange = stages[phase]
        sent = exchange.messages(payload_sizes(codec, layers), nodes)
        if codec.agree is None:
            return sent
        # once up, once down
        agreed = jax.eval_shape(partial(codec.agree, layers=layers), vector_of(layers))
        return both_ways(sizes_of({AGREED: agreed})) + sent

    return from_step(None, memory=memory, schedule=schedule, messages=messages,
                     clip_norm=clip_norm, stages=stages, form=form)  # fmt: skip
