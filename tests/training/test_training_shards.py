"""Runs whose nodes have several devices, which divide the parameters."""

import jax
import numpy as np
import pytest
from tiny import tiny_conv_model
from training_helpers import tiny_config

from jgc.compress import Dense, Dgc, TopK
from jgc.nodes.placement import Sharded
from jgc.training.errors import UserError
from jgc.training.output.metrics import read
from jgc.training.run import checkpoint, loop, setup as building
from jgc.training.settings.config import CorrectionConfig, DataConfig, LayersConfig, check, resolve
from jgc.training.steps import step as steps

WHOLE = {"layers": LayersConfig(dense="", top_k="")}
DIVIDED = {"devices_per_node": 4, "layers": LayersConfig(dense="", top_k="", shard=True)}
SPARSE = TopK(alpha=0.2, warmup_steps=2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(building, "make_model", tiny_conv_model)


def losses(path):
    return [line["loss"] for line in read(path / "metrics.jsonl")]


def arrays(path):
    found = checkpoint.restore(checkpoint.open_manager(path))
    return found.arrays


@pytest.mark.slow
def test_uncompressed_run_equals_that_of_whole_parameters(tmp_path):
    """With clipping, whose norm is that of all shards."""
    for name, more in (("whole", WHOLE), ("divided", DIVIDED)):
        assert loop.run(tiny_config(tmp_path / name, compressor=Dense(), clip_norm=0.5, **more)) == 0
    np.testing.assert_allclose(losses(tmp_path / "divided"), losses(tmp_path / "whole"), rtol=1e-4)
    whole = arrays(tmp_path / "whole")
    for name, x in arrays(tmp_path / "divided").items():
        if name.startswith(("params", "opt_state")):
            np.testing.assert_allclose(x, whole[name], rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", [SPARSE, Dgc(alpha=0.2, warmup_steps=2, clip_norm=1.0)], ids=["topk", "dgc"])
def test_resume_is_exact(tmp_path, method):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert loop.run(tiny_config(whole, compressor=method, **DIVIDED)) == 0
    assert loop.run(tiny_config(parts, compressor=method, steps=3, **DIVIDED)) == 0
    assert loop.run(tiny_config(parts, compressor=method, resume=True, **DIVIDED)) == 0
    expected = arrays(whole)
    found = arrays(parts)
    assert found.keys() == expected.keys() and any(".parts." in name for name in found)
    assert all(found[name].tobytes() == x.tobytes() for name, x in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "validation"])
def test_validation_leaves_the_state_divided(tmp_path, schedule):
    held_out = {"data": DataConfig(name="digits", validation=0.2), "correction": CorrectionConfig(every=1)}
    assert loop.run(tiny_config(tmp_path, compressor=SPARSE, schedule=schedule, **held_out, **DIVIDED)) == 0
    assert all("validation_loss" in line for line in read(tmp_path / "metrics.jsonl"))


def test_state_and_optimiser_stay_divided(tmp_path):
    setup = building.build(resolve(tiny_config(tmp_path, compressor=SPARSE, **DIVIDED)))
    placements = steps.placements_by_name(setup.state)
    divided = [x for x in jax.tree.leaves(placements["params"]) if isinstance(x, Sharded)]
    assert divided and len(divided) == sum(isinstance(x, Sharded) for x in jax.tree.leaves(placements["opt_state"]))
    (residual, *_) = jax.tree.leaves(
        setup.state.compressor.local.parts[setup.state.compressor.local.axes.index(("jgc_fast",))]
    )
    values = sum(
        x.size
        for x, placement in zip(jax.tree.leaves(setup.state.params), jax.tree.leaves(placements["params"]), strict=True)
        if isinstance(placement, Sharded)
    )
    assert residual.addressable_shards[0].data.size == values / 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layers": LayersConfig(shard=True)}, "--layers.shard shards parameters over the devices of a node: give"),
        (
            {"devices_per_node": 3},
            "--devices-per-node 3 does not divide the 8 examples of a node; --batch-size 18 would",
        ),
        ({"devices_per_node": 0}, "--devices-per-node must be at least 1, got 0"),
    ],
)
def test_wrong_devices_are_one_line(tmp_path, more, message):
    with pytest.raises(UserError) as error:
        check(resolve(tiny_config(tmp_path, compressor=SPARSE, batch_size=16, **more)))
    assert message in str(error.value)


def test_more_devices_than_there_are_is_one_line(tmp_path):
    with pytest.raises(UserError, match="2 nodes of 8 devices need 16 devices, got 8"):
        building.build(resolve(tiny_config(tmp_path, compressor=SPARSE, batch_size=16, devices_per_node=8)))
