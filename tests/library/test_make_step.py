"""`jgc.make_step`: one program a phase in every layout, the same as its parts by hand, and what it leaves alone."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import make_step_process
import numpy as np
import optax
import pytest
from contract import every_layout, nodes_of, same_bits, some_by_default
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from make_step_process import PARAMS, batch_of, compilations, loss
from process_helpers import LIMIT, QUICK, free_port

import jgc
from jgc.compress import build, dense, topk
from jgc.nodes.placement import placements_of
from jgc.nodes.placing import place

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"


@every_layout
def test_each_phase_compiles_once(layout):
    nodes = nodes_of(layout)
    init, step = jgc.make_step(loss, topk(alpha=0.2, warmup_steps=3), optax.adamw(0.1), nodes)
    state, losses = init(jax.random.key(0), PARAMS), []
    with compilations("update") as compiled:
        for i in range(7):
            state, metrics = step(state, batch_of(i))
            losses.append(float(metrics.loss))
            assert len(compiled) == (1 if i < 3 else 2), compiled
    assert losses[-1] < losses[0] and state.step == 7 and state.phase.name == "top-k"


@every_layout
def test_next_phase_is_compiled_by_a_thread(layout):
    nodes, compressor, main = nodes_of(layout), topk(alpha=0.01, warmup_steps=2), threading.main_thread()
    ends, compiled = [], []

    def listen(event, duration, **about):
        if "backend_compile" in event and "update" in about.get("fun_name", ""):
            compiled.append(threading.current_thread() is main)

    for ahead in (False, True):
        init, step = jgc.make_step(loss, compressor, optax.sgd(0.1), nodes, ahead=ahead)
        state = init(jax.random.key(0), PARAMS)
        if ahead:
            jax.monitoring.register_event_duration_secs_listener(listen)
        for i in range(8):
            state, _ = step(state, batch_of(i))
        ends.append((state.params, state.compressor))
    assert sorted(compiled) == [False] * (len(compressor.schedule) - 1) + [True] and len(compiled) > 1
    assert same_bits(*ends)


OPTIMIZERS = [
    pytest.param(optax.sgd(0.1, momentum=0.9), id="momentum", marks=pytest.mark.exhaustive),
    pytest.param(optax.inject_hyperparams(optax.adam)(0.1), id="adam"),
]


@every_layout
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weak_types_and_placed_batches_do_not_recompile(layout, optimizer):
    nodes = nodes_of(layout)
    params = {**PARAMS, "scale": jnp.asarray(1.0)}  # weakly typed
    init, step = jgc.make_step(lambda p, b: p["scale"] * loss(p, b), dense(), optimizer, nodes)
    state = init(jax.random.key(0), params)
    with compilations("update") as compiled:
        state, _ = step(state, batch_of(0))
        state, _ = step(state, jax.tree.map(jnp.asarray, batch_of(1)))
        state, _ = step(state, jgc.place(batch_of(2), jgc.BATCH, nodes))
    assert len(compiled) == 1
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params))


RATES = [1, 0.05, np.float32(0.04), np.float64(0.03), jnp.float32(0.02), jnp.asarray(0.01), np.asarray(0.005, "f4")]


@every_layout
@pytest.mark.parametrize("field", ["opt_state", "outer", "inner"])
def test_a_rate_set_by_hand_holds_without_recompiling(layout, field):
    nodes, sgd = nodes_of(layout), optax.inject_hyperparams(optax.sgd)(0.1)
    if field == "opt_state":
        init, step = jgc.make_step(loss, dense(), sgd, nodes)
    else:
        init, step = jgc.local_steps(sgd, sgd, dense(), 1, nodes).make_step(loss)
    state = init(jax.random.key(0), PARAMS)
    arrays = jgc.as_arrays(state)
    dtypes = jax.tree.map(jnp.result_type, arrays)
    state, _ = step(state, batch_of(0))
    with compilations("update") as compiled, compilations("inner_update") as inner, compilations("exchange") as outer:
        for rate in (*RATES, "half", "weak"):
            of = getattr(state, field)
            of = of[0] if field == "outer" else of
            if isinstance(rate, str):  # of the state's, on its devices
                before = of.hyperparams["learning_rate"].reshape(-1)[0]
                rate = 0.5 * before if rate == "half" else 0.1 / (1 + of.count.reshape(-1)[0])
            of.hyperparams["learning_rate"] = rate
            rate = float(rate)
            saved = jgc.as_arrays(state)
            assert jax.tree.map(jnp.shape, saved) == jax.tree.map(jnp.shape, arrays)
            state, _ = step(state, batch_of(1))
            of = getattr(state, field)
            used = (of[0] if field == "outer" else of).hyperparams["learning_rate"]
            assert used.dtype == jnp.float32 and np.all(used == np.float32(rate))
            assert used.shape == ((nodes.count,) if field == "inner" else ())
    assert not compiled + inner + outer
    assert jax.tree.map(jnp.result_type, jgc.as_arrays(state)) == dtypes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loop", ["make_step", "local_steps"])
def test_a_rate_set_by_hand_where_parameters_are_sharded(loop, dtype):
    mesh = jax.make_mesh((2, 2), ("host", "chip"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    nodes, sgd = jgc.from_mesh(mesh, slow="host", fast="chip"), optax.inject_hyperparams(optax.adam)(0.1)
    if loop == "make_step":
        init, step = jgc.make_step(lambda p, x: jnp.mean((x @ p) ** 2), topk(alpha=0.2), sgd, nodes)
    else:
        init, step = jgc.local_steps(sgd, sgd, dense(), 1, nodes).make_step(lambda p, x: jnp.mean((x @ p) ** 2))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("chip"))
    state = init(jax.random.key(0), jax.device_put(jnp.ones((8, 4), dtype), sharding))
    x = np.ones((2, 4, 8), np.float32)
    state, _ = step(state, x)
    before = jax.tree.map(lambda x: (x.dtype, x.sharding), jgc.as_arrays(state)[2:-2])
    for of in [state.opt_state] if loop == "make_step" else [state.inner, *state.outer]:
        of.hyperparams["learning_rate"] = 0.05
    state, _ = step(state, x)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), jgc.as_arrays(state)[2:-2]) == before


@every_layout
def test_batch_may_hold_one_key_a_node(layout):
    nodes = nodes_of(layout)
    noisy = lambda p, b: loss(p, b["batch"]) + b["weight"] * jax.random.normal(b["key"])  # noqa: E731
    init, step = jgc.make_step(noisy, dense(), optax.sgd(0.0), nodes)
    keys, weights = jax.random.split(jax.random.key(1), nodes.count), np.arange(nodes.count, dtype=np.float32)
    _, metrics = step(init(jax.random.key(0), PARAMS), {"batch": batch_of(0), "key": keys, "weight": weights})
    own = [loss(PARAMS, jax.tree.map(lambda x, i=i: x[i], batch_of(0))) for i in range(nodes.count)]
    want = np.mean([a + w * jax.random.normal(k) for a, w, k in zip(own, weights, keys, strict=True)])
    np.testing.assert_allclose(metrics.loss, want, rtol=1e-5)


@every_layout
def test_equals_its_parts(layout):
    nodes = nodes_of(layout)
    compressor, optimizer, key = topk(alpha=0.2), optax.adamw(0.1), jax.random.key(3)
    init, step = jgc.make_step(loss, compressor, optimizer, nodes)
    state = init(key, PARAMS)

    placement = jgc.State(jgc.SHARED, jgc.LOCAL)
    inner = place(compressor.init(key, PARAMS, nodes), placement, nodes)
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    gradients = jax.jit(jgc.node_grads(loss, nodes))
    aggregate = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[0].value, nodes))
    for i in range(3):
        state, metrics = step(state, batch_of(i))
        losses, grads = gradients(params, place(batch_of(i), jgc.BATCH, nodes))
        mean, inner, info = aggregate(jax.random.fold_in(key, i), grads, inner)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
        for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metrics.loss, losses.mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics.info.residual_norm, info.residual_norm.mean(), rtol=1e-5)
        assert metrics.info.elements_sent == info.elements_sent[0] and metrics.info.finite.shape == ()


@every_layout
def test_non_finite_gradient_changes_nothing(layout):
    nodes = nodes_of(layout)
    init, step = jgc.make_step(loss, topk(alpha=0.2), optax.adam(0.1), nodes)
    state, _ = step(init(jax.random.key(0), PARAMS), batch_of(0))
    before = jax.tree.map(np.asarray, state._replace(key=0, phase=0))
    bad = batch_of(1)
    bad["x"][5, 0, 0] = np.nan
    state, metrics = step(state, bad)
    assert not metrics.info.finite and state.step == 2
    assert same_bits(before._replace(step=2), jax.tree.map(np.asarray, state._replace(key=0, phase=0)))


def test_caller_keeps_own_parameters_and_key():
    params, key = jax.tree.map(jnp.array, PARAMS), jax.random.key(0)
    init, step = jgc.make_step(loss, dense(), optax.sgd(0.1), nodes_of("1 device"))
    for _ in range(2):
        step(init(key, params), batch_of(0))
    assert all(np.all(x == 0) for x in jax.tree.leaves(params)) and jax.random.key_data(key).tolist() == [0, 0]


@every_layout
def test_aux_is_each_nodes_own(layout):
    def with_aux(params, batch):
        return loss(params, batch), {"first": batch["x"][0, 0], "half": params["w"].astype(jnp.bfloat16), "n": 3}

    init, step = jgc.make_step(with_aux, dense(), optax.sgd(0.1), nodes_of(layout), has_aux=True)
    _, metrics = step(init(jax.random.key(0), PARAMS), batch_of(0))
    np.testing.assert_array_equal(metrics.aux["first"], batch_of(0)["x"][:, 0, 0])
    assert metrics.aux["half"].shape == (8, 6, 4) and metrics.aux["n"].tolist() == [3] * 8


@every_layout
def test_model_state_is_each_nodes_own(layout):
    """A running mean of the inputs: by hand for each node; a step that is skipped leaves it alone; it is restored."""

    def with_state(params, batch, state):
        mean = 0.5 * state["mean"] + 0.5 * batch["x"].mean(0)
        return loss(params, batch), ({"mean": mean, "steps": state["steps"] + 1}, batch["y"].sum())

    own = {"mean": jnp.ones(PARAMS["w"].shape[0]), "steps": jnp.int32(0)}
    init, step = jgc.make_step(with_state, topk(alpha=0.2), optax.adam(0.1), nodes_of(layout), has_aux=True)
    state, want = init(jax.random.key(0), PARAMS, own), np.ones((8, PARAMS["w"].shape[0]), np.float32)
    with compilations("update") as compiled:
        for i in range(3):
            state, metrics = step(state, batch_of(i))
            want = 0.5 * want + 0.5 * batch_of(i)["x"].mean(1)
        np.testing.assert_allclose(state.model_state["mean"], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metrics.aux, batch_of(2)["y"].sum((1, 2)), rtol=1e-5)
        bad = batch_of(3)
        bad["x"][5, 0, 0] = np.nan
        state, _ = step(state, bad)
    assert len(compiled) == 1 and state.model_state["steps"].tolist() == [3] * 8
    np.testing.assert_allclose(state.model_state["mean"], want, rtol=1e-5, atol=1e-6)
    sharding = state.model_state["mean"].sharding
    restored = state._replace(model_state=jax.tree.map(np.array, state.model_state))
    again, _ = jgc.make_step(with_state, topk(alpha=0.2), optax.adam(0.1), nodes_of(layout), has_aux=True)[1](
        restored, batch_of(4)
    )
    assert again.model_state["mean"].sharding == sharding and again.model_state["steps"].tolist() == [4] * 8


@every_layout
def test_weak_types_do_not_compile_anew(layout):
    """`jnp.array(0.0)` is weakly typed, and what a step makes of it is not."""
    traces = []

    def with_state(params, batch, state):
        traces.append(1)
        return loss(params, batch), {"n": 0.9 * state["n"] + batch["x"].mean()}

    init, step = jgc.make_step(with_state, dense(), optax.sgd(0.1), nodes_of(layout), unroll=False)
    state, after = init(jax.random.key(0), PARAMS, {"n": jnp.array(0.0)}), []
    for i in range(3):
        state, _ = step(state, batch_of(i))
        after.append(len(traces))
    assert after[0] == after[2]
    placed = jgc.place({"a": 0.0, "b": jnp.array(1.0)}, jgc.SHARED, nodes_of(layout))
    assert not any(x.weak_type for x in jax.tree.leaves(placed))


def test_loss_must_return_the_model_state_it_got():
    init, step = jgc.make_step(lambda p, b, s: (loss(p, b), {"mean": s["mean"][:2]}), dense(), optax.sgd(0.1),
                               nodes_of("1 device"))  # fmt: skip
    state = init(jax.random.key(0), PARAMS, {"mean": jnp.zeros(3)})
    with pytest.raises(TypeError, match=r"'mean' was float32\[3\], and is float32\[2\]"):
        step(state, batch_of(0))


def test_model_state_keeps_its_containers():
    """Flax's `apply` returns a dict of what was given as a FrozenDict."""
    init, step = jgc.make_step(lambda p, b, s: (loss(p, b), {"n": s["n"] + 1}), dense(), optax.sgd(0.1),
                               nodes_of("8 devices"))  # fmt: skip
    state, _ = step(init(jax.random.key(0), PARAMS, FrozenDict(n=jnp.int32(0))), batch_of(0))
    assert isinstance(state.model_state, FrozenDict) and state.model_state["n"].tolist() == [1] * 8


