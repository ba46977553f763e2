"""A flipped bit of one copy of the train state is found, and device and array are named."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model
from training_helpers import tiny_config

from jgc.checks.misuse import leaves_by_path
from jgc.compress import LgcPs, TopK
from jgc.lab.chaos.tiny import flipped, with_flipped_bit
from jgc.loops.step_loop import Step
from jgc.nodes.layouts import make_nodes
from jgc.training.errors import Drift
from jgc.training.processes import drift
from jgc.training.run import loop, setup
from jgc.training.settings.config import LayersConfig


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(setup, "make_model", tiny_model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "int16"])
def test_checksum_sees_every_bit(dtype):
    rng, found = np.random.default_rng(0), jax.jit(drift.checksum)
    x = np.asarray(jnp.asarray(rng.integers(0, 2, 33), dtype))
    before = int(found(x))
    for bit in range(8 * x.nbytes) if dtype != "bool" else range(0, 8 * x.nbytes, 8):
        octets = x.copy().view(np.uint8)
        octets[bit // 8] ^= 1 << bit % 8
        assert int(found(octets.view(x.dtype))) != before
    assert int(found(np.roll(x, 1))) != before


def flip_anywhere(state, dice, wanted):
    """The state with a bit flipped in a copy of one of the arrays that `wanted` names; its name and device."""
    arrays = leaves_by_path(state, ".")
    name = dice.choice([name for name, x in arrays.items() if wanted(name) and x.size])
    device = dice.choice(jax.devices())
    arrays[name] = with_flipped_bit(arrays[name], device, dice.randrange(8 * arrays[name].nbytes))
    return jax.tree.unflatten(jax.tree.structure(state), arrays.values()), name, device


@pytest.mark.parametrize("layout", ["8 nodes", "4 nodes of 2 devices", "2 nodes of 4 devices, sharded"])
def test_200_flips_are_found_and_named(layout):
    changes = {
        "8 nodes": {},
        "4 nodes of 2 devices": {"nodes": 4, "devices_per_node": 2},
        "2 nodes of 4 devices, sharded": {
            "nodes": 2,
            "devices_per_node": 4,
            "layers": LayersConfig("", "", shard=True),
        },
    }[layout]
    built = setup.build(tiny_config(method=TopK(alpha=0.1), **{"nodes": 8, **changes}))
    replicas, dice = drift.Replicas(built.parts.nodes), random.Random(0)
    assert replicas.difference(built.state) == ""
    kinds = ["params."] if layout == "8 nodes" or "sharded" in layout else ["params.", "compressor.local"]
    for number in range(200):
        kind = kinds[number % len(kinds)]
        state, name, device = flip_anywhere(built.state, dice, lambda name, kind=kind: name.startswith(kind))
        found = replicas.difference(state)
        assert name in found and f"device {device.id}" in found, (name, device, found)
    assert len(replicas._programs) == 1


def test_a_residual_of_its_own_may_differ():
    built = setup.build(tiny_config(method=TopK(alpha=0.1), nodes=8))
    local = jax.tree.map(
        lambda x: x + jnp.arange(8, dtype=x.dtype).reshape(8, *[1] * (x.ndim - 1)), built.state.compressor.local
    )
    state = built.state._replace(compressor=built.state.compressor._replace(local=local))
    assert drift.Replicas(built.parts.nodes).difference(state) == ""


def test_one_device_has_nothing_to_compare():
    nodes = make_nodes(4, jax.devices()[:1])
    assert drift.Replicas(nodes).difference({"w": jnp.ones(3)}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["params", "opt_state", "compressor.shared"])
def test_run_stops_at_next_check(tmp_path, monkeypatch, where):
    step, steps, name = Step.__call__, [], []

    def flip_and_step(self, state, batch):
        steps.append(0)
        if len(steps) == 4:
            state, *found = flip_anywhere(state, random.Random(1), lambda name: name.startswith(where))
            name.extend(found)
        return step(self, state, batch)

    monkeypatch.setattr(Step, "__call__", flip_and_step)
    method = LgcPs(warmup_steps=2, autoencoder_steps=20, alpha=0.05)
    config = tiny_config(tmp_path, method=method, nodes=8, steps=20, checkpoint_every=3, check_replicas_every=1)
    with pytest.raises(Drift, match=r"stopped at step 4: .*; all agreed at the checkpoint of step 3 in") as error:
        loop.run(config)
    assert f"device {name[1].id} " in str(error.value)
    # A flip reaches other arrays in the step before the check: the optimiser's count the parameters, and a weight of
    # the autoencoder, which trains in this phase, all its weights.
    named = {"params": name[0], "opt_state": "", "compressor.shared": "compressor.shared"}[where]
    assert named in str(error.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]


@pytest.mark.slow
def test_checkpoint_is_checked_first(tmp_path, monkeypatch):
    """Without checks in between, a flip is found before it is saved."""
    step, steps = Step.__call__, []

    def flip_and_step(self, state, batch):
        steps.append(0)
        # the highest bit of the fraction: two updates may round a flip of a low one away
        if len(steps) == 4:
            state = flipped(state, "params.head.bias", jax.devices()[1], 22)
        return step(self, state, batch)

    monkeypatch.setattr(Step, "__call__", flip_and_step)
    config = tiny_config(tmp_path, method=TopK(alpha=0.1), nodes=8, checkpoint_every=3, check_replicas_every=0)
    with pytest.raises(Drift, match=r"stopped at step 6: "):
        loop.run(config)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
