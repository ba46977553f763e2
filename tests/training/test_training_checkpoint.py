"""Checkpoints: round trips, damaged files, other numbers of nodes, one-line errors."""

import gc
import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_helpers import small_files

from jgc.loops.step_loop import LoopState
from jgc.training.errors import NonFinite, UserError
from jgc.training.run import checkpoint
from jgc.training.run.sane import Proof
from jgc.training.steps.step import arrays_by_name
from jgc.types import Phase, State

# a failed read or write of Orbax leaves callbacks for an event loop that is gone
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HOST = {"config": {"nodes": 4}}


def state_of(value=0.0, nodes=4):
    residual = jnp.arange(nodes * 3, dtype=jnp.float32).reshape(nodes, 3) + value
    local = {"residual": residual, "bfloat16": residual.astype(jnp.bfloat16), "float16": residual.astype(jnp.float16)}
    shared = (
        {"decoders": jnp.arange(nodes * 2.0).reshape(nodes, 2), "step": jnp.int32(7)},
        jax.random.key(3),
        jnp.zeros((0,)),
    )
    params = {"layer/1": {"kernel": jnp.full((2, 3), value), "b.ias": jnp.ones(2, jnp.bfloat16)}}
    model_state = {"batch_stats": {"mean": jnp.full((nodes, 2), value)}}
    phase = Phase("dense", 0, "dense")
    return LoopState(0, phase, params, (), State(shared, local), jax.random.key(0), model_state)


def saved(path, *values):
    manager = checkpoint.open_manager(path)
    for step, value in enumerate(values, start=1):
        write(manager, step, state_of(value))
    return manager


def write(manager, step, state, host=HOST, proof=None):
    proof = proof or Proof()
    checkpoint.save(manager, step, state, host, proof)
    checkpoint.finish(manager, proof)


def same(a, b):
    pairs = zip(*(jax.tree.leaves(arrays_by_name(state)) for state in (a, b)), strict=True)
    bits = ((checkpoint.flatten([x]), checkpoint.flatten([y])) for x, y in pairs)
    return all(x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x) for x, y in bits)