@every_layout
def test_restored_state_goes_on(layout):
    nodes = nodes_of(layout)
    compressor = topk(alpha=0.2, warmup_steps=2)
    init, step = jgc.make_step(loss, compressor, optax.adam(0.1), nodes)
    state, saved = init(jax.random.key(0), PARAMS), None
    for i in range(5):
        if i == 2:  # the transition is still to come
            saved = jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key), phase=0))
            phase = state.phase
        state, _ = step(state, batch_of(i))
    again = saved._replace(step=int(saved.step), phase=phase, key=jax.random.wrap_key_data(saved.key))
    _, step = jgc.make_step(loss, compressor, optax.adam(0.1), nodes)
    with compilations("update") as compiled:
        for i in range(2, 5):
            again, _ = step(again, batch_of(i))
    assert len(compiled) == 1 and same_bits(again.params, state.params)
    assert same_bits(again.compressor, state.compressor) and again.phase == state.phase


def test_phases_found_during_the_run():
    nodes = nodes_of("4 devices")
    compressor = build(jgc.compress.Gradiveq(warmup_steps=2, sampling_steps=3, compressed_steps=2, loss=0.3))
    params = {"conv": jnp.full((3, 3, 2, 4), 0.1), "b": jnp.zeros(4)}

    def of_convolution(p, batch):
        return jnp.mean((jnp.einsum("bi,ijkl->bl", batch["x"][:, :3], p["conv"]) + p["b"] - batch["y"]) ** 2)

    init, step = jgc.make_step(of_convolution, compressor, optax.sgd(0.01), nodes)
    state, names = init(jax.random.key(0), params), []
    for i in range(9):
        state, _ = step(state, batch_of(i))
        names.append(state.phase.name)
    assert names == ["dense"] * 2 + ["sampling"] * 3 + ["compressed"] * 2 + ["sampling"] * 2


