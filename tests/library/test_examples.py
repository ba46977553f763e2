"""The programs under examples/: each is short, runs and shows what it says."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import every_layout, nodes_of
from make_step_process import compilations
from process_helpers import LIMIT, free_port

import jgc

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "rounds")  # tests/rounds has it
GPTS = ("gpt_linen", "gpt_nnx", "gpt_equinox")
STEPS = 15


@functools.cache
def example(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short_runs_and_prints(name):
    if name == "drjax_diloco":
        pytest.importorskip("drjax")
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 120
    environment = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"loss", done.stdout) and re.search(r"bytes", done.stdout), done.stdout


@functools.cache
def trained(name: str, layout: str) -> tuple[tuple[float, ...], int]:
    """The losses of a GPT's first steps, and how often its step was compiled."""
    with compilations("update") as compiled:
        losses = example(name).train(nodes_of(layout), STEPS)
    return tuple(losses), len(compiled)


@every_layout
@pytest.mark.parametrize("name", GPTS)
def test_same_gpt_reaches_same_loss_in_every_library_and_compiles_once(name, layout):
    losses, compiled = trained(name, layout)
    assert compiled == 1
    assert losses[-1] < losses[0] - 1
    np.testing.assert_allclose(losses, trained(GPTS[0], "8 devices")[0], rtol=2e-3)


@every_layout
def test_chain_with_adamw_compiles_once_and_learns(layout):
    module = example("gpt_adamw")
    with compilations("train_step") as compiled:
        losses, unseen = module.train(module.METHODS["top-k, 2 %"], nodes_of(layout), STEPS)
    assert len(compiled) == 1 and losses[-1] < losses[0] - 0.3 and unseen < losses[0] - 0.1


def test_fsdp_divides_all_state_and_learns_as_without():
    module = example("fsdp_mesh")
    with compilations("update") as compiled:
        (whole, _), (losses, state) = module.train(False, STEPS), module.train(True, STEPS)
    assert len(compiled) == 2  # once each
    np.testing.assert_allclose(losses[0], whole[0], rtol=1e-5)
    np.testing.assert_allclose(losses[-1], whole[-1], rtol=0.1)  # other positions are sent: layers are shards
    assert module.share(state.params) == module.share(state.opt_state[0].mu) < 0.26
    assert module.share(state.compressor.local) < 0.13  # of two hosts' residuals


@pytest.mark.parametrize("devices", [1, 4])
def test_loop_of_parts_equals_make_step_in_every_phase(devices):
    import jax

    module = example("multi_phase")
    nodes = jgc.make_nodes(module.NODES, jax.devices()[:devices])
    with compilations("update") as compiled:
        losses = module.run(nodes, 45)
    assert len(compiled) in (3, 4)  # dense, sampling, and one or two sizes of codes
    np.testing.assert_allclose(losses, module.run_by_hand(nodes, 45), rtol=1e-4, atol=1e-5)


@every_layout
def test_local_steps_learn_and_compile_once(layout, monkeypatch):
    module, nodes = example("local_steps"), nodes_of(layout)
    assert len((FOLDER / "local_steps.py").read_text().splitlines()) <= 100
    monkeypatch.setattr(module, "NODES", nodes.count)
    local = module.local_steps("SparseLoCo", nodes, every=5, steps=STEPS)
    with compilations("inner_update") as inner, compilations("exchange_update") as exchanges:
        state, unseen = module.train(*local.make_step(module.loss, unroll=False), steps=STEPS)
    assert len(inner) == len(exchanges) == 1
    assert state.step == STEPS and unseen < 4.5  # of 4.87 at first, after three exchanges
    (sent,) = local.bytes_per_round(state.params).values()
    assert sent.uncompressed > 900 * sent.node


def test_drjaxs_mean_is_that_of_jgc_and_four_bits_learn_as_well():
    pytest.importorskip("drjax")
    module, steps = example("drjax_diloco"), 40
    with compilations("train_step") as compiled:
        plain, sent = module.train(None, steps)
        dense, _ = module.train(jgc.compress.dense(), steps)
        coded, fewer = module.train(jgc.compress.cast(format="mxfp4", error_feedback=True), steps)
    assert len(compiled) == 3  # once each
    np.testing.assert_allclose(dense, plain, rtol=1e-4)
    assert plain[-1] < plain[0] - 1.5 and abs(coded[-1] - plain[-1]) < 0.1
    assert sent / fewer == pytest.approx(32 / 4.25, rel=1e-3)


def test_drjaxs_trainer_goes_on_after_a_replica_has_diverged():
    pytest.importorskip("drjax")
    module = example("drjax_diloco")
    nodes = jgc.make_nodes(module.REPLICAS, jax.devices()[:1])
    init, train_step = module.make_trainer(jgc.compress.cast(format="mxfp4", error_feedback=True), nodes)
    state, shared = init(jax.random.key(0)), []
    for i in range(60):
        if i == 25:
            state = state._replace(replica_params=jax.tree.map(lambda x: x.at[1].set(jnp.nan), state.replica_params))
        state, _ = train_step(state, module.batch_of(i))
        if i % module.EVERY == module.EVERY - 1:
            shared.append(float(module.loss(state.params, module.batch_of(0, True)[0])))
    assert shared[2] == shared[1]  # no outer step
    assert shared[-1] < shared[1] - 0.5 and all(np.isfinite(x).all() for x in jax.tree.leaves(state.inner))


def test_drjaxs_trainer_takes_no_method_that_needs_several_programs_in_turn():
    pytest.importorskip("drjax")
    module = example("drjax_diloco")
    nodes = jgc.make_nodes(module.REPLICAS, jax.devices()[:1])
    with pytest.raises(ValueError, match="finds its phases during the run"):
        module.make_trainer(jgc.compress.powersgd(alternate=True), nodes)


@every_layout
def test_new_method_loses_no_gradient_and_learns(layout):
    module, nodes = example("new_method"), nodes_of(layout)
    assert module.check_conservation(module.turns(4), nodes) < 1e-5
    losses, _ = module.train(module.turns(4), nodes, 40)
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
    wire = module.turns(4).wire("turns", {"w": np.zeros((10, 4), np.float32)}, nodes)
    assert sum(m.bytes for m in wire.logical if m.direction == "up") == 40


def test_several_hosts_print_the_losses_of_one_process():
    def started(*words):
        command = [sys.executable, FOLDER / "several_hosts.py", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    where = f"127.0.0.1:{free_port()}"
    running = [started(), started(where, "2", "0"), started(where, "2", "1")]
    try:
        told = [r.communicate(timeout=LIMIT) for r in running]
    finally:
        for r in running:
            r.kill()
    alone, first, second = (out.splitlines()[-2:] for out, _ in told)
    assert [r.returncode for r in running] == [0, 0, 0], [errors[-2000:] for _, errors in told]
    assert alone[0].removeprefix("1 processes") == first[0].removeprefix("2 processes") and "loss" in alone[0]
    assert not second or "loss" not in second[0]
