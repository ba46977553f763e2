"""Trains one model of each of five packages by jgc, on one device and on eight: losses, and how far the two runs part.

In an environment of its own, for these packages ask for others of JAX:

    pip install -e . dm-haiku diffrax optimistix numpyro flowjax
    python tests/foreign_packages.py

Each has a loop or branch that begins with a constant, which JAX's check of `shard_map` refuses.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import importlib.metadata
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import flowjax.bijections
import flowjax.distributions
import flowjax.flows
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import optimistix
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import jgc

K, B, STEPS = 8, 16, 60
Loss = Callable[[Any, Any], jax.Array]


def haiku() -> tuple[Any, Loss, Callable[[int], Any]]:
    """An LSTM with `hk.dynamic_unroll`: the running sum of a sequence, bounded."""

    def network(x):  # [B, T, 1]
        core = hk.LSTM(16)
        y, _ = hk.dynamic_unroll(core, jnp.swapaxes(x, 0, 1), core.initial_state(x.shape[0]))
        return jnp.swapaxes(hk.Linear(1)(y), 0, 1)

    model = hk.without_apply_rng(hk.transform(network))

    def batch_of(step):
        x = np.random.default_rng(step).normal(size=(K, B, 10, 1)).astype(np.float32)
        return {"x": x, "y": np.tanh(x.cumsum(2) / 3)}

    params = model.init(jax.random.key(0), jnp.zeros((B, 10, 1)))
    return params, lambda p, b: jnp.mean((model.apply(p, b["x"]) - b["y"]) ** 2), batch_of


def neural_ode() -> tuple[Any, Loss, Callable[[int], Any]]:
    """A neural ODE by an adaptive solver of diffrax: the end of a damped oscillation."""
    params, rest = eqx.partition(eqx.nn.MLP(2, 2, 16, 1, jnp.tanh, key=jax.random.key(0)), eqx.is_inexact_array)

    def loss(p, b):
        field = eqx.combine(p, rest)

        def end(y):
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, _: field(y)), diffrax.Tsit5(), 0.0, 1.0, 0.1, y,
                stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
            )  # fmt: skip
            return solution.ys[-1]

        return jnp.mean((jax.vmap(end)(b) - b @ jnp.array([[0.4, -0.7], [0.7, 0.4]])) ** 2)

    return params, loss, lambda step: np.random.default_rng(step).normal(size=(K, B, 2)).astype(np.float32)


def fixed_point() -> tuple[Any, Loss, Callable[[int], Any]]:
    """A layer whose output is a fixed point, which optimistix finds and differentiates implicitly."""
    random = np.random.default_rng(0)
    params = {name: (random.normal(size=(8, 8)) / 8).astype(np.float32) for name in ("inner", "input", "output")}

    def loss(p, b):
        def layer(x):
            solver = optimistix.FixedPointIteration(rtol=1e-5, atol=1e-5)
            point = optimistix.fixed_point(lambda z, _: jnp.tanh(p["inner"] @ z + p["input"] @ x), solver, jnp.zeros(8))
            return p["output"] @ point.value

        return jnp.mean((jax.vmap(layer)(b) - jnp.sin(b)) ** 2)

    return params, loss, lambda step: np.random.default_rng(step).normal(size=(K, B, 8)).astype(np.float32)


def numpyro_svi() -> tuple[Any, Loss, Callable[[int], Any]]:
    """Variational inference in numpyro, with a plate that draws a part of the examples."""
    weights = np.array([1.0, -2.0, 0.5], np.float32)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("examples", x.shape[0], subsample_size=x.shape[0] // 2) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    x = jnp.ones((B, 3))
    state = svi.init(jax.random.key(0), x, x[:, 0])
    params = svi.optim.get_params(state.optim_state)

    def loss(p, b):
        elbo = Trace_ELBO().loss(b["key"][0], svi.constrain_fn(p), svi.model, svi.guide, b["x"], b["y"])
        return elbo / B

    def batch_of(step):
        x = np.random.default_rng(step).normal(size=(K, B, 3)).astype(np.float32)
        return {"x": x, "y": x @ weights, "key": jax.random.split(jax.random.key(step), (K, B))}

    return params, loss, batch_of


def flow() -> tuple[Any, Loss, Callable[[int], Any]]:
    """A masked autoregressive flow of flowjax, fitted to two moons' cousin: a bent Gaussian."""
    model = flowjax.flows.masked_autoregressive_flow(
        jax.random.key(0), base_dist=flowjax.distributions.Normal(jnp.zeros(2)), flow_layers=2, nn_width=16
    )
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def batch_of(step):
        x = np.random.default_rng(step).normal(size=(K, B, 2)).astype(np.float32)
        return np.stack([x[..., 0], x[..., 1] / 2 + x[..., 0] ** 2], -1)

    return params, lambda p, b: -jnp.mean(eqx.combine(p, rest).log_prob(b)), batch_of


def train(case: Callable[[], tuple[Any, Loss, Callable[[int], Any]]], devices: int) -> tuple[list[float], Any]:
    """The losses of all steps, and the last parameters."""
    params, loss, batch_of = case()
    nodes = jgc.make_nodes(K, devices=jax.devices()[:devices])
    init, step = jgc.make_step(loss, jgc.compress.topk(alpha=0.25), optax.adam(0.01), nodes, unroll=False)
    state, losses = init(jax.random.key(0), params), []
    for i in range(STEPS):
        state, metrics = step(state, batch_of(i))
        losses.append(float(metrics.loss))
    return losses, state.params


def main() -> None:
    """What the module says."""
    for case, package in ((haiku, "dm-haiku"), (neural_ode, "diffrax"), (fixed_point, "optimistix"),
                          (numpyro_svi, "numpyro"), (flow, "flowjax")):  # fmt: skip
        losses, _ = train(case, 8)
        alone, _ = train(case, 1)
        first, last = np.mean(losses[:5]), np.mean(losses[-5:])
        apart = max(abs(a - b) / (1 + abs(b)) for a, b in zip(losses[:3], alone[:3], strict=True))
        version, end = importlib.metadata.version(package), np.mean(alone[-5:])
        print(f"{package} {version}: loss {first:.4f} to {last:.4f} in {STEPS} steps on eight devices, "
              f"{end:.4f} on one; the first three steps differ by {apart:.1e}", flush=True)  # fmt: skip
        assert last < first, f"{package} does not learn"
        assert apart < 1e-5, f"{package}: eight devices compute something else than one"


if __name__ == "__main__":
    main()
