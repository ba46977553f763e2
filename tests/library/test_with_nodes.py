"""`jgc.with_nodes`: the mean of all that nodes keep stays, training goes on as it would have, mistakes are named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from contract import nodes_of, same_bits, settings_of, some_by_default
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgc
from jgc.checks.misuse import is_key, leaves_by_path
from jgc.compress import METHODS, as_optax, build, dense, dgc, qsgd, topk
from jgc.loops.mixed import check_own
from jgc.loops.outer import Arrays

PARAMS = {
    "a": np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8),
    "bias": np.zeros(8, np.float32),
    "conv": {"kernel": np.full((3, 3, 2, 4), 0.5, np.float32)},
    "s": np.float32(0.3),
}
FOUR = {
    "4 devices": lambda: jgc.make_nodes(4, jax.devices()[:4]),
    "2 devices": lambda: jgc.make_nodes(4, jax.devices()[:2]),
    "1 device": lambda: jgc.make_nodes(4, jax.devices()[:1]),
}


def pull(params, batch):
    """Half the squared distance from a node's examples, which differ in every parameter."""
    parts = jax.tree.leaves(params)
    shift = jnp.arange(len(parts), dtype=jnp.float32)
    pairs = zip(parts, shift, strict=True)
    return sum(jnp.mean((p - jnp.sin(batch + s).mean()) ** 2) for p, s in pairs) / 2


def batch_of(step, nodes):
    return np.random.default_rng(step).normal(size=(nodes, 8 // nodes * 2)).astype(np.float32)


def on_host(state):
    """The arrays of a state by path; keys as their numbers."""
    arrays = {name: x for name, x in state._asdict().items() if name not in ("step", "phase", "phases")}
    leaves = leaves_by_path(arrays)
    return {name: np.array(jax.random.key_data(x) if is_key(x) else x) for name, x in leaves.items()}


def of_nodes(name):
    of_loop = name.startswith(("own", "inner", "largest_norm", "model_state"))
    return of_loop or ("compressor" in name and "/local/" in name)


def check_mean(before, after):
    """All that a node keeps has the mean of before, rounded once; all else is as it was."""
    for name, x in before.items():
        y = after[name]
        if of_nodes(name) and jnp.issubdtype(x.dtype, jnp.inexact):
            mean = x.astype(np.float64).mean(0)
            assert y.shape == (len(y), *x.shape[1:]) and y.dtype == x.dtype
            np.testing.assert_array_equal(y, np.broadcast_to(mean.astype(x.dtype), y.shape), err_msg=name)
        elif of_nodes(name) or x.shape != y.shape:  # in turn: counters, LGC's decoders
            np.testing.assert_array_equal(y, x[np.arange(len(y)) % len(x)], err_msg=name)
        else:
            assert same_bits(x, y), name


def go(step, state, steps, nodes):
    for _ in range(steps):
        state, metrics = step(state, batch_of(state.step, nodes))
    return state, metrics


# --- every method ---------------------------------------------------------------------------------------------------


def of_method(name):
    """A method with the contract suite's settings and short phases."""
    fields = {field.name for field in dataclasses.fields(METHODS[name].settings)}
    short = {"warmup_steps": 1, "autoencoder_steps": 1, "sampling_steps": 2}
    return build(settings_of(name, **{key: x for key, x in short.items() if key in fields}))


@pytest.mark.parametrize("name", some_by_default(METHODS, ["topk"]))
def test_every_method_goes_on_with_other_nodes(name):
    compressor = of_method(name)
    loops = {
        nodes: jgc.make_step(pull, compressor, optax.sgd(0.1), jgc.make_nodes(nodes, jax.devices()[:1]), unroll=False)
        for nodes in (8, 4)
    }
    state, _ = go(loops[8][1], loops[8][0](jax.random.key(1), PARAMS), 3, 8)
    before, fresh = on_host(state), loops[4][0](jax.random.key(0), PARAMS)
    moved = jgc.with_nodes(state, fresh)
    check_mean(before, on_host(moved))
    assert (moved.step, moved.phase) == (3, state.phase)
    assert jax.tree.structure(moved.compressor) == jax.tree.structure(fresh.compressor)
    moved, metrics = go(loops[4][1], moved, 2, 4)
    assert moved.step == 5 and bool(metrics.info.finite) and np.isfinite(metrics.loss)
    again = jgc.with_nodes(moved, loops[8][0](jax.random.key(0), PARAMS))
    check_mean(on_host(moved), on_host(again))
    assert np.isfinite(go(loops[8][1], again, 1, 8)[1].loss)


# --- the run goes on ------------------------------------------------------------------------------------------------

TRUE = np.random.default_rng(5).normal(size=(24, 2)).astype(np.float32)
EVERY, STEPS = 4, 64


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def examples(seed, count):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 24)).astype(np.float32)
    return {"x": x, "y": x @ TRUE + random.normal(size=(count, 2)).astype(np.float32)}