LED = {  # by a leader, whose positions all nodes use
    "scalecom": lambda: jgc.compress.scalecom(alpha=0.01, warmup_steps=1),
    "lgc_ps": lambda: jgc.compress.lgc_ps(alpha=0.1, warmup_steps=1, autoencoder_steps=1),
}


@pytest.mark.parametrize("name", some_by_default(LED, ["scalecom"]))
def test_bytes_per_step_are_those_of_wire(name):
    nodes, compressor = nodes_of("4 devices"), LED[name]()
    params = {"w": jnp.zeros((40, 50)), "b": jnp.zeros(3)}
    found = jgc.bytes_per_step(compressor, params, nodes)
    assert list(found) == ["dense", "top-k", "compressed"][: 2 if name == "scalecom" else 3]
    for phase in compressor.schedule:
        wire, own = compressor.wire(phase.value, params, nodes), found[phase.name]
        assert own.device == sum(sent.bytes for sent in wire.physical) > 0
        assert own.uncompressed == 4 * 2003
        up = {role: sum(m.bytes for m in wire.logical if m[:2] == (role, "up")) for role in ("leader", "worker")}
        leads = any(m.role == "leader" for m in wire.logical)
        assert own.node == pytest.approx((up["leader"] + 7 * up["worker"]) / 8 if leads else up["worker"])
    assert found["dense"].node == found["dense"].uncompressed > 10 * list(found.values())[-1].node


