"""The optimiser that updates the parameters with the aggregate, and the learning rate's schedule."""

import jax
import jax.numpy as jnp
import optax

from jgc.training.config import Config
from jgc.types import Compressor, PyTree

FLOOR = 0.01  # of the highest learning rate: where the cosine ends


def make_schedule(config: Config) -> optax.Schedule:
    """The learning rate as a function of the step, from 0 up over its warm-up and then down.

    Raises:
      ValueError: an unknown schedule.
    """
    peak, warmup = config.learning_rate, config.learning_rate_warmup
    rest = max(config.schedule_steps - warmup, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=FLOOR)
    elif config.schedule == "step":
        half, three_quarters = config.schedule_steps // 2 - warmup, config.schedule_steps * 3 // 4 - warmup
        after = optax.piecewise_constant_schedule(peak, {half: 0.1, three_quarters: 0.1})
    elif config.schedule == "halving":
        ends = [config.schedule_steps * i // 13 - warmup for i in range(4, 13)]
        after = optax.piecewise_constant_schedule(peak, dict.fromkeys(ends, 0.5))
    else:
        raise ValueError(f"schedule must be 'constant', 'cosine', 'step' or 'halving', got {config.schedule!r}")
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def make_optimizer(config: Config, compressor: Compressor) -> optax.GradientTransformation:
    """SGD or AdamW; without momentum where the compressor's memory has it.

    Raises:
      ValueError: Adam together with a compressor that owns the momentum.
    """
    rate = optax.scale_by_learning_rate(make_schedule(config))
    if config.optimizer == "adam":
        if compressor.owns_momentum:
            raise ValueError(
                "momentum correction keeps the momentum in the compressor's memory, and adam has one of its own: "
                "use --optimizer sgd or --compressor.no-momentum-correction"
            )
        decay = optax.add_decayed_weights(config.weight_decay, mask=lambda params: decayed(params, config.decay_all))
        return optax.chain(optax.scale_by_adam(), decay, rate)
    if compressor.owns_momentum or config.momentum == 0:
        return rate
    return optax.chain(optax.trace(config.momentum), rate)


def decayed(params: PyTree, decay_all: bool) -> PyTree:
    """Which parameters weight decay shrinks: True or False for each leaf."""
    return jax.tree.map(lambda p: decay_all or jnp.ndim(p) > 1, params)


def add_coupled_decay(grads: PyTree, params: PyTree, config: Config) -> PyTree:
    """A node's gradient with weight decay added, as SGD has it; before clipping, memory and compression."""
    if config.optimizer != "sgd" or config.weight_decay == 0:
        return grads
    mask = decayed(params, config.decay_all)
    return jax.tree.map(lambda g, p, m: g + config.weight_decay * p if m else g, grads, params, mask)