START = {"w": np.zeros((24, 2), np.float32), "b": np.zeros(2, np.float32)}


def local(compressor, **more):
    inner, outer = optax.adam(0.03), optax.sgd(0.7, momentum=0.6, nesterov=True)
    return lambda nodes: jgc.local_steps(inner, outer, compressor, EVERY, nodes, **more).make_step(loss, unroll=False)


def ordinary(compressor, optimizer):
    return lambda nodes: jgc.make_step(loss, compressor, optimizer, nodes, unroll=False)


LOOPS = {
    "topk": ordinary(topk(alpha=0.1), optax.adam(0.05)),
    "dgc": ordinary(dgc(alpha=0.1, momentum=0.9, warmup_steps=0), optax.sgd(0.01)),
    "local, momentum": local(dense()),
    "local, topk": local(topk(alpha=0.2)),
    "local, streaming": local(topk(alpha=0.2), fragments=2, overlap=1),
}


def curve(make, seed, nodes, changes):
    """The validation loss after every fourth step, with other numbers of nodes from the given steps on."""
    values, held_out = [], examples(999, 256)
    init, step = make(nodes)
    state = init(jax.random.key(seed), START)
    for i in range(STEPS):
        if i in changes:
            nodes = changes[i]
            init, step = make(nodes)
            before = on_host(state)
            state = jgc.with_nodes(state, init(jax.random.key(7), START))
            check_mean(before, on_host(state))
        batch = examples((seed, i), 64)
        state, _ = step(state, jax.tree.map(lambda x, k=nodes: x.reshape(k, 64 // k, -1), batch))
        if i % 4 == 3:
            values.append(float(loss(jax.device_get(state.params), held_out)))
    return np.array(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_default(LOOPS, ["local, streaming"]))
def test_eight_to_four_to_eight_nodes_trains_as_eight(name):
    """The change comes in the middle of a round of local steps. One step function per number of nodes is compiled."""
    made = {}

    def make(nodes):
        return made.setdefault(nodes, LOOPS[name](jgc.make_nodes(nodes, jax.devices()[:1])))

    whole = np.stack([curve(make, seed, nodes, {}) for nodes in (8, 4) for seed in range(3)])
    changed = np.stack([curve(make, seed, 8, {22: 4, 42: 8}) for seed in range(2)])
    np.testing.assert_allclose(changed, whole[:2], rtol=0.15)  # of the same batches, divided otherwise
    margin = whole.std(0)
    assert np.all(changed > whole.min(0) - margin) and np.all(changed < whole.max(0) + margin)
    assert np.all(changed[:, -1] < changed[:, 5] / 2)


# --- from a checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_default(["topk", "local, streaming"], ["local, streaming"]))
def test_goes_on_from_a_checkpoint_of_other_nodes(tmp_path, name):
    """8 nodes on 8 devices write, 4 nodes on 4 devices go on: as without the checkpoint, bit for bit."""
    (init, step), (init_of_4, step_of_4) = LOOPS[name](jgc.make_nodes(8)), LOOPS[name](FOUR["4 devices"]())

    def split(i, nodes):
        return jax.tree.map(lambda x: x.reshape(nodes, 64 // nodes, -1), examples(i, 64))

    state = init(jax.random.key(3), START)
    for i in range(6):
        state, _ = step(state, split(i, 8))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "8", jgc.as_arrays(state))
    blank = jgc.as_arrays(LOOPS[name](nodes_of("1 device"))[0](jax.random.key(0), START))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = jgc.from_arrays(checkpointer.restore(tmp_path / "8", blank))
    moved = [jgc.with_nodes(x, init_of_4(jax.random.key(0), START)) for x in (state, restored)]
    check_mean(on_host(restored), on_host(moved[1]))
    for i in range(6, 9):
        moved = [step_of_4(x, split(i, 4))[0] for x in moved]
    assert same_bits(jgc.as_arrays(moved[0]), jgc.as_arrays(moved[1]))


# --- layouts, keys, placement ---------------------------------------------------------------------------------------


def filled(state):
    """The state with other values, which differ between nodes."""
    random = np.random.default_rng(0)

    def fill(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jax.device_put(random.normal(size=x.shape).astype(x.dtype), x.sharding)

    arrays = {name: x for name, x in state._asdict().items() if name not in ("step", "phase", "phases")}
    return state._replace(**jax.tree.map(fill, arrays))


def test_layouts_agree_and_arrays_lie_where_the_fresh_ones_do():
    def first(nodes):
        steps = jgc.local_steps(optax.adam(0.1), optax.sgd(0.7, momentum=0.9), topk(alpha=0.2), 3, nodes, 2, 1)
        return steps.make_step(loss)[0](jax.random.key(1), START)

    state, want = filled(first(nodes_of("1 device"))), None
    before = on_host(state)
    for old in ("8 devices", "1 device"):
        state = jgc.with_nodes(state, first(nodes_of(old)))  # the same nodes elsewhere
        assert all(same_bits(x, before[name]) for name, x in on_host(state).items())
        for nodes in FOUR.values():
            fresh = first(nodes())
            moved = jgc.with_nodes(state, fresh)
            want = want or on_host(moved)
            assert all(same_bits(x, want[name]) for name, x in on_host(moved).items())
            for name in ("params", "own", "inner", "compressor", "waiting", "key"):
                leaves, like = (jax.tree.leaves(getattr(x, name)) for x in (moved, fresh))
                assert [x.sharding for x in leaves] == [x.sharding for x in like]
    check_mean(before, want)


def test_random_keys_of_nodes_stay_different():
    def with_key(params, batch, model):
        key, use = jax.random.split(model["key"])
        return pull(params, batch) * (1 + jax.random.uniform(use)), {"key": key, "steps": model["steps"] + 1}

    loops = {n: jgc.make_step(with_key, dense(), optax.sgd(0.1), jgc.make_nodes(n, jax.devices()[:1])) for n in (2, 5)}
    state = loops[2][0](jax.random.key(0), PARAMS, {"key": jax.random.key(3), "steps": np.int32(4)})
    state = state._replace(model_state={**state.model_state, "key": jax.random.split(jax.random.key(3, impl="rbg"), 2)})
    one = jax.tree.map(lambda x: x[0], state.model_state)
    moved = jgc.with_nodes(state, loops[5][0](jax.random.key(0), state.params, one))
    numbers = np.asarray(jax.random.key_data(moved.model_state["key"]))
    assert len(np.unique(numbers, axis=0)) == 5 and moved.model_state["key"].dtype == state.model_state["key"].dtype
    assert same_bits(numbers[:2], jax.random.key_data(state.model_state["key"]))
    assert moved.model_state["steps"].tolist() == [4] * 5


def sharded(hosts, chips, devices):
    axes = ("host", "chip")
    mesh = jax.make_mesh((hosts, chips), axes, devices=devices, axis_types=(AxisType.Auto,) * 2)
    nodes = jgc.from_mesh(mesh, slow="host", fast="chip")
    params = {"w": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("chip"))), "b": jnp.zeros(4)}
    return nodes, params


def whole_loss(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - 1) ** 2)


@pytest.mark.parametrize("kind", some_by_default(["make_step", "local_steps"], ["local_steps"]))
def test_divided_parameters_stay_divided(kind):
    def loop(nodes):
        if kind == "make_step":
            return jgc.make_step(whole_loss, topk(alpha=0.2), optax.adam(0.1), nodes)
        return jgc.local_steps(optax.adam(0.1), optax.sgd(0.5), topk(alpha=0.2), 2, nodes).make_step(whole_loss)

    four, params = sharded(4, 2, jax.devices())
    state = filled(loop(four)[0](jax.random.key(0), params))
    two, params_of_2 = sharded(2, 2, jax.devices()[:4])
    init, step = loop(two)
    fresh = init(jax.random.key(0), params_of_2)
    before, moved = on_host(state), jgc.with_nodes(state, fresh)
    check_mean(before, on_host(moved))
    assert jax.tree.map(lambda x: x.sharding, moved.params) == jax.tree.map(lambda x: x.sharding, fresh.params)
    batch = np.random.default_rng(1).normal(size=(2, 2, 8)).astype(np.float32)
    assert np.isfinite(step(moved._replace(step=3), batch)[1].loss).all()
    other, params_of_4 = sharded(2, 4, jax.devices())
    with pytest.raises(ValueError, match="If the parameters are sharded differently than before"):
        jgc.with_nodes(state, loop(other)[0](jax.random.key(0), params_of_4))


def test_an_optimiser_that_compresses_keeps_what_nodes_have_added_up():
    """`optax.MultiSteps` around `as_optax`: each node has its sum of gradients."""

    def opt_state(count):
        nodes = jgc.make_nodes(count, jax.devices()[:1])
        tx = optax.MultiSteps(optax.chain(as_optax(topk(alpha=0.2), nodes), optax.sgd(0.1)), 2)
        return jgc.init_optax(tx, PARAMS, nodes)

    random = np.random.default_rng(0)
    state = opt_state(8)
    sums = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), state.acc_grads)
    state = state._replace(acc_grads=sums)
    moved = jgc.with_nodes(state, opt_state(4))
    for x, y in zip(jax.tree.leaves(sums), jax.tree.leaves(moved.acc_grads), strict=True):
        mean = x.astype(np.float64).mean(0).astype(np.float32)
        np.testing.assert_array_equal(y, np.broadcast_to(mean, (4, *mean.shape)))


