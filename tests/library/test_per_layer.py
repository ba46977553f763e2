"""Different methods for different layers, and what they cost together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import nodes_of, same_bits, some_by_default

import jgc
from jgc.compress import dense, per_layer, topk
from jgc.lab.shared.hlo import collectives, table
from jgc.method.compressor import compressor_of
from jgc.types import State

PARAMS = {
    "Conv_0": {"kernel": jnp.zeros((3, 4))},
    "Dense_1": {"kernel": jnp.zeros((6, 7)), "bias": jnp.zeros(7)},
    "head": {"kernel": jnp.zeros((7, 5))},
}


def _gradients(like=PARAMS):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.integers(-64, 65, (8, *x.shape)) / 64, x.dtype), like)


def _run(compressor, grads, layout="1 device", steps=2, phase=0):
    nodes = nodes_of(layout)
    state = compressor.init(jax.random.key(0), jax.tree.map(lambda g: g[0], grads), nodes)
    state, grads = jgc.place(state, State(jgc.SHARED, jgc.LOCAL), nodes), jgc.place(grads, jgc.LOCAL, nodes)
    step = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[phase].value, nodes))
    for _ in range(steps):
        aggregated, state, info = step(jax.random.key(0), grads, state)
    return aggregated, state, info, step.lower(jax.random.key(0), grads, state).compile()


def test_each_group_matches_its_method_alone():
    grads = _gradients()
    together, _, info, _ = _run(per_layer([("^Conv_0/", dense()), ("head", topk(alpha=0.5))], topk(alpha=0.1)), grads)
    first, _, first_info, _ = _run(dense(), {"Conv_0": grads["Conv_0"]})
    last, _, last_info, _ = _run(topk(alpha=0.5), {"head": grads["head"]})
    rest, _, rest_info, _ = _run(topk(alpha=0.1), {"Dense_1": grads["Dense_1"]})
    assert same_bits(together, {**first, **rest, **last})
    infos = (first_info, rest_info, last_info)
    np.testing.assert_allclose(info.elements_sent, sum(i.elements_sent for i in infos))
    np.testing.assert_allclose(info.residual_norm**2, sum(i.residual_norm**2 for i in infos), rtol=1e-5)


def test_leaf_uses_first_matching_rule():
    grads = _gradients()
    both = per_layer([("kernel", dense()), ("Dense_1", topk(alpha=0.1))], default=topk(alpha=0.1))
    aggregated, state, _, _ = _run(both, grads, steps=1)
    assert np.array_equal(aggregated["Dense_1"]["kernel"], grads["Dense_1"]["kernel"].mean(0))
    assert [jax.tree.map(jnp.shape, local.memory) for local in state.local] == [(), (8, 7), (8, 0)]


@pytest.mark.parametrize("layout", some_by_default(["8 devices", "4 devices"], ["4 devices"]))
def test_groups_with_same_exchange_share_one_collective(layout):
    grads, nodes = _gradients(), nodes_of(layout)
    compressor = per_layer([("^Conv_0/", topk(alpha=0.2)), ("head", topk(alpha=0.5))], topk(alpha=0.1))
    *_, compiled = _run(compressor, grads, layout, steps=1)
    found = table(collectives(compiled))
    assert {op: total.times for op, total in found.items()} == {"all-gather": 1, "all-to-all": 1}  # payload, flag
    values = 2 + 4 + 1 + 18  # of Conv_0, the kernel and bias of Dense_1, the head
    words = values + 1 + 1 + 2  # positions in Elias-Fano code, each group's in whole words: 18 of 36 take 54 bits
    assert found["all-gather"].sent_bytes == 4 * words * nodes.per_device * (8 // nodes.per_device - 1)


def test_phase_is_tuple_of_group_phases_with_default_last():
    compressor = per_layer([("^Conv_0/", dense())], default=topk(alpha=0.1, warmup_steps=3))
    assert [(p.name, p.start, p.value) for p in compressor.schedule] == [
        ("dense", 0, ("dense", "dense")),
        ("top-k", 3, ("dense", "top-k")),
    ]


def test_combinators_nest():
    grads = _gradients()
    inner = per_layer([("head", topk(alpha=0.5))], default=topk(alpha=0.1))
    nested, *_ = _run(per_layer([("^Conv_0/", dense())], default=inner), grads)
    at_once, *_ = _run(per_layer([("^Conv_0/", dense()), ("head", topk(alpha=0.5))], default=topk(alpha=0.1)), grads)
    assert same_bits(nested, at_once)


def test_one_guard_covers_all_groups():
    grads = _gradients()
    grads["head"]["kernel"] = grads["head"]["kernel"].at[4, 0, 0].set(jnp.nan)
    aggregated, state, info, _ = _run(per_layer([("^Conv_0/", dense())], default=topk(alpha=0.1)), grads, steps=1)
    assert not any(np.any(x) for x in jax.tree.leaves((aggregated, state)))
    assert not info.finite.any()


def test_transition_runs_only_in_groups_whose_phase_changes():
    def counting(compressor):
        def transition(old, new, state, nodes):
            seen.append((old, new))
            return State(state.shared, jax.tree.map(lambda x: x + 1, state.local))

        return compressor_of(compressor.method._replace(transition=transition))

    seen: list = []
    compressor = per_layer([("^Conv_0/", topk(alpha=0.1))], default=counting(topk(alpha=0.1, warmup_steps=3)))
    state = compressor.init(jax.random.key(0), PARAMS, nodes_of("1 device"))
    after = compressor.transition(*(p.value for p in compressor.schedule), state, nodes_of("1 device"))
    assert seen == [("dense", "top-k")]
    assert same_bits(after.local[0], state.local[0]) and np.all(after.local[1].memory == 1)


def test_transition_takes_values_of_phases():
    compressor, nodes = per_layer([("head", topk(warmup_steps=1))], default=topk(warmup_steps=2)), nodes_of("1 device")
    state, (first, second, _) = compressor.init(jax.random.key(0), PARAMS, nodes), compressor.schedule
    with pytest.raises(TypeError, match=r"phase must be the value of a phase, got a Phase: give phase.value"):
        compressor.transition(first, second, state, nodes)
    with pytest.raises(ValueError, match="phase must be one of"):
        compressor.transition(first.value, "late", state, nodes)


def test_logical_bytes_add_up_over_groups():
    nodes = nodes_of("1 device")
    led = jgc.compress.lgc_ps(alpha=0.5, warmup_steps=0, autoencoder_steps=0, momentum_correction=False)
    both = per_layer([("^Conv_0/", dense())], default=led)
    alone = led.wire("compressed", {k: v for k, v in PARAMS.items() if k != "Conv_0"}, nodes)
    together = both.wire(("dense", "compressed"), PARAMS, nodes)
    totals = {m[:3]: m.bytes for m in together.logical}
    for role in ("leader", "worker"):
        for direction in ("up", "down"):
            assert totals.pop((role, direction, "dense")) == 12 * 4
    assert totals == {m[:3]: m.bytes for m in alone.logical}


CYCLES = {
    "gradiveq": (jgc.compress.gradiveq, {"warmup_steps": 1, "sampling_steps": 2, "compressed_steps": 2}),
    "powersgd": (jgc.compress.powersgd, {"alternate": True, "warmup_steps": 1}),
}


@pytest.mark.parametrize("warmup", [2, 3, 6])
@pytest.mark.parametrize("name", CYCLES)
def test_the_bytes_of_found_phases_have_their_names(name, warmup):
    method, settings = CYCLES[name]
    params = {"conv": jnp.zeros((3, 3, 2, 4)), "head": jnp.zeros((20, 5))}
    compressor = per_layer([("^head", topk(alpha=0.05, warmup_steps=warmup))], default=method(**settings))
    nodes = nodes_of("1 device")
    sizes = jgc.bytes_per_step(compressor, params, nodes)
    init, step = jgc.make_step(lambda p, x: sum(jnp.mean((w - x) ** 2) for w in jax.tree.leaves(p)), compressor,
                               optax.sgd(0.1), nodes)  # fmt: skip
    state = init(jax.random.key(0), params)
    for i in range(8):
        state, _ = step(state, np.random.default_rng(i).normal(size=(8, 1)).astype(np.float32))
        wire = compressor.wire(state.phase.value, params, nodes)
        sent = sum(message.bytes for message in wire.logical if message.direction == "up" and message.role == "worker")
        assert sizes.get(state.phase.name, jgc.bytes_per_step(compressor, params, nodes, state.phase)[
            state.phase.name]).node == sent  # fmt: skip


def test_groups_that_find_their_phases_add_none_to_the_schedule():
    led = jgc.compress.powersgd(alternate=True, warmup_steps=1)
    groups = [(f"^{name}", led) for name in ("Conv_0", "Dense_1")]
    assert [p.name for p in per_layer(groups, default=led).schedule] == [p.name for p in led.schedule]


def test_lgc_without_layers_sends_nothing():
    for led in (jgc.compress.lgc_ps, jgc.compress.lgc_ring):
        compressor = per_layer([(".", dense())], default=led(momentum_correction=False))
        for phase in ("top-k", "compressed"):
            wire = compressor.wire(("dense", phase), PARAMS, nodes_of("1 device"))
            assert {message.field for message in wire.logical} == {"dense"} and not wire.once
        _run(compressor, _gradients(), steps=1, phase=2)


def test_a_pattern_that_matches_nothing_is_an_error_that_lists_the_paths():
    compressor = per_layer([("^Conv_7/", dense())], default=topk(alpha=0.1))
    with pytest.raises(ValueError, match=r"'\^Conv_7/' matches no parameter; there are Conv_0/kernel, Dense_1/bias"):
        compressor.init(jax.random.key(0), PARAMS, nodes_of("1 device"))


def test_two_momentum_owners_are_an_error_when_built():
    with pytest.raises(ValueError, match=r"the layers of default own their momentum, and those of '\^Conv_0/' leave"):
        per_layer([("^Conv_0/", dense())], default=topk(alpha=0.1, momentum_correction=True))


@pytest.mark.parametrize("correction", [False, True])
def test_method_policy_has_one_momentum_owner(correction):
    settings = {"momentum_correction": True, "momentum": 0.5} if correction else {}
    compressor = per_layer([("^Conv_0/", dense(**settings))], default=topk(alpha=0.1, **settings))
    assert compressor.owns_momentum == correction
    aggregated, *_ = _run(compressor, _gradients(), steps=3)
    series = 1 + 0.5 + 0.25 if correction else 1  # of a gradient that stays the same
    assert np.array_equal(aggregated["Conv_0"]["kernel"], series * _gradients()["Conv_0"]["kernel"].mean(0))


def test_members_are_checked_against_their_own_leaves():
    nodes = nodes_of("1 device")
    for member in (jgc.compress.stacked("^typo/", topk()), per_layer([("^typo/", dense())], topk())):
        with pytest.raises(ValueError, match=r"the pattern '\^typo/' matches no parameter"):
            per_layer([("^Conv_0/", member)], default=topk()).init(jax.random.key(0), PARAMS, nodes)


def test_rule_about_shapes_must_say_of_shards_what_it_says_of_leaves():
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    nodes = jgc.from_mesh(mesh, "dcn", "fsdp")
    params = {"w": jax.device_put(np.zeros((8, 16), np.float32), jax.NamedSharding(mesh, jax.P("fsdp")))}
    tall = (lambda path, x: x.shape[0] >= 8, topk())
    with pytest.raises(ValueError, match=r"a rule says True of w \[8, 16\], and of the shards .* \[2, 16\], the op"):
        per_layer([tall], default=dense()).init(jax.random.key(0), params, nodes)
    with pytest.raises(ValueError, match="the opposite"):
        jgc.compress.stacked(tall[0], topk()).init(jax.random.key(0), params, nodes)
    wide = (lambda path, x: x.shape[1] >= 16, topk())
    assert per_layer([wide], default=dense()).init(jax.random.key(0), params, nodes).shared is not None
