"""`--record`: the gradients that enter the compressor, of every node and step once, also after resumes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_helpers import start_all
from tiny import tiny_model
from training_helpers import tiny_config

from jgc import compress
from jgc.lab.shared.programs import compile_gradients
from jgc.layout.pack import make_packing, pack
from jgc.method.diagnose import residual
from jgc.nodes.layouts import make_nodes
from jgc.training.errors import UserError
from jgc.training.output import recording
from jgc.training.output.recording import files, save, step_of
from jgc.training.run import setup
from jgc.training.run.loop import run
from jgc.training.run.periodic import batches
from jgc.training.settings.config import RecordConfig
from jgc.training.settings.saved_config import completed

pytestmark = pytest.mark.slow

SHAPES = {"first/kernel": (64, 16), "middle/kernel": (16, 16), "head/kernel": (16, 10)}


@pytest.fixture(autouse=True)
def model(monkeypatch):
    monkeypatch.setattr(setup, "make_model", tiny_model)


def recorded(run_dir):
    """Every file's arrays, by step, read without jgc."""
    return {int(np.load(path)["step"]): dict(np.load(path)) for path in sorted((run_dir / "gradients").iterdir())}


def config_of(run_dir, every=2, method=None, **changes):
    record = RecordConfig(every=every, layers="kernel$" if every else "", **changes.pop("record", {}))
    return tiny_config(run_dir, method or compress.TopK(alpha=0.1, warmup_steps=1), diagnose_every=0, record=record,
                       **changes)  # fmt: skip


def test_recorded_gradients(tmp_path):
    """With weight decay and clipped, as in step 0 of the same run; names and shapes are the parameters'."""
    config = config_of(tmp_path, steps=5, weight_decay=0.1, clip_norm=0.01, nodes=2)
    assert run(config) == 0
    found = recorded(tmp_path)
    assert list(found) == [0, 2, 4] and [str(x["phase"]) for x in found.values()] == ["dense", "top-k", "top-k"]
    assert {k: x.shape for k, x in found[0].items() if x.ndim} == {f"gradient/{p}": (2, *s) for p, s in SHAPES.items()}
    built = setup.build(config)
    batch = next(batches(built))
    grads = compile_gradients(built.parts, built.state, batch)(built.state.params, built.state.model_state, batch).grads
    decayed = jax.tree.map(lambda g, p: g + 0.1 * p * (p.ndim > 1), grads, built.state.params)
    norms = np.sqrt(sum(np.sum(np.square(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(decayed)))
    scale = np.minimum(1, 0.01 / np.sqrt(2) / norms)
    for path in SHAPES:
        layer, leaf = path.split("/")
        expected = np.asarray(decayed[layer][leaf]) * scale[:, None, None]
        np.testing.assert_allclose(found[0][f"gradient/{path}"], expected, rtol=1e-4, atol=1e-7)
    a, b = found[4]["gradient/middle/kernel"]
    assert np.abs(a - b).max() > 0.1 * np.abs(a).max()  # each node's own


def test_recording_survives_resume(tmp_path):
    whole, resumed, without = tmp_path / "whole", tmp_path / "resumed", tmp_path / "without"
    run(config_of(whole, every=3, steps=8))
    run(config_of(resumed, every=3, steps=5))  # recorded: 0, 3
    save(resumed / "gradients", 6, "dense", {"gradient/x": np.ones(2)})  # of a run killed after its last checkpoint
    run(config_of(resumed, every=3, steps=8, resume=True))
    a, b = recorded(whole), recorded(resumed)
    assert list(a) == list(b) == [0, 3, 6]
    for step in a:
        assert a[step].keys() == b[step].keys()
        assert all(a[step][name].tobytes() == b[step][name].tobytes() for name in a[step])
    run(config_of(without, every=0, steps=8))
    assert not (without / "gradients").exists()
    lines = [[line.split('"loss"')[1][:20] for line in (x / "metrics.jsonl").open()] for x in (whole, without)]
    assert lines[0] == lines[1]
    with pytest.raises(UserError, match=r"record\.every was 3, is 0"):
        run(config_of(resumed, every=0, steps=9, resume=True))


def test_recorded_residuals(tmp_path):
    """The gradient of the step before minus the values sent; the first layer is sent whole and has none."""
    method = compress.ScaleCom(alpha=0.1, warmup_steps=1)
    config = config_of(tmp_path, every=1, method=method, steps=3, momentum=0.0, record={"residuals": True})
    run(config)
    found = recorded(tmp_path)
    assert "residual/first/kernel" not in found[0]
    for path in ("middle/kernel", "head/kernel"):
        g, r = found[1][f"gradient/{path}"], found[2][f"residual/{path}"]
        assert r.shape == (2, *SHAPES[path]) and not np.any(found[1][f"residual/{path}"])
        assert np.all((r == 0) | np.isclose(r, g, rtol=1e-5)) and 0.02 < np.mean(r == 0) < 0.6


PARAMS = {"conv": {"kernel": jnp.zeros((3, 3, 1, 4)), "bias": jnp.zeros(4)}, "head": {"kernel": jnp.zeros((8, 5))}}


@pytest.mark.parametrize("name", compress.METHODS)
def test_residuals_by_parameter(name):
    """The residual by parameter equals the one in the local state."""
    compressor = compress.build(compress.METHODS[name].settings())
    local = compressor.init(jax.random.key(0), PARAMS, make_nodes(2, jax.devices()[:1])).local
    rng = np.random.default_rng(0)
    own = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape[1:]), x.dtype), local)
    kept = residual(compressor, own, PARAMS)
    groups = own if type(own) is tuple else (own,)  # of a combination one a group
    assert bool(kept) == (name != "ef21" and any(jax.tree.leaves(group.memory) for group in groups))  # an estimate
    if kept:
        paths = ("conv/bias", "conv/kernel", "head/kernel")
        tree = {"conv": {"kernel": kept[paths[1]], "bias": kept[paths[0]]}, "head": {"kernel": kept[paths[2]]}}
        assert tuple(kept) == paths and jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, PARAMS)
        flat = pack(tree, make_packing(PARAMS))
        vectors = jax.tree.leaves(own)
        if name == "powersgd":  # whose residual is one array for each layer
            vectors = [jnp.concatenate([x.reshape(-1) for x in own.memory])]
        assert any(x.shape == flat.shape and np.array_equal(x, flat) for x in vectors)


