"""Building blocks of methods: `from_step` for any method, `compose` for a codec, a memory and an
exchange.

The skeleton (`from_step`, `guard`, `compensate`) owns packing, memory, the skipped step, `Info`,
residuals by parameter, the default diagnostics and the physical bytes. `per_layer` combines
methods.
"""

from jgc.method.compose import compose, compose_phases
from jgc.method.exchange import Codec, Exchange
from jgc.method.from_step import Layers, Step, dense_step, from_step
from jgc.method.per_layer import per_layer

__all__ = [
    "Codec", "Exchange", "Layers", "Step", "compose", "compose_phases", "dense_step", "from_step",
        "per_layer",
]  # fmt: skip
