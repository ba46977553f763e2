"""Algorithm 2 and equation (3) of the EGC paper, against plain Python on recorded losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgc.training.steps import learning_rate

RECORDED = {
    "falls and rises": [2.3, 1.9, 1.7, 1.75, 1.8, 1.6, 1.65, 1.62, 1.7, 1.5, 1.55],
    "flat": [1.0] * 8,
    "only falls": list(np.linspace(2, 1, 8)),
    "only rises": list(np.linspace(1, 2, 8)),
    "random": list(np.random.default_rng(0).normal(1, 0.1, 40)),
}


def algorithm_2(losses, gamma, t, n, min_lr):
    """To the letter; the first epoch's loss is val_loss."""
    k, val_loss, rates = 0, losses[0], []
    for i, val_loss_new in enumerate(losses, start=1):
        if val_loss_new > val_loss:
            k = k + 1
            val_loss = val_loss_new
        if k >= n:
            gamma, k = gamma / (1 + t * i), 0
        gamma = max(gamma, min_lr)
        rates.append(gamma)
    return rates


def equation_3(losses, gamma, t, n, min_lr):
    """As the text has it: n in a row no better than the best, from the initial rate."""
    rates, rate, best, k = [], gamma, np.inf, 0
    for epoch, loss in enumerate(losses, start=1):
        k = 0 if loss < best else k + 1
        best = min(best, loss)
        if k == n:
            rate, k = gamma / (1 + t * epoch), 0
        rate = max(rate, min_lr)
        rates.append(rate)
    return rates


@pytest.mark.parametrize("reference, literal", [(algorithm_2, True), (equation_3, False)])
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("name", RECORDED)
def test_rates_are_those_of_the_paper(name, patience, reference, literal):
    losses = np.float32(RECORDED[name])
    optimizer = learning_rate.by_validation(0.5, 0.3, patience, 0.1, literal)
    state, rates = optimizer.init({}), []
    for loss in losses:
        state = jax.jit(learning_rate.corrected)(state, loss)
        rates.append(float(learning_rate.current(state)))
    np.testing.assert_allclose(rates, reference(losses, 0.5, 0.3, patience, 0.1), rtol=1e-6)


def test_scales_updates_in_optax_chain():
    optimizer = optax.chain(optax.trace(0.9), learning_rate.by_validation(0.1, decay=1.0))
    plain = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.1))
    params = grads = {"w": jnp.arange(3.0), "half": jnp.ones(2, jnp.bfloat16)}
    state, other = optimizer.init(params), plain.init(params)
    for _ in range(2):
        got, state = jax.jit(optimizer.update)(grads, state, params)
        expected, other = plain.update(grads, other, params)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, grads)
        np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-6)
    state = learning_rate.corrected(learning_rate.corrected(state, 1.0), 1.0)
    after, _ = optimizer.update(grads, state, params)
    np.testing.assert_allclose(after["w"] / got["w"], [np.nan, *[1 / 3 * 2.71 / 1.9] * 2], rtol=1e-5)


def test_nan_loss_counts_as_worse():
    state = learning_rate.corrected(learning_rate.by_validation(1.0, 1.0).init({}), 1.0)
    assert float(learning_rate.corrected(state, np.nan).learning_rate) == pytest.approx(1 / 3)


def test_other_optimisers_stay_as_they_are():
    state = optax.adam(0.1).init({"w": jnp.ones(2)})
    assert learning_rate.current(state) is None
    assert jax.tree.all(jax.tree.map(np.array_equal, learning_rate.corrected(state, 1.0), state))


@pytest.mark.parametrize("settings, message", [
    ({"learning_rate": 0.0}, "learning_rate must be positive, got 0"),
    ({"learning_rate": 0.1, "decay": 0.0}, "decay must be positive, got 0"),
    ({"learning_rate": 1e39}, "learning_rate must be positive, got 1e.39 .from 1.18e-38 to 3.4e.38"),
    ({"learning_rate": 1e-46}, "learning_rate must be positive, got 1e-46"),
    ({"learning_rate": 0.1, "patience": 0}, "patience must be at least 1, got 0"),
    ({"learning_rate": 0.1, "patience": 2**31}, "patience must be at least 1, got 2147483648 .a whole number below"),
    ({"learning_rate": 0.1, "patience": 1.5}, "patience must be at least 1, got 1.5 .a whole number"),
    ({"learning_rate": 0.1, "min_learning_rate": 0.2}, "min_learning_rate must be from 0 to 0.1, .* got 0.2"),
])  # fmt: skip
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        learning_rate.by_validation(**settings)