# --- mistakes -------------------------------------------------------------------------------------------------------


def fails(error, message):
    return pytest.raises(error, match=message)


def test_mistakes_are_named():
    (init, step), (init_of_4, _) = LOOPS["topk"](nodes_of("1 device")), LOOPS["topk"](FOUR["1 device"]())
    state, fresh = init(jax.random.key(0), START), init_of_4(jax.random.key(0), START)
    with fails(TypeError, "takes the state of jgc.make_step or jgc.local_steps, or that .* as_optax, got a dict"):
        jgc.with_nodes(START, fresh)
    with fails(TypeError, "takes the state of .*, got a Nodes"):
        jgc.with_nodes(state, nodes_of("1 device"))
    with fails(TypeError, "a jgc.Phase, got array.*: restore it by jgc.from_arrays"):
        jgc.with_nodes(jgc.as_arrays(state), fresh)
    streaming = LOOPS["local, streaming"](FOUR["1 device"]())[0](jax.random.key(0), START)
    with fails(TypeError, r"two states of one type, got a LoopState and a LocalState: make the fresh .* init\(key, "):
        jgc.with_nodes(state, streaming)
    other = LOOPS["topk"](FOUR["1 device"]())[0](jax.random.key(0), {**START, "b": np.zeros(3, np.float32)})
    with fails(ValueError, r"the state was made for the parameter 'b' as float32\[2\], and the fresh state was not"):
        jgc.with_nodes(state, other)
    with fails(ValueError, "the fresh state lacks the leaf 'opt_state/0/count': make it with the same compressor and"):
        by_sgd = jgc.make_step(loss, topk(alpha=0.1), optax.sgd(1), FOUR["1 device"]())[0]
        jgc.with_nodes(state, by_sgd(jax.random.key(0), START))
    stats = {"mean": np.zeros(2, np.float32)}
    with_stats, fresh_stats = init(jax.random.key(0), START, stats), init_of_4(jax.random.key(0), START, stats)
    with fails(ValueError, r"lacks the leaf 'model_state/mean': give init the model state, jax.tree.map\("):
        jgc.with_nodes(with_stats, fresh)
    with fails(ValueError, r"'model_state/mean' is float32\[8, 2\], and in the fresh state float32\[4, 8, 2\]"):
        jgc.with_nodes(with_stats, init_of_4(jax.random.key(0), START, with_stats.model_state))
    with fails(ValueError, "'model_state/mean' of the state is of 4 nodes, and 'compressor/local/memory' of 8: give"):
        jgc.with_nodes(with_stats._replace(model_state=fresh_stats.model_state), fresh_stats)
    step(state, jax.tree.map(lambda x: x.reshape(8, 8, -1), examples(0, 64)))
    with fails(ValueError, "an earlier step took this state's arrays"):
        jgc.with_nodes(state, fresh)