def _cells(page: str) -> list[str]:
    """The code cells of a page of the site, as they stand."""
    return re.findall(r"```\{code-cell\}\n(.*?)```", (DOCS / page).read_text(), flags=re.S)


def _recipes() -> list[str]:
    """README's loop, and the same of its parts from the page that goes on with it."""
    (loop,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    cells = _cells("your_loop.md")
    assert cells[0] == loop
    return [loop, next(cell for cell in cells if "as_optax" in cell)]


@every_layout
@pytest.mark.parametrize("recipe, program", [(0, "update"), (1, "train_step")], ids=["make_step", "parts"])
def test_recipe_of_readme_compiles_once(layout, recipe, program, monkeypatch, capsys):
    whole = jgc.make_nodes
    devices = jax.devices()[: int(layout.split()[0])]
    monkeypatch.setattr(jgc, "make_nodes", lambda count: whole(count, devices))
    names: dict = {}
    with compilations(program) as compiled:
        for block in _recipes()[: recipe + 1]:
            before = len(compiled)
            exec(compile(block, "README.md", "exec"), names)
    assert len(compiled) - before == 1, compiled
    printed = [float(x) for x in capsys.readouterr().out.split()]
    assert printed[-1] < 0.2 * printed[0]


@pytest.mark.parametrize("layout", some_by_default(["1 device", "8 devices"], ["8 devices"]))
def test_checkpoint_of_the_page_goes_on(layout, monkeypatch):
    whole, devices, names = jgc.make_nodes, jax.devices()[: int(layout.split()[0])], {}
    monkeypatch.setattr(jgc, "make_nodes", lambda count: whole(count, devices))
    cells = _cells("your_loop.md")
    (checkpoint,) = [cell for cell in cells if "orbax" in cell]
    code, last = checkpoint.replace(":tags: [remove-stderr]\n", "").strip().rsplit("\n", 1)
    exec(cells[0].replace("range(60)", "range(1)") + code, names)
    (once, again) = eval(last, names)
    assert once == again


def test_meshes_page_divides_its_parameters_and_compiles_once(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which the page sets: put back afterwards
    names: dict = {}
    with compilations("update") as compiled:
        for cell in _cells("meshes.md")[:2]:
            exec(compile(cell, "meshes.md", "exec"), names)
    assert names["nodes"].count == 2 and len(compiled) == 1
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    state = names["state"]
    assert state.params["in"].addressable_shards[0].data.shape == (16, 128)
    assert state.params["out"].addressable_shards[0].data.shape == (32, 8)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    port = str(free_port())
    flags = f"{QUICK} --xla_force_host_platform_device_count=2"
    running = [
        subprocess.Popen(
            [sys.executable, make_step_process.__file__, str(tmp_path), port, str(process)],
            env={**os.environ, "XLA_FLAGS": flags},
            stderr=(tmp_path / f"{process}.txt").open("w"),
        )
        for process in range(2)
    ]
    try:
        codes = [r.wait(LIMIT) for r in running]
    finally:
        for r in running:
            r.kill()
    assert codes == [0, 0], [(tmp_path / f"{process}.txt").read_text()[-3000:] for process in range(2)]
    expected = make_step_process.train(nodes_of("4 devices"))
    fewer = make_step_process.train_on_fewer(nodes_of("4 devices"), jgc.make_nodes(4, jax.devices()[:4]))
    expected |= {f"{name}_of_4": x for name, x in fewer.items()}
    for process in range(2):
        held = dict(np.load(tmp_path / f"{process}.npz"))
        assert held["compiled"] == 2
        for name, x in expected.items():
            np.testing.assert_allclose(held[name], x, rtol=1e-6, atol=1e-7)


def test_placements_come_from_the_arrays():
    nodes = nodes_of("4 devices")
    init, _ = jgc.make_step(loss, topk(alpha=0.2), optax.adam(0.1), nodes)
    state = init(jax.random.key(0), PARAMS)
    for x, where in zip(
        jax.tree.leaves(state.compressor), jax.tree.leaves(placements_of(state.compressor)), strict=True
    ):
        assert x.sharding.is_fully_replicated == (where == jgc.SHARED)


# --- parameters that the devices of a node divide -------------------------------------------------------------------


def _wide_loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"] + params["bias"]) @ params["out"] - batch["y"]) ** 2)


def _wide_batch(i):
    x = np.random.default_rng(i).normal(size=(2, 8, 12)).astype(np.float32)
    return {"x": x, "y": x[..., :4]}


def _wide_params():
    random = np.random.default_rng(5)
    shapes = {"in": (12, 16), "bias": (16,), "out": (16, 4)}
    return {name: jnp.asarray(0.3 * random.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


SHARDED = [dense(), topk(alpha=0.3, warmup_steps=2)]


@pytest.mark.parametrize("axis_type", some_by_default([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit]), ids=str)
@pytest.mark.parametrize("compressor", some_by_default(SHARDED, SHARDED[1:]), ids=["dense", "topk"])
def test_sharded_parameters_stay_sharded_and_compile_once_a_phase(compressor, axis_type):
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(axis_type,) * 2)
    nodes = jgc.from_mesh(mesh, slow="dcn", fast="fsdp")
    specs = {"in": P(None, "fsdp"), "bias": P(), "out": P("fsdp", None)}
    init, step = jgc.make_step(_wide_loss, compressor, optax.adamw(0.05), nodes)
    sharded = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in _wide_params().items()}
    state = init(jax.random.key(0), sharded)
    shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state, state.compressor))
    with compilations("update") as compiled:
        for i in range(5):
            state, metrics = step(state, _wide_batch(i))
    assert len(compiled) == len(compressor.schedule)
    assert jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state, state.compressor)) == shardings
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        assert {name: x.addressable_shards[0].data.shape for name, x in tree.items()} == {
            "in": (12, 4), "bias": (16,), "out": (4, 4)
        }  # fmt: skip
    assert metrics.info.finite and metrics.info.elements_sent > 0
    if compressor.schedule[0].value == "dense":  # as long as all is sent, the same as with whole parameters
        whole, run = jgc.make_step(_wide_loss, dense(), optax.adamw(0.05), nodes)
        both = whole(jax.random.key(0), _wide_params()), init(jax.random.key(0), sharded)
        for i in range(2):
            both = run(both[0], _wide_batch(i))[0], step(both[1], _wide_batch(i))[0]
        for name, x in both[0].params.items():
            np.testing.assert_allclose(both[1].params[name], x, rtol=1e-4, atol=1e-5)


def test_bytes_of_sharded_parameters_are_a_devices_own():
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"))
    nodes = jgc.from_mesh(mesh, slow="dcn", fast="fsdp")
    params = {"w": jnp.zeros((64, 64))}
    sharded = {"w": jax.device_put(params["w"], NamedSharding(mesh, P("fsdp")))}
    whole, own = (jgc.bytes_per_step(dense(), tree, nodes)["dense"] for tree in (params, sharded))
    assert own.uncompressed == whole.uncompressed == own.node == whole.node == 4 * 64 * 64
    assert own.device < 0.3 * whole.device
