"""The optimiser and the learning rate's schedule."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgc.training.settings.config import Config, method_name
from jgc.training.steps.learning_rate import by_validation, current
from jgc.types import Array, PyTree

FLOOR = 0.01  # of the highest learning rate: where the cosine ends
POWER = 0.9  # of the polynomial: PSPNet's (Zhao et al. 2017, Section 5.1)


def make_schedule(config: Config) -> optax.Schedule:
    """The learning rate as a function of the step: a linear warm-up, then the decay.

    With `validation` it is a factor (1 after the warm-up) of the rate in the optimiser's state.
    """
    peak, warmup = config.learning_rate, config.learning_rate_warmup
    if config.schedule == "validation":
        peak = 1.0
    rest = max(config.schedule_steps - warmup, 1)

    def falling(factor: float, numbers: Iterable[int], parts: int) -> optax.Schedule:
        """Multiply by a factor at these parts of the schedule; of a short schedule several may coincide."""
        ends = [config.schedule_steps * i // parts - warmup for i in numbers]
        return optax.piecewise_constant_schedule(peak, {end: factor ** ends.count(end) for end in ends})

    schedules: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "validation": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=FLOOR),
        "step": lambda: falling(0.1, (2, 3), 4),
        "thirds": lambda: falling(0.1, (1, 2), 3),
        "halving": lambda: falling(0.5, range(4, 13), 13),
        "poly": lambda: optax.polynomial_schedule(peak, 0.0, POWER, rest),
    }
    if config.schedule not in schedules:
        raise ValueError(f"schedule must be one of {', '.join(schedules)}, got {config.schedule!r}")
    after = schedules[config.schedule]()
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def make_inner(config: Config) -> optax.GradientTransformation:
    """The inner optimiser of local steps: SGD's decay, clipping of the node's gradient, then SGD or AdamW."""
    before = []
    if config.optimizer == "sgd" and config.weight_decay:
        decay = partial(decayed, decay_all=config.decay_all)
        before.append(optax.add_decayed_weights(config.weight_decay, mask=decay))
    if config.clip_norm:
        before.append(optax.clip_by_global_norm(config.clip_norm))
    return optax.chain(*before, make_optimizer(config, owns_momentum=False))


def make_outer(config: Config) -> optax.GradientTransformation:
    """The outer optimiser of local steps: SGD, with Nesterov momentum unless that is 0."""
    momentum = config.local.outer_momentum
    return optax.sgd(config.local.outer_learning_rate, momentum=momentum or None, nesterov=momentum > 0)


def make_optimizer(config: Config, owns_momentum: bool) -> optax.GradientTransformation:
    """SGD, AdamW or Muon; SGD without momentum if the compressor owns the momentum."""
    rate = make_rate(config)
    if config.optimizer != "sgd":
        if owns_momentum:
            option, entry = "--optimizer sgd", "optimizer=sgd"
            if getattr(config.compressor, "momentum_correction", False):
                option += " or --compressor.no-momentum-correction"
                entry += f" or {method_name(config.compressor)}.momentum_correction=false"
            both = f"both the compressor's memory and {config.optimizer}"
            raise ValueError(f"{both} have a momentum: use {option} (after --set: {entry})")
        decay = optax.add_decayed_weights(config.weight_decay, mask=lambda params: decayed(params, config.decay_all))
        adam = config.optimizer == "adam"
        return optax.chain(optax.scale_by_adam(b2=config.adam_beta2) if adam else muon(config), decay, rate)
    if owns_momentum or config.momentum == 0:
        return rate
    return optax.chain(optax.trace(config.momentum), rate)


def muon(config: Config) -> optax.GradientTransformation:
    """Directions of `optax.contrib.muon` for kernels, as large as Adam's, so that Adam's learning rate fits; Adam for
    embeddings, the last layer, biases and norms.

    Source: Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982), Section 2.2: updates of a root mean
    square of 0.2.
    """
    # The rate, with its sign, comes later. Adam is a part by itself: in optax's `muon` it has Nesterov momentum.
    kernels = optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=_matrices)
    return optax.partition({True: kernels, False: optax.scale_by_adam(b2=config.adam_beta2)}, _is_kernel)


def _is_kernel(params: PyTree) -> PyTree:
    def is_kernel(path: Any, x: Array) -> bool:
        names = [key.key for key in path]
        return names[-1] == "kernel" and "head" not in names and x.ndim > 1

    return jax.tree_util.tree_map_with_path(is_kernel, params)


def _matrices(kernels: PyTree) -> PyTree:
    """Each kernel as a matrix [all axes but the last, outputs]."""
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(tuple(range(x.ndim - 1)), (x.ndim - 1,)), kernels)


def make_rate(config: Config) -> optax.GradientTransformation:
    """A transformation that multiplies updates by minus the learning rate."""
    schedule = make_schedule(config)
    if config.schedule != "validation":
        return optax.scale_by_learning_rate(schedule)
    how = config.correction
    falling = by_validation(config.learning_rate, how.decay, how.patience, how.min_learning_rate, how.literal)
    return optax.chain(optax.scale_by_schedule(schedule), falling)


def rate_of(schedule: optax.Schedule, opt_state: PyTree, step: Array) -> Array:
    """The learning rate of a step, f32[]."""
    held = current(opt_state)
    return jnp.asarray(schedule(step), jnp.float32) * (1 if held is None else held)


def decayed(params: PyTree, decay_all: bool) -> PyTree:
    """True for each leaf that weight decay applies to."""
    return jax.tree.map(lambda p: decay_all or jnp.ndim(p) > 1, params)


def add_coupled_decay(grads: PyTree, params: PyTree, config: Config) -> PyTree:
    """A node's gradient with SGD's weight decay, before clipping, memory and compression."""
    if config.optimizer != "sgd" or config.weight_decay == 0:
        return grads
    mask = decayed(params, config.decay_all)
    return jax.tree.map(lambda g, p, m: g + config.weight_decay * p if m else g, grads, params, mask)
