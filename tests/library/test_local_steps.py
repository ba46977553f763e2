"""`jgc.local_steps`: against an ordinary step and loops by hand, conservation, layouts, shards, bytes, errors."""

import dataclasses

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import LAYOUTS, K, every_layout, nodes_of, same_bits, settings_of, some_by_default
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from make_step_process import compilations

import jgc
from jgc.compress import METHODS, build, dense, per_layer, qsgd, topk
from jgc.lab.shared.hlo import collectives
from jgc.loops.local_programs import exchange_program, inner_program
from jgc.loops.outer import Arrays
from jgc.method.plan import any_residual

SHAPES = {"a": (6, 8), "bias": (8,), "conv": {"kernel": (3, 3, 2, 4)}, "s": ()}
RATE = 0.25


def is_shape(x):
    return isinstance(x, tuple)


def exact(seed, *leading):
    """A tree of multiples of 2^-10, at most 1/16: sums and products with powers of two are exact."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (random.integers(-64, 65, (*leading, *shape)) / 1024).astype(np.float32), SHAPES, is_leaf=is_shape
    )


def linear(params, batch):
    """A loss whose gradient is the batch's one example, f32[1, ...] in every leaf."""
    return sum(jnp.vdot(p, g[0]) for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True))


def gradients(step):
    """The batch that gives every node the gradients `exact(step, K)`."""
    return jax.tree.map(lambda g: g[:, None], exact(step, K))


def run(local, loss, batch_of, steps, params=None):
    """All states and metrics, the first state included."""
    init, step = local.make_step(loss)
    state = init(jax.random.key(0), exact(99) if params is None else params)
    states, metrics = [on_host(state)], []
    for i in range(steps):
        state, found = step(state, batch_of(i))
        states.append(on_host(state))
        metrics.append(jax.tree.map(np.asarray, found))
    return states, metrics


def on_host(state):
    return jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key), phases=(), step=0))


# --- against the ordinary step, and against loops by hand -----------------------------------------------------------


ORDINARY = [dense(), topk(alpha=0.1)]


@every_layout
@pytest.mark.parametrize("compressor", some_by_default(ORDINARY, ORDINARY[1:]), ids=["dense", "topk"])
def test_one_step_a_round_equals_the_ordinary_step_bit_for_bit(layout, compressor):
    nodes = nodes_of(layout)
    local = jgc.local_steps(optax.sgd(RATE), optax.sgd(1.0), compressor, every=1, nodes=nodes)
    states, _ = run(local, linear, gradients, 4)
    init, step = jgc.make_step(linear, compressor, optax.sgd(RATE), nodes)
    state = init(jax.random.key(0), exact(99))
    for i in range(4):
        state, _ = step(state, gradients(i))
        assert same_bits(state.params, states[i + 1].params)
        assert same_bits(jax.tree.map(lambda x: x[3], states[i + 1].own), states[i + 1].params)


def centres(seed=7):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: random.normal(size=(K, 1, *shape)).astype(np.float32), SHAPES, is_leaf=is_shape)