@pytest.mark.parametrize("old", some_by_default(["8 devices", "1 device"], ["8 devices"]))
@pytest.mark.parametrize("new", some_by_default(FOUR, ["1 device"]))
def test_states_in_parts_work_or_are_named(old, new):
    """What a user tries first: the old state itself, then parts of it in a fresh one."""
    init, step = LOOPS["topk"](nodes_of(old))
    state, batch = init(jax.random.key(0), START), jax.tree.map(lambda x: x.reshape(8, 8, -1), examples(0, 64))
    state, _ = step(state, batch)
    init, step = LOOPS["topk"](FOUR[new]())
    batch = jax.tree.map(lambda x: x.reshape(4, 16, -1), examples(1, 64))
    with fails(ValueError, r"of 8 nodes \(field 'compressor'\), and step is of 4: give step jgc.with_nodes\(state, "):
        step(state, batch)
    parts = {"step": state.step, "params": state.params, "opt_state": state.opt_state, "key": state.key}
    for fields in (["step", "params", "opt_state"], ["step", "opt_state"], list(parts)):
        copies = jax.tree.map(lambda x: x + 0 if isinstance(x, jax.Array) and not is_key(x) else x, parts)
        fresh = init(jax.random.key(0), START)._replace(**{name: copies[name] for name in fields})
        assert np.isfinite(step(fresh, batch)[1].loss)
    with_stats = init(jax.random.key(0), START)._replace(model_state={"mean": np.zeros((8, 2), np.float32)})
    with fails(ValueError, r"of 8 nodes \(field 'model_state'\), and step is of 4"):
        step(with_stats, batch)


