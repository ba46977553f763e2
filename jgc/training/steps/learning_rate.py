"""Automatic learning-rate correction (EGC, Algorithm 2): a rate that falls when the validation loss stops falling.

    optimizer = optax.chain(optax.trace(0.9), learning_rate.by_validation(0.1, decay=0.1, patience=2))
    ...
    opt_state = learning_rate.corrected(opt_state, validation_loss)      # after every epoch

It is a part of the optimiser, so checkpoints contain the rate, and it works with any compressor.

Source: Kuang et al. 2020, "Entropy-based Gradient Compression for Distributed Deep Learning", Section IV-B,
Algorithm 2, equation (3).

Differs from the paper (`literal=True` follows Algorithm 2 in 1 to 3)
  1. `patience` counts losses in a row that are no better, as in the text; Algorithm 2 does not reset the count after a
     better loss.
  2. A loss is compared with the best so far; Algorithm 2 compares with the last loss that was worse than its reference.
  3. The rate falls from its initial value, as in equation (3); Algorithm 2 divides the current rate.
  4. i counts calls of `corrected`; equation (3) counts epochs.
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
    """State of `by_validation`. It includes the settings, so `corrected` needs only the loss."""

    learning_rate: Array  # f32[], the current rate
    loss: Array  # f32[], the reference for the next loss; infinite before the first
    worse: Array  # i32[], losses in a row that were no better
    epoch: Array  # i32[], losses so far
    initial: Array  # f32[], the initial rate
    # f32[], i32[], f32[], t, n and min_lr of the paper
    decay: Array
    patience: Array
    least: Array
    literal: Array  # bool[]


def by_validation(
    learning_rate: float, decay: float = 0.1, patience: int = 1, min_learning_rate: float = 0.0, literal: bool = False
) -> optax.GradientTransformation:
    """A transformation that multiplies updates by minus a learning rate, which `corrected` lowers.

    The rate falls from gamma, `learning_rate`, to gamma / (1 + t i) after epoch i, t being the `decay`, when `patience`
    validation losses in a row are no better, and never below `min_learning_rate`. `literal`: as in Algorithm 2. Raises
    ValueError for a setting out of range.
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
    """The optimiser's state after a validation loss. Only the state of `by_validation` changes."""

    def one(x):
        return _correct(x, jnp.asarray(validation_loss, jnp.float32)) if isinstance(x, Correction) else x

    return jax.tree.map(one, opt_state, is_leaf=lambda x: isinstance(x, Correction))


def current(opt_state: PyTree) -> Array | None:
    """The learning rate in an optimiser's state, f32[]; None if it has no `by_validation`."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Correction))
    return next((x.learning_rate for x in leaves if isinstance(x, Correction)), None)


def _correct(state: Correction, loss: Array) -> Correction:
    """One iteration of Algorithm 2."""
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
        learning_rate=jnp.maximum(rate, state.least), loss=remembered, worse=jnp.where(falls, 0, worse), epoch=epoch
    )