def quadratic(params, batch):
    """Half the squared distance from a node's centre: each node pulls to its own."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True)
    return sum(jnp.sum((p - c[0]) ** 2) for p, c in pairs) / 2


def by_hand(every, fragments, overlap, merge, steps, outer_rate=0.7, momentum=0.9, inner_momentum=0.5):
    """Streaming DiLoCo with SGD inside and Nesterov outside, leaf by leaf in f64; fragments are ranges of leaves."""
    theta = [np.asarray(x, np.float64) for x in jax.tree.leaves(exact(99))]
    centre = [np.asarray(x[:, 0], np.float64) for x in jax.tree.leaves(centres())]
    own, velocity = [np.stack([x] * K) for x in theta], [np.zeros((K, *x.shape)) for x in theta]
    trace, sent = [np.zeros_like(x) for x in theta], {}
    ranges = jgc.loops.outer.cut([x.size for x in theta], fragments)
    for done in range(1, steps + 1):
        for i in range(len(theta)):
            velocity[i] = own[i] - centre[i] + inner_momentum * velocity[i]
            own[i] = own[i] - 0.1 * velocity[i]
        for p, leaves in enumerate(ranges):
            start = (p + 1) * every // fragments
            if done >= start and (done - start) % every == 0:
                sent[done + overlap] = leaves, [(theta[i] - own[i]).mean(0) for i in leaves]
        for i, delta in zip(*sent.pop(done, ((), ())), strict=True):
            trace[i] = delta + momentum * trace[i]
            theta[i] = theta[i] - outer_rate * (delta + momentum * trace[i])
            own[i] = merge * own[i] + (1 - merge) * theta[i]
    return theta, own


ROUNDS = [(1, 0, 0.0), (3, 0, 0.0), (1, 2, 0.5), (3, 4, 0.25), (2, 0, 0.5)]  # fragments, overlap, merge


@every_layout
@pytest.mark.parametrize("fragments, overlap, merge", some_by_default(ROUNDS, [ROUNDS[0], ROUNDS[3]]), ids=str)
def test_equals_a_loop_by_hand(layout, fragments, overlap, merge):
    every, steps = 5, 18
    inner, outer = optax.sgd(0.1, momentum=0.5), optax.sgd(0.7, momentum=0.9, nesterov=True)
    local = jgc.local_steps(inner, outer, dense(), every, nodes_of(layout), fragments, overlap, merge)
    states, metrics = run(local, quadratic, lambda i: centres(), steps)
    theta, own = by_hand(every, fragments, overlap, merge, steps)
    for got, want in zip(jax.tree.leaves(states[-1].params), theta, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for got, want in zip(jax.tree.leaves(states[-1].own), own, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert [m.exchanged for m in metrics] == [local.due(i + 1).exchange for i in range(steps)]
    assert all((m.info is None) == (m.exchanged is None) for m in metrics)


OUTER = [optax.sgd(1.0), optax.sgd(0.7, momentum=0.9, nesterov=True), optax.adam(0.02)]
COARSE = [dense(), topk(alpha=0.3), qsgd()]


@pytest.mark.parametrize("outer", some_by_default(OUTER, OUTER[1:2]), ids=["sgd", "nesterov", "adam"])
@pytest.mark.parametrize("compressor", some_by_default(COARSE, COARSE[1:2]), ids=["dense", "topk", "qsgd"])
def test_outer_step_lowers_a_quadratic(compressor, outer):
    local = jgc.local_steps(optax.sgd(0.02), outer, compressor, every=4, nodes=nodes_of("1 device"))
    states, _ = run(local, quadratic, lambda i: centres(), 8)

    def value(params):
        return np.mean([quadratic(params, jax.tree.map(lambda c, k=k: c[k], centres())) for k in range(K)])

    losses = [value(state.params) for state in states]
    assert losses[3] == losses[0] > losses[4] == losses[7] > losses[8]  # only exchanges move what is shared


# --- every registered compressor ------------------------------------------------------------------------------------


def of_method(name):
    """A method with the contract suite's settings, short phases, and no momentum of its own where that can be."""
    if name not in METHODS:
        return contract.compressor_of(name)
    fields = {field.name for field in dataclasses.fields(METHODS[name].settings)}
    short = {"warmup_steps": 1, "autoencoder_steps": 1, "sampling_steps": 2, "momentum_correction": False,
             "factor_masking": False, "momentum_at_once": False, "error_feedback": True,
             "centred": False}  # fmt: skip
    return build(settings_of(name, **{key: x for key, x in short.items() if key in fields}))


KEEPING = ("qsgd/two-shot feedback", "onebit/two-shot", "powersgd/alternate")  # variants with other collectives


@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", some_by_default([*METHODS, *KEEPING], ("topk", "powersgd")))
def test_rounds_conserve_pseudo_gradients(name, fragments):
    """Over rounds: what the nodes have moved = what the shared parameters have moved + the mean residual."""
    compressor, nodes, every, rounds = of_method(name), nodes_of("1 device"), 3, 4
    if compressor.owns_momentum:
        with pytest.raises(ValueError, match="the compressor's memory owns a momentum"):
            jgc.local_steps(optax.sgd(RATE), optax.sgd(1.0), compressor, every, nodes)
        return
    local = jgc.local_steps(optax.sgd(RATE), optax.sgd(1.0), compressor, every, nodes, fragments)
    states, metrics = run(local, linear, gradients, every * rounds)
    ranges, flat = local.parts.leaves(exact(99)), [jax.tree.leaves(s.params) for s in states]
    moved = [np.zeros(x.shape) for x in flat[0]]
    for i, found in enumerate(metrics):
        if found.exchanged is None:
            continue
        assert found.info.finite.all() and found.finite.all()
        own, steps = jax.tree.leaves(states[i].own), jax.tree.leaves(exact(i, K))
        for leaf in ranges[found.exchanged]:
            moved[leaf] += (flat[i][leaf] - (own[leaf] - RATE * steps[leaf])).mean(0)  # the step that came before it
    exempt = name in METHODS and "conservation" in METHODS[name].exempt
    if exempt and not getattr(settings_of(name), "error_feedback", False):
        return
    kept = kept_of(local, states[-1], ranges)
    for i, first in enumerate(flat[0]):
        np.testing.assert_allclose(first - flat[-1][i] + kept[i], moved[i], rtol=0, atol=2e-5)