INNER = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}
KINDS = [(name, *more) for name in INNER for more in ((0, 0.0), (1, 0.0), (2, 0.5))]


def two_fragments(name, overlap, merge):
    """The settings, and a loop with exchanges after steps 2, 4, 6 ..."""
    outer = optax.sgd(0.7, momentum=0.6)
    local = jgc.local_steps(INNER[name], outer, qsgd(), 4, nodes_of("1 device"), 2, overlap, merge)
    return local.parts, local.make_step(pull, unroll=False)


@pytest.mark.slow
@pytest.mark.parametrize("name, overlap, merge", some_by_default(KINDS, [("adam", 0, 0.0)]))
def test_states_of_one_run_are_never_taken_for_those_of_two(name, overlap, merge):
    """After steps that a node left out, exchanges that were refused, and for other nodes."""
    parts, (init, step) = two_fragments(name, overlap, merge)
    state, refused = init(jax.random.key(0), PARAMS), 0
    for i in range(9):
        batch = batch_of(i, 8)
        if i == 2:
            batch[3] = np.nan  # left out by node 3
        if i == 5:  # then an exchange is refused
            state = state._replace(own=jax.tree.map(lambda x: x.at[5].set(jnp.inf), state.own))
        state, metrics = step(state, batch)
        refused += metrics.info is not None and not bool(metrics.info.finite.all())
        fewer = jgc.with_nodes(state, first_of_4(name, overlap, merge))
        for x in (state, fewer):
            arrays = Arrays(*x[2:-2])
            check_own({}, arrays, arrays, parts, x.step, first=True)
    assert refused