def largest_file(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_round_trip(tmp_path):
    manager = saved(tmp_path, 1.5, 2.5, 3.5)
    assert manager.all_steps() == [2, 3]  # the newest and one to fall back on
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    assert (found.step, found.damaged, found.host["config"]) == (3, (), {"nodes": 4})
    assert same(checkpoint.fit(state_of(), found, nodes=4), state_of(3.5))


def test_no_checkpoint(tmp_path):
    assert checkpoint.restore(checkpoint.open_manager(tmp_path)) is None


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "host", "missing"])
def test_damaged_checkpoint_falls_back(tmp_path, damage):
    saved(tmp_path, 1.0, 2.0)
    folder = tmp_path / checkpoint.FOLDER / "2"
    file = largest_file(folder / "host") if damage == "host" else largest_file(folder / "state")
    data = file.read_bytes()
    if damage == "missing":
        shutil.rmtree(folder / "state")
    elif damage == "flipped":
        found = data.find(np.float32(14.0).tobytes())  # in the array as it is saved, if that is not compressed
        at = found if found >= 0 else len(data) // 2
        file.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    else:
        file.write_bytes(b"" if damage == "emptied" else data[: len(data) // 2])
    manager = checkpoint.open_manager(tmp_path)
    found = checkpoint.restore(manager)
    assert found.step == 1 and "checkpoint 2 is damaged" in found.damaged[0]
    assert same(checkpoint.fit(state_of(), found, nodes=4), state_of(1.0))
    assert (tmp_path / checkpoint.DAMAGED / "2-0").is_dir()
    write(manager, 2, state_of(5.0))  # and its step can be saved anew
    assert checkpoint.restore(checkpoint.open_manager(tmp_path)).step == 2


def plain_file(folder):
    """The file of a checkpoint that holds its plain data."""
    return next(f for f in (folder / "host").rglob("*") if f.is_file() and b'"arrays"' in f.read_bytes())


@pytest.mark.parametrize(
    "old, new",
    [
        ('"step"', '"stop"'),
        ('"config"', '"konfig"'),
        ('"nodes": 4', '"nodes": 5'),
        ('"checksum"', '"chocksum"'),
        ('"good"', '"bad"'),
        ('"arrays"', '"array"'),
        ('"step": 2', '"step": 3'),
    ],
)
def test_changed_plain_data_fall_back(tmp_path, old, new):
    """JSON that stays valid: a checksum alone tells."""
    saved(tmp_path, 1.0, 2.0)
    file = plain_file(tmp_path / checkpoint.FOLDER / "2")
    text = json.dumps(json.loads(file.read_text()))
    assert old in text
    file.write_text(text.replace(old, new, 1))
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    assert found.step == 1 and "checkpoint 2 is damaged" in found.damaged[0]
    assert same(checkpoint.fit(state_of(), found, nodes=4), state_of(1.0))


def test_renamed_checkpoint_falls_back(tmp_path):
    saved(tmp_path, 1.0, 2.0)
    folder = tmp_path / checkpoint.FOLDER
    (folder / "2").rename(folder / "9")
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    assert found.step == 1
    told = "checkpoint 9 is damaged (ValueError: it belongs to step 2, not to the step of its folder)"
    assert found.damaged == (told,)


def test_checkpoint_of_another_run_falls_back(tmp_path):
    saved(tmp_path, 1.0, 2.0)

    def check(found):
        if found.step == 2:
            raise UserError("its seed is 1")

    found = checkpoint.restore(checkpoint.open_manager(tmp_path), check)
    assert (found.step, found.damaged) == (1, ("checkpoint 2 is not of this run: its seed is 1",))
    assert (tmp_path / checkpoint.DAMAGED / "2-0").is_dir()


def test_last_good_checkpoint_is_kept_until_a_later_one_has_proved_itself(tmp_path):
    manager, proof = checkpoint.open_manager(tmp_path), Proof()
    kept = []
    for step, loss in enumerate([2.3, 2.2, 2.1, 1e18, 1e18, np.inf, 1e18, 2.0, 1.9], start=1):
        proof.follow(step, loss)
        write(manager, step, state_of(float(step)), HOST, proof)
        kept.append((sorted(manager.all_steps()), proof.good))
    assert kept[3:7] == [([2, 3, 4], 2), ([2, 4, 5], 2), ([2, 5, 6], 2), ([2, 6, 7], 2)]
    assert kept[7:] == [([7, 8], 7), ([8, 9], 8)]
    again = checkpoint.open_manager(tmp_path)
    found = checkpoint.restore(again)
    goes_on = checkpoint.proof_of(again, found)
    assert (goes_on.first, goes_on.newest, goes_on.good) == (2.3, 9, 8)
    assert "last good checkpoint is that of step 8 in" in checkpoint.kept(again, goes_on)


def test_all_checkpoints_damaged(tmp_path):
    saved(tmp_path, 1.0)
    largest_file(tmp_path / checkpoint.FOLDER / "1" / "state").write_bytes(b"")
    with pytest.raises(UserError, match=r"no whole checkpoint.*checkpoint 1 is damaged"):
        checkpoint.restore(checkpoint.open_manager(tmp_path))
    assert (tmp_path / checkpoint.FOLDER / "1").is_dir()


def test_half_written_checkpoint(tmp_path):
    saved(tmp_path, 1.0)
    (tmp_path / checkpoint.FOLDER / "2.orbax-checkpoint-tmp").mkdir()
    manager = checkpoint.open_manager(tmp_path)
    assert checkpoint.restore(manager).step == 1
    write(manager, 2, state_of(2.0))
    assert sorted(manager.all_steps()) == [1, 2]


def test_non_finite_parameters_not_saved(tmp_path):
    manager = saved(tmp_path, 1.0)
    with pytest.raises(NonFinite, match=r"step 2: a parameter has become NaN.*last good checkpoint is that of step 1"):
        checkpoint.save(manager, 2, state_of(np.nan), HOST, Proof(2.3, newest=1, good=1))
    assert manager.all_steps() == [1]


@pytest.mark.parametrize("nodes", [2, 8])
def test_new_node_count_keeps_mean(tmp_path, nodes):
    saved(tmp_path, 1.0)
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    got, before = checkpoint.fit(state_of(nodes=nodes), found, nodes), state_of(1.0)
    for new, old in (
        (got.compressor.local["residual"], before.compressor.local["residual"]),
        (got.model_state["batch_stats"]["mean"],) * 2,
    ):
        assert new.shape[0] == nodes
        np.testing.assert_allclose(new.mean(axis=0), old.mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(
        got.compressor.shared[0]["decoders"], np.resize(before.compressor.shared[0]["decoders"], (nodes, 2))
    )


def test_repeated_node_changes_keep_mean(tmp_path):
    """Residuals will be applied as their mean over the nodes, so that mean must survive any number of nodes."""

    def kept(state):
        return {name: np.asarray(x, np.float32).mean(axis=0) for name, x in state.compressor.local.items()}

    before = state_of(1.0)
    state, nodes = before, 4
    for step, new in enumerate((3, 8), start=1):
        manager = checkpoint.open_manager(tmp_path)
        write(manager, step, state, {"config": {"nodes": nodes}})
        found = checkpoint.restore(manager)
        state, nodes = checkpoint.fit(state_of(nodes=new), found, new), new
        assert state.compressor.local["residual"].shape == (new, 3)
        for name, mean in kept(state).items():
            np.testing.assert_allclose(mean, kept(before)[name], rtol=1e-6)
        decoders = np.resize(before.compressor.shared[0]["decoders"], (3, 2))  # one is dropped, new ones copied
        np.testing.assert_array_equal(state.compressor.shared[0]["decoders"], np.resize(decoders, (new, 2)))


def test_vectors_in_tiles_fit_those_of_other_devices(tmp_path):
    def on_tpu(state):
        tiles = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 1021))).reshape(-1, 8, 128), state.compressor.local)
        return state._replace(compressor=state.compressor._replace(local=tiles))

    for i, (wrote, reads) in enumerate([(on_tpu, lambda state: state), (lambda state: state, on_tpu)]):
        manager = checkpoint.open_manager(tmp_path / str(i))
        write(manager, 1, wrote(state_of(3.5)))
        for nodes in (4, 2):
            got = checkpoint.fit(reads(state_of(nodes=nodes)), checkpoint.restore(manager), nodes)
            residual = np.asarray(reads(state_of(3.5)).compressor.local["residual"])
            expected = residual if nodes == 4 else np.broadcast_to(residual.mean(0), (2, *residual.shape[1:]))
            np.testing.assert_array_equal(got.compressor.local["residual"], expected)