def kept_of(local, state, ranges):
    """The mean residual of every leaf."""
    found = {}
    for own, leaves in zip(state.compressor, ranges, strict=True):
        part = jgc.loops.outer.take(state.params, leaves)
        each = [
            jgc.residual(local.parts.method(), jax.tree.map(lambda x, k=k: x[k], own.local), part) for k in range(K)
        ]
        found |= {path: np.mean([np.asarray(one[path]) for one in each], 0) for path in each[0]}
    return [found.get(path, 0.0) for path in jgc.layout.pack.leaf_paths(state.params)]


def test_phases_count_exchanges():
    compressor = topk(alpha=0.2, warmup_steps=2)
    local = jgc.local_steps(optax.sgd(RATE), optax.sgd(1.0), compressor, 3, nodes_of("1 device"), fragments=2)
    init, step = local.make_step(linear)
    state, names = init(jax.random.key(0), exact(99)), []
    for i in range(9):
        state, metrics = step(state, gradients(i))
        if metrics.exchanged is not None:
            names.append((metrics.exchanged, state.phases[metrics.exchanged].name))
    assert names == [(0, "dense"), (1, "dense"), (0, "dense"), (1, "dense"), (0, "top-k"), (1, "top-k")]


def test_patterns_of_layers_need_not_match_in_every_fragment():
    compressor = per_layer([("kernel", dense())], default=topk(alpha=0.2))
    local = jgc.local_steps(optax.sgd(RATE), optax.sgd(1.0), compressor, 3, nodes_of("1 device"), fragments=3)
    _, metrics = run(local, linear, gradients, 3)
    assert sum(float(m.info.elements_sent[0]) for m in metrics if m.info) >= 72  # the kernel's, and some others
    wrong = per_layer([("kernels", dense())], default=topk(alpha=0.2))
    local = jgc.local_steps(optax.sgd(RATE), optax.sgd(1.0), wrong, 3, nodes_of("1 device"), fragments=3)
    with pytest.raises(ValueError, match="the pattern 'kernels' matches no parameter"):
        local.make_step(linear)[0](jax.random.key(0), exact(99))


# --- layouts, programs, restoring -----------------------------------------------------------------------------------


STREAMING = {"fragments": 2, "overlap": 2, "merge": 0.5}


EXCHANGES = [(topk(alpha=0.1), {}), (topk(alpha=0.1), STREAMING | {"merge": 0.0}), (qsgd(), STREAMING)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, more", some_by_default(EXCHANGES, EXCHANGES[1:2]), ids=["topk", "topk, streaming", "qsgd, streaming"]
)
def test_layouts_agree_bit_for_bit(method, more):
    first, *others = [
        run(jgc.local_steps(optax.sgd(RATE), optax.sgd(0.5), method, 4, nodes_of(layout), **more),
            linear, gradients, 9)[0][-1] for layout in LAYOUTS
    ]  # fmt: skip
    assert all(same_bits(first, other) for other in others)


@every_layout
def test_compiles_once_for_inner_steps_and_for_each_fragment_and_phase(layout):
    compressor = topk(alpha=0.2, warmup_steps=1)
    local = jgc.local_steps(optax.adamw(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True), compressor, 4,
                            nodes_of(layout), fragments=2, overlap=1)  # fmt: skip
    with (
        compilations("inner_update") as inner,
        compilations("exchange_update") as exchanges,
        compilations("outer_update") as outer,
    ):
        run(local, linear, gradients, 14)
    assert (len(inner), len(exchanges), len(outer)) == (1, 4, 2)


