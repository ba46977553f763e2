"""Automatic learning-rate correction (EGC, Algorithm 2): a rate that falls when the validation loss stops falling.

    optimizer = optax.chain(optax.trace(0.9), learning_rate.by_validation(0.1, decay=0.1, patience=2))
    ...
    opt_state = learning_rate.corrected(opt_state, validation_loss)      # after every epoch

It is a part of the optimiser, whose state has the rate and is saved with it, and goes with any compressor.

Source: Kuang et al. 2020, "Entropy-based Gradient Compression for Distributed Deep Learning", Section IV-B,
Algorithm 2, equation (3).

Differs from the paper (`literal=True` has the way of Algorithm 2)
  1. `patience` losses in a row that are no better count, as the text says; in Algorithm 2 the count goes on over better
     ones.
  2. A loss is held against the best so far; Algorithm 2 remembers the last that was worse than the one remembered.
  3. The rate falls from its initial value, as in equation (3); in Algorithm 2 from the value that it has by then.
  4. i counts validation losses, one in an epoch or as often as `corrected` is called; equation (3) has epochs.
  5. The loss is that of data held out from training; the paper's is the test set's (`test_loader`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgc.types import Array, PyTree

SMALLEST, LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


class Correction(NamedTuple):
    """State of `by_validation`; settings ride along, so that `corrected` needs nothing but the loss.

    Attributes:
      learning_rate: f32[], of the steps that follow.
      loss: f32[], that the next one is held against; infinite before the first.
      worse: i32[], how many were no better.
      epoch: i32[], how many there were.
      initial: f32[], the rate at the start.
      decay, patience, least: f32[], i32[], f32[], t, n and min_lr of the paper.
      literal: bool[].
    """

    learning_rate: Array
    loss: Array
    worse: Array
    epoch: Array
    initial: Array
    decay: Array
    patience: Array
    least: Array
    literal: Array


def by_validation(
    learning_rate: float, decay: float = 0.1, patience: int = 1, min_learning_rate: float = 0.0, literal: bool = False
) -> optax.GradientTransformation:
    """Multiplies updates by minus a learning rate that `corrected` lowers.

    Args:
      learning_rate: at the start, gamma.
      decay: t: after epoch i the rate is gamma / (1 + t i).
      patience: n: so many validation losses in a row that are no better lower it.
      min_learning_rate: it does not fall below this.
      literal: to the letter of Algorithm 2.

    Raises:
      ValueError: a rate or decay that is not positive as a 32-bit float, a negative minimum or one above the rate,
        patience that is no whole number from 1 to 2**31 - 1.

    Example:
      >>> optimizer = by_validation(0.1, decay=1.0)
      >>> state = corrected(corrected(optimizer.init({}), 2.0), 2.5)  # the second epoch's loss is higher
      >>> float(state.learning_rate)  # 0.1 / (1 + 1.0 * 2)
      0.03333333507180214
    """
    for name, value in (("learning_rate", learning_rate), ("decay", decay)):
        if not SMALLEST <= value <= LARGEST:
            raise ValueError(f"{name} must be positive, got {value} (from {SMALLEST:.3g} to {LARGEST:.3g})")
    if not isinstance(patience, int | np.integer) or not 1 <= patience < 2**31:
        raise ValueError(f"patience must be at least 1, got {patience} (a whole number below 2**31)")
    if not 0 <= min_learning_rate <= learning_rate:
        raise ValueError(f"min_learning_rate must be from 0 to {learning_rate}, the first, got {min_learning_rate}")

    def init(params: PyTree) -> Correction:
        del params
        rate, least = jnp.float32(learning_rate), jnp.float32(min_learning_rate)
        return Correction(rate, jnp.float32(jnp.inf), jnp.int32(0), jnp.int32(0), rate, jnp.float32(decay),
                          jnp.int32(patience), least, jnp.bool_(literal))  # fmt: skip

    def update(updates: PyTree, state: Correction, params: PyTree = None) -> tuple[PyTree, Correction]:
        del params
        return jax.tree.map(lambda g: (-state.learning_rate * g).astype(g.dtype), updates), state

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def corrected(opt_state: PyTree, validation_loss: Array | float) -> PyTree:
    """The optimiser's state after an epoch with this validation loss; what is not of `by_validation` stays.

    Args:
      opt_state: of an optimiser with `by_validation` somewhere in it.
      validation_loss: f32[], the same in all processes. A loss that is not finite counts as
        worse; to the letter of Algorithm 2 NaN is neither worse nor better, and as the first loss it stays.
    """

    def one(x):
        return _correct(x, jnp.asarray(validation_loss, jnp.float32)) if isinstance(x, Correction) else x

    return jax.tree.map(one, opt_state, is_leaf=lambda x: isinstance(x, Correction))


def current(opt_state: PyTree) -> Array | None:
    """The learning rate that an optimiser's state holds, f32[]; None where there is no `by_validation` in it."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Correction))
    return next((x.learning_rate for x in leaves if isinstance(x, Correction)), None)


def _correct(state: Correction, loss: Array) -> Correction:
    """One turn of Algorithm 2's loop."""
    epoch, first = state.epoch + 1, state.epoch == 0
    better = loss < state.loss
    worse_literally = (loss > state.loss) & ~first
    worse = jnp.where(state.literal, state.worse + worse_literally, jnp.where(better, 0, state.worse + 1))
    best = jnp.where(better, loss, state.loss)
    remembered = jnp.where(state.literal, jnp.where(first | worse_literally, loss, state.loss), best)
    falls = worse >= state.patience
    start = jnp.where(state.literal, state.learning_rate, state.initial)
    rate = jnp.where(falls, start / (1 + state.decay * epoch), state.learning_rate)
    return state._replace(
        learning_rate=jnp.maximum(rate, state.least),
        loss=remembered,
        worse=jnp.where(falls, 0, worse),
        epoch=epoch,
    )