def test_float16_units(tmp_path):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2, 500)) * np.exp(rng.uniform(-12, 0, 500)) * 1e-9).astype(np.float32)
    path = save(tmp_path, 7, "dense", {"gradient/a": x, "gradient/zero": np.zeros((2, 3), np.float32)}, "float16")
    file = np.load(path)
    assert file["gradient/a"].dtype == np.float16 and step_of(path) == 7
    got = file["gradient/a"].astype(np.float32) * file["unit/gradient/a"]
    np.testing.assert_allclose(got, x, rtol=1e-3, atol=np.abs(x).max() * 2.0**-38)
    assert not file["gradient/zero"].any()


@pytest.mark.parametrize(
    "record, said",
    [
        ({"layers": "nothing"}, r"'nothing' matches no parameter; there are first/bias, "),
        ({"layers": "("}, "is no regular expression"),
        (
            {"max_megabytes": 0.03},
            r"would take 0\.\d+ MB \(6 steps x 2 nodes x [\d,]+ values x 4 bytes\), more than --record.max-megabytes",
        ),
        ({"every": -1}, "--record.every must be at least 0"),
        ({"max_megabytes": 0.0}, "--record.max-megabytes must be positive"),
        ({"residuals": True}, "no residual for the recorded layers"),
    ],
)
def test_bad_options(record, said, tmp_path):
    record = {"every": 1, "layers": "", **record}
    config = tiny_config(tmp_path / "run", compress.Dense(), record=RecordConfig(**record))
    with pytest.raises(UserError, match=said) as error:
        run(config)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_recording_size(tmp_path):
    """Except for the names."""
    values = 6 * 2 * 4 * sum(np.prod(shape) for shape in SHAPES.values()) / 1e6
    config = config_of(tmp_path / "run", every=1, record={"max_megabytes": values * 0.999})
    with pytest.raises(UserError, match=rf"would take {values:.1f} MB \(6 steps x 2 nodes x 1,440 values x 4 bytes\)"):
        run(config)
    run(config_of(tmp_path / "run", every=1, record={"max_megabytes": values}))
    size = sum(path.stat().st_size for path in files(tmp_path / "run" / "gradients")) / 1e6
    assert values < size < values * 1.2


def test_old_configs_are_completed():
    assert completed({"method": "dense"})["record"] == dataclasses.asdict(RecordConfig())
    read = [completed({"unroll_nodes": x})["unroll_nodes"] for x in (True, False, "auto", "yes")]
    assert read == ["auto", "no", "auto", "yes"]  # once a flag, True by default


def test_recording_marks_run_folder(tmp_path):
    save_dir = tmp_path / recording.GRADIENTS
    save_dir.mkdir()
    with pytest.raises(UserError, match="already holds a run"):
        run(tiny_config(tmp_path))


def test_recording_from_two_processes(tmp_path, request, monkeypatch):
    """In one folder, as by one process."""
    monkeypatch.chdir(request.config.rootpath)
    options = "--method scalecom --compressor.alpha 0.1 --compressor.warmup-steps 1 --batch-size 24 "
    options += "--nodes 4 --steps 3 --evaluate-every 0 --diagnose-every 0 --record.every 1 --record.layers kernel "
    options += "--record.residuals --run-dir "
    for count in (1, 2):
        for running in start_all(tmp_path, f"{count}", count, f"{options}{tmp_path / f'run{count}'}"):
            code, output = running.end()
            assert code == 0, output
    one, two = (recorded(tmp_path / f"run{count}") for count in (1, 2))
    assert list(one) == list(two) == [0, 1, 2]
    for step in one:
        assert one[step].keys() == two[step].keys() and len(one[step]) > 4
        for name, x in one[step].items():
            if x.ndim:
                assert x.shape[0] == 4
                np.testing.assert_allclose(two[step][name], x, rtol=1e-3, atol=1e-5)