@pytest.mark.parametrize("layout", some_by_default(["8 devices", "4 devices"], ["4 devices"]))
def test_inner_steps_send_nothing_and_exchanges_what_bytes_per_round_says(layout):
    compressor = topk(alpha=0.2)
    local = jgc.local_steps(optax.adamw(0.1), optax.sgd(0.7), compressor, 4, nodes_of(layout), fragments=2)
    state, parts = local.make_step(linear)[0](jax.random.key(0), exact(99)), local.parts
    arrays, batch = Arrays(*state[2:-2]), jgc.place(gradients(0), jgc.BATCH, parts.nodes)
    args = arrays.own, arrays.inner, (), batch, arrays.largest_norm, None
    inner_step = inner_program(parts, arrays, (), None, linear, has_aux=False, unroll=True)
    assert collectives(inner_step.lower(*args).compile()) == ()
    exchanges = [exchange_program(parts, arrays, p, state.phases[p].value) for p in range(2)]
    found = [collectives(exchange.lower(arrays, state.key, np.int32(3)).compile()) for exchange in exchanges]
    sent = local.bytes_per_round(exact(99))["top-k"]
    assert sum(c.sent_bytes for one in found for c in one) == sent.device > 0
    assert sent.uncompressed == 4 * 4 * sum(x.size for x in jax.tree.leaves(exact(99)))


@every_layout
def test_restored_in_the_middle_of_a_round_goes_on_bit_for_bit(layout):
    def make():
        compressor = topk(alpha=0.2, warmup_steps=1)
        return jgc.local_steps(optax.adam(0.01), optax.sgd(0.7, momentum=0.9), compressor, 4, nodes_of(layout), 2, 1)

    init, step = make().make_step(linear)
    state, saved = init(jax.random.key(0), exact(99)), None
    for i in range(9):
        if i == 5:
            host = jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key), phases=()))
            saved = host._replace(step=5, key=jax.random.wrap_key_data(host.key), phases=state.phases)
        state, _ = step(state, gradients(i))
    _, step = make().make_step(linear)
    for i in range(5, 9):
        saved, _ = step(saved, gradients(i))
    assert same_bits(on_host(saved), on_host(state)) and saved.phases == state.phases


# --- a state of the model's that is no parameter --------------------------------------------------------------------


@every_layout
def test_model_state_is_each_nodes_own_and_goes_on_when_restored(layout):
    """The loss adds up what a node has seen; a step that a node leaves out adds nothing there, and no exchange does."""

    def make():
        local = jgc.local_steps(optax.adam(0.01), optax.sgd(0.7), topk(alpha=0.2), 4, nodes_of(layout))
        return local.make_step(adding)

    def adding(params, batch, seen):
        value = linear(params, batch) + 0 * seen["sum"].sum()
        return value, {"sum": seen["sum"] + batch["a"][0], "steps": seen["steps"] + 1}

    def batch_of(i):
        batch = gradients(i)
        if i == 2:
            batch["a"][5] = np.nan
        return batch

    (init, step), first = make(), {"sum": np.zeros((6, 8), np.float32), "steps": np.int32(0)}
    with compilations("inner_update") as compiled:
        state, want = init(jax.random.key(0), exact(99), first), np.zeros((K, 6, 8), np.float32)
        for i in range(6):
            state, _ = step(state, batch_of(i))
            want += np.nan_to_num(batch_of(i)["a"][:, 0])
    assert len(compiled) == 1
    np.testing.assert_array_equal(state.model_state["sum"], want)
    assert state.model_state["steps"].tolist() == [5 if k == 5 else 6 for k in range(K)]
    saved = jax.tree.map(np.array, jgc.as_arrays(state))
    (_, again), expected = make(), step(state, batch_of(6))[0]
    assert same_bits(on_host(again(jgc.from_arrays(saved), batch_of(6))[0]), on_host(expected))


def test_loss_must_return_the_model_state_it_got():
    local = jgc.local_steps(optax.sgd(0.1), optax.sgd(0.7), dense(), 2, nodes_of("1 device"))
    init, step = local.make_step(lambda params, batch, seen: (linear(params, batch), {}))
    state = init(jax.random.key(0), exact(99), {"n": jnp.zeros(())})
    with pytest.raises(TypeError, match="'n' was float32"):
        step(state, gradients(0))
    with pytest.raises(TypeError, match="'n'"):
        init(jax.random.key(0), exact(99), {"n": "none"})


# --- taking over the shared parameters in part ----------------------------------------------------------------------