def first_of_4(name, overlap, merge):
    local = jgc.local_steps(INNER[name], optax.sgd(0.7, momentum=0.6), qsgd(), 4, FOUR["1 device"](), 2, overlap, merge)
    return local.make_step(pull)[0](jax.random.key(0), PARAMS)


@pytest.mark.parametrize("name, overlap, merge", some_by_default(KINDS, [("adam", 2, 0.5)]))
def test_parameters_of_another_run_are_an_error(name, overlap, merge):
    """At every step, if `own` is that of `init`; of a copy at the beginning, and where an exchange was applied."""
    _, (init, step) = two_fragments(name, overlap, merge)
    trained, mixed = jax.tree.map(lambda x: x - 0.25, PARAMS), "the parameters of this state belong to two runs"
    for i in (0, 3, 4):
        with fails(ValueError, mixed):
            step(init(jax.random.key(0), PARAMS)._replace(step=i, params=trained), batch_of(0, 8))
    fresh = jgc.from_arrays(jax.tree.map(np.asarray, jgc.as_arrays(init(jax.random.key(0), PARAMS))))
    applied = 4 + overlap if name == "adam" and not merge else 0
    for i in {0, applied}:
        with fails(ValueError, mixed):
            step(fresh._replace(step=i, params=trained), batch_of(0, 8))
    state, _ = step(init(jax.random.key(0), trained)._replace(step=3), batch_of(0, 8))  # these are of one run
    assert state.step == 4


def test_a_copy_of_the_first_state_is_no_error():
    _, (init, step) = two_fragments("sgd", 0, 0.0)
    state = jgc.from_arrays(jax.tree.map(np.asarray, jgc.as_arrays(init(jax.random.key(0), PARAMS))))
    assert step(state, batch_of(0, 8))[0].step == 1


def test_parameters_replaced_without_those_of_the_nodes_are_an_error():
    nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
    local = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes)
    init, step = local.make_step(lambda w, x: jnp.mean((w - x) ** 2))
    state, batch = init(jax.random.key(0), jnp.zeros(1)), jnp.array([[1.0], [3.0]])
    for done in range(4):
        if done:
            with pytest.raises(ValueError, match="`params` of this state were replaced, and `own`"):
                step(state._replace(params=state.params + 1), batch)
        state, _ = step(state, batch)
    both = state._replace(params=jnp.ones(1), own=jnp.ones((2, 1)))
    assert float(step(both, batch)[1].loss.mean()) == 2  # (0 + 4) / 2


def test_a_fresh_state_of_other_fragments_is_named():
    nodes, params = jgc.make_nodes(2, devices=jax.devices()[:1]), {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    states = [
        jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes, fragments=n).make_step(lambda w, x: 0.0)[0](
            jax.random.key(0), params
        )
        for n in (1, 2)
    ]
    with pytest.raises(ValueError, match="the state has 1 fragments, and the fresh one 2"):
        jgc.with_nodes(*states)