def test_mismatched_checkpoint(tmp_path):
    saved(tmp_path, 1.0)
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    other = state_of()._replace(params={"layer/1": {"kernel": jnp.zeros((2, 4)), "b.ias": jnp.ones(2, jnp.bfloat16)}})
    with pytest.raises(UserError, match=r"params.layer/1.kernel should be float32\[2, 4\] and is float32\[2, 3\]"):
        checkpoint.fit(other, found, nodes=4)


def test_full_disk(tmp_path):
    manager = saved(tmp_path, 1.0)
    big = state_of()._replace(
        params={"layer/1": {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=100_000))}}
    )
    with small_files(50_000), pytest.raises(UserError, match="cannot write checkpoint 2") as error:
        write(manager, 2, big)
    assert "\n" not in str(error.value)
    assert checkpoint.restore(checkpoint.open_manager(tmp_path)).step == 1


def test_failure_in_the_background_is_raised_at_a_later_step(tmp_path):
    manager, proof = saved(tmp_path, 1.0), Proof(2.3, newest=1, good=1)
    big = state_of()._replace(params={"kernel": jnp.asarray(np.random.default_rng(0).normal(size=100_000))})
    said = r"cannot write checkpoint 2 .*last good .* step 1"
    with small_files(50_000), pytest.raises(UserError, match=said) as error:
        checkpoint.save(manager, 2, big, HOST, proof)
        for _ in range(1000):
            proof.follow(3, 2.0)
            checkpoint.check(manager, proof)
            time.sleep(0.01)
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / checkpoint.FOLDER).iterdir()] == ["1"]
    gc.collect()  # the failed writes' tasks log their errors when they are collected: here, not in a different test


def test_buffers_donated_while_a_checkpoint_is_written(tmp_path):
    manager = checkpoint.open_manager(tmp_path)
    big = jax.random.normal(jax.random.key(0), (3_000_000,))  # jnp.asarray's could not be donated
    before = np.array(big)
    checkpoint.save(manager, 1, state_of()._replace(params={"kernel": big}), HOST, proof := Proof())
    jax.jit(lambda x: x * 0, donate_argnums=0)(big).block_until_ready()
    checkpoint.finish(manager, proof)
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    np.testing.assert_array_equal(found.arrays["params.kernel"], before)


def test_host_data_is_plain_json(tmp_path):
    saved(tmp_path, 1.0)
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    assert json.loads(json.dumps(found.host))["step"] == 1