@pytest.mark.parametrize("name", some_by_default(METHODS, ("topk", "qsgd")))
def test_methods_know_whether_they_keep_a_residual(name):
    compressor, nodes = build(settings_of(name)), nodes_of("1 device")
    local = jax.tree.map(lambda x: x[0], compressor.init(jax.random.key(0), exact(99), nodes).local)
    assert any_residual(compressor.method) == bool(jgc.residual(compressor, local, exact(99)))


@pytest.mark.parametrize("merge", some_by_default([0.0, 0.5, 0.9], [0.5]))
def test_a_gradient_counts_once_however_much_a_node_keeps(merge):
    """One gradient, then zeros: the parameters move by its mean, and stay there."""
    local = jgc.local_steps(optax.sgd(1.0), optax.sgd(1.0), dense(), 1, nodes_of("1 device"), merge=merge)
    zeros = jax.tree.map(np.zeros_like, gradients(0))
    states, _ = run(local, linear, lambda i: zeros if i else gradients(0), 60)
    want = jax.tree.map(lambda p, g: p - g.mean(0)[0], exact(99), gradients(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), states[-1].params, want)


# --- what is not finite -------------------------------------------------------------------------------------------


@every_layout
def test_node_leaves_out_a_step_whose_gradient_is_not_finite(layout):
    local = jgc.local_steps(optax.adam(0.01), optax.sgd(0.7), topk(alpha=0.2), 4, nodes_of(layout))

    def batch_of(i):
        batch = gradients(i)
        if i == 1:
            batch["a"][5] = np.nan
        return batch

    states, metrics = run(local, linear, batch_of, 4)
    assert metrics[1].finite.tolist() == [k != 5 for k in range(K)] and metrics[3].info.finite.all()
    stayed, moved = (jax.tree.map(lambda x, k=k: x[k], (states[1].own, states[1].inner)) for k in (5, 4))
    assert same_bits(stayed, jax.tree.map(lambda x: x[5], (states[2].own, states[2].inner)))
    assert not same_bits(moved, jax.tree.map(lambda x: x[4], (states[2].own, states[2].inner)))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(states[-1].params))


@pytest.mark.parametrize("overlap", some_by_default([0, 1], [1]))
def test_exchange_of_what_is_not_finite_changes_nothing(overlap):
    local = jgc.local_steps(optax.sgd(0.01), optax.sgd(0.7, momentum=0.9), topk(alpha=0.2), 2, nodes_of("4 devices"),
                            overlap=overlap)  # fmt: skip
    init, step = local.make_step(linear)
    state = init(jax.random.key(0), exact(99))
    for i in range(3):
        state, _ = step(state, gradients(i))
    before = on_host(state)
    own = jax.tree.map(lambda x: x.at[2].set(jnp.inf), state.own)
    for i in range(3, 5):
        state, metrics = step(state._replace(own=own) if i == 3 else state, gradients(i))
        assert i == 4 or not metrics.info.finite.any()
    after = on_host(state)
    for name in ("params", "outer", "compressor"):
        assert same_bits(getattr(before, name), getattr(after, name)), name


# --- nodes of several devices ----------------------------------------------------------------------------------------

SPECS = {"in": P(None, "fsdp"), "bias": P(), "out": P("fsdp", None)}


def wide_loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"] + params["bias"]) @ params["out"] - batch["y"]) ** 2)


def wide_batch(i):
    x = np.random.default_rng(i).normal(size=(2, 8, 12)).astype(np.float32)
    return {"x": x, "y": x[..., :4]}


def wide_params():
    random = np.random.default_rng(5)
    shapes = {"in": (12, 16), "bias": (16,), "out": (16, 4)}
    return {name: jnp.asarray(0.3 * random.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


WAYS = [(kind, more) for more in ({}, STREAMING | {"overlap": 1}) for kind in (AxisType.Auto, AxisType.Explicit)]


@pytest.mark.parametrize("axis_type, more", some_by_default(WAYS, WAYS[1:2]), ids=str)
def test_divided_parameters_stay_divided_and_train_as_whole_ones(axis_type, more):
    """Clipping to a global norm inside sees whole arrays."""
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(axis_type,) * 2)
    nodes = jgc.from_mesh(mesh, slow="dcn", fast="fsdp")
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05))
    local = jgc.local_steps(inner, optax.sgd(0.7, momentum=0.9), dense(), 3, nodes, **more)
    divided = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in wide_params().items()}
    init, step = local.make_step(wide_loss)
    state = init(jax.random.key(0), divided)
    shardings = jax.tree.map(lambda x: x.sharding, state[2:])
    whole, _ = run(local, wide_loss, wide_batch, 7, wide_params())
    with compilations("inner_update") as compiled:
        for i in range(7):
            state, metrics = step(state, wide_batch(i))
    assert len(compiled) == 1 and metrics.finite.all()
    assert jax.tree.map(lambda x: x.sharding, state[2:]) == shardings
    shapes = {name: x.addressable_shards[0].data.shape for name, x in state.own.items()}
    assert shapes == {"in": (1, 12, 4), "bias": (1, 16), "out": (1, 4, 4)}
    (adam,) = (x for x in jax.tree.leaves(state.inner, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu"))
    assert {name: x.addressable_shards[0].data.shape for name, x in adam.mu.items()} == shapes
    for name, x in whole[-1].params.items():
        np.testing.assert_allclose(state.params[name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_default(["topk", "powersgd", "signsgd"], ["powersgd"]))
def test_divided_parameters_with_methods(name):
    nodes = jgc.from_mesh(jax.make_mesh((2, 4), ("dcn", "fsdp")), slow="dcn", fast="fsdp")
    local = jgc.local_steps(optax.adam(0.02), optax.sgd(1.0), of_method(name), 2, nodes)
    divided = {key: jax.device_put(x, NamedSharding(nodes.mesh, SPECS[key])) for key, x in wide_params().items()}
    init, step = local.make_step(wide_loss)
    state, losses = init(jax.random.key(0), divided), []
    for i in range(40):
        state, metrics = step(state, wide_batch(i % 4))
        losses.append(float(metrics.loss.mean()))
    assert metrics.info.finite.all() and metrics.info.elements_sent.shape == (2,)
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "every must be at least 1 step, got 0"),
        ({"every": 2.5}, "every must be a whole number, got 2.5"),
        ({"every": True}, "every must be a whole number, got True"),
        ({"fragments": 0}, "fragments must be from 1 to every = 5, got 0"),
        ({"fragments": 6}, "fragments must be from 1 to every = 5, got 6"),
        ({"overlap": 5}, "overlap must be from 0 to every - 1 = 4 steps, got 5"),
        ({"merge": "half"}, "merge must be a number, got 'half'"),
        ({"merge": None}, "merge must be a number, got None"),
        ({"merge": 0.5, "compressor": topk()}, "merge=0.5 keeps in a node's parameters a part that"),
        ({"merge": 1.0}, r"merge must be in \[0, 1\), got 1.0"),
        (
            {"compressor": jgc.compress.dgc()},
            "the compressor's memory owns a momentum, and pseudo-gradients get theirs",
        ),
        ({"compressor": jgc.compress.demo()}, "the compressor's memory owns a momentum"),
        ({"compressor": jgc.compress.topk}, "expected a compressor, got the function topk"),
        ({"inner": 0.1}, r"inner must be an optax optimiser, e.g. optax.sgd\(0.7\), got 0.1"),
    ],
)
def test_bad_settings_are_one_line(changes, message):
    settings = {"inner": optax.sgd(1), "outer": optax.sgd(1), "compressor": dense(), "every": 5,
                "nodes": nodes_of("1 device")}  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message) as error:
        jgc.local_steps(**settings | changes)
    assert "\n" not in str(error.value)


def test_mistakes_that_parameters_show_are_one_line():
    nodes = nodes_of("1 device")
    local = jgc.local_steps(optax.sgd(1), optax.sgd(1), dense(), 5, nodes, fragments=5)
    with pytest.raises(ValueError, match="fragments=5 exceeds the 4 arrays of the parameters: give at most 4"):
        local.make_step(linear)[0](jax.random.key(0), exact(99))
    with pytest.raises(ValueError, match="params has no arrays: give the model's parameters"):
        local.make_step(linear)[0](jax.random.key(0), {})
    compressing = jgc.compress.as_optax(dense(), nodes)
    local = jgc.local_steps(optax.sgd(1), compressing, dense(), 5, nodes)
    with pytest.raises(ValueError, match="the outer optimiser holds as_optax"):
        local.make_step(linear)[0](jax.random.key(0), exact(99))
