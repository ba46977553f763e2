"""States of loops as arrays alone: every field comes back, and training goes on bit for bit."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from contract import nodes_of, same_bits, some_by_default
from jax.sharding import PartitionSpec as P

import jgc
from jgc.checks.misuse import path_of
from jgc.compress import dense, gradiveq, per_layer, topk
from jgc.loops.checksums import checksums

PARAMS = {"conv": np.ones((3, 3, 2, 4), np.float32), "head": np.ones((4, 2), np.float32)}

KEYS = {
    "key": lambda: jax.random.key(7),
    "raw": lambda: jax.random.PRNGKey(7),
    "rbg": lambda: jax.random.key(7, impl="rbg"),
}


def loss(params, batch):
    return sum(jnp.mean((p * batch) ** 2) for p in jax.tree.leaves(params))


def batch_of(step):
    return np.random.default_rng(step).normal(size=(8, 1)).astype(np.float32)


@functools.cache
def loop(name):
    nodes = nodes_of("4 devices")
    if name == "local steps":
        method = topk(alpha=0.2, warmup_steps=2)
        return jgc.local_steps(optax.adam(0.1), optax.sgd(1.0), method, 3, nodes, fragments=2).make_step(loss)
    method = {
        "phases": topk(alpha=0.2, warmup_steps=4),
        "phases that are found": gradiveq(warmup_steps=2, sampling_steps=2, compressed_steps=3, loss=0.3),
        "groups": per_layer([("head", dense())], default=topk(alpha=0.2, warmup_steps=4)),
    }[name]
    return jgc.make_step(loss, method, optax.adam(0.1), nodes)


@pytest.mark.parametrize(
    "name, kind",
    some_by_default(
        itertools.product(["phases", "phases that are found", "groups", "local steps"], KEYS),
        [("phases that are found", "raw"), ("local steps", "rbg")],
    ),
)
def test_training_goes_on_from_arrays_bit_for_bit(name, kind):
    key = KEYS[kind]()
    init, step = loop(name)
    state = init(key, PARAMS)
    for i in range(6):
        state, _ = step(state, batch_of(i))
    arrays = jgc.as_arrays(state)
    assert all(isinstance(x, np.ndarray | jax.Array) for x in jax.tree.leaves(arrays))
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(arrays))
    fresh = jgc.as_arrays(init(key, PARAMS))
    assert jax.tree.map(np.shape, arrays) == jax.tree.map(np.shape, fresh)  # what a checkpoint library compares
    again = jgc.from_arrays(jax.tree.map(jnp.copy, arrays))
    assert jax.tree.structure(again) == jax.tree.structure(state) and again.step == 6
    for i in range(6, 9):
        (state, _), (again, _) = step(state, batch_of(i)), step(again, batch_of(i))
        assert same_bits(state.params, again.params)


@pytest.mark.parametrize("make", ["make_step", "local_steps"])
def test_keys_of_a_model_state_come_back(make):
    """A key of each node, such as for dropout, of a different kind than the loop's."""

    def with_key(params, batch, model):
        key, own = jax.random.split(model["key"])
        return loss(params, batch) * (1 + jax.random.uniform(own)), {"key": key}

    nodes = nodes_of("4 devices")
    if make == "make_step":
        init, step = jgc.make_step(with_key, topk(alpha=0.2), optax.adam(0.1), nodes)
    else:
        init, step = jgc.local_steps(optax.adam(0.1), optax.sgd(1.0), topk(alpha=0.2), 2, nodes).make_step(with_key)
    first = {"key": jax.random.key(3, impl="rbg")}
    state, _ = step(init(jax.random.key(7), PARAMS, first), batch_of(0))
    arrays = jax.tree.map(np.asarray, jgc.as_arrays(state))
    again = jgc.from_arrays(arrays)
    assert again.model_state["key"].dtype == state.model_state["key"].dtype != again.key.dtype
    (state, metrics), (again, found) = step(state, batch_of(1)), step(again, batch_of(1))
    assert same_bits(metrics.loss, found.loss) and same_bits(jgc.as_arrays(state), jgc.as_arrays(again))


@pytest.mark.parametrize("number", [float, np.float64])
def test_a_rate_set_as_a_number_is_saved_and_converted(number):
    optimizer = optax.inject_hyperparams(optax.adam)(0.1)
    init, step = jgc.make_step(loss, topk(alpha=0.2), optimizer, nodes_of("1 device"))
    state, _ = step(init(jax.random.key(0), PARAMS), batch_of(0))
    state.opt_state.hyperparams["learning_rate"] = number(0.05)
    arrays = jgc.as_arrays(state)
    assert arrays.opt_state.hyperparams["learning_rate"] == jnp.float32(0.05)
    fresh = jax.eval_shape(lambda: jgc.as_arrays(init(jax.random.key(0), PARAMS)))
    assert jax.tree.map(jnp.result_type, arrays) == jax.tree.map(jnp.result_type, fresh)
    again = jgc.from_arrays(jax.tree.map(np.array, arrays))
    four = jgc.make_step(loss, topk(alpha=0.2), optimizer, jgc.make_nodes(4, devices=jax.devices()[:1]))[0]
    converted = jgc.with_nodes(state, four(jax.random.key(0), PARAMS))
    assert converted.opt_state.hyperparams["learning_rate"] == jnp.float32(0.05)
    assert same_bits(step(state, batch_of(1))[0].params, step(again, batch_of(1))[0].params)


def test_arrays_that_a_step_has_donated_are_named():
    init, step = loop("phases")
    state = init(jax.random.key(0), PARAMS)
    best = jgc.as_arrays(state)
    copies = [jax.tree.map(copy, best) for copy in (jnp.copy, np.array)]
    step(state, batch_of(0))
    took = re.escape("an earlier step took this state's arrays (it donates them): ")
    with pytest.raises(ValueError, match=f"{took}before the step, copy what as_arrays returned, jax.tree.map"):
        jgc.from_arrays(best)
    with pytest.raises(ValueError, match=f"{took}give the state that it returned"):
        jgc.as_arrays(state)
    assert all(same_bits(jgc.from_arrays(arrays).params, PARAMS) for arrays in copies)


def test_what_is_no_state_is_named():
    state = loop("phases")[0](jax.random.key(0), PARAMS)
    with pytest.raises(TypeError, match=r"expected the state of jgc.make_step or jgc.local_steps, got a dict"):
        jgc.as_arrays({"step": 1})
    with pytest.raises(TypeError, match="from_arrays takes what as_arrays returned"):
        jgc.from_arrays(state)
    with pytest.raises(ValueError, match=r"the phases' description takes 9,0.. bytes"):
        jgc.as_arrays(state._replace(phase=jgc.Phase("x" * 9000, 0, "x")))
    with pytest.raises(TypeError, match=r"got a dict: restore into jgc.as_arrays\(init\(...\)\)"):
        jgc.from_arrays(jgc.as_arrays(state)._asdict())


# --- checksums ----------------------------------------------------------------------------------------------------


def by_hand(x):
    """An array's checksum, a word at a time."""
    total, size = 0, min(x.dtype.itemsize, 4)
    data = x.tobytes()
    for position in range(len(data) // size):
        word = int.from_bytes(data[position * size : (position + 1) * size], "little")
        h = (position * 0x9E3779B9 + word) % 2**32
        h = (h ^ h >> 16) * 0x21F0AAAD % 2**32
        h = (h ^ h >> 15) * 0x735A2D97 % 2**32
        total += h ^ h >> 15
    return total % 2**32


DTYPES = ["bool", "int8", "float16", "bfloat16", "uint32", "float32", "float64", "complex64", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksum_is_the_sum_of_hashes(dtype, monkeypatch):
    monkeypatch.setattr(jgc.loops.checksums, "BLOCK", 16)  # so that small arrays have several
    random = np.random.default_rng(0)
    for shape in [(), (1,), (5,), (3, 7, 2), (40, 3), (0, 3)]:
        x = random.integers(0, 7, shape).astype(jnp.dtype(dtype))
        assert checksums([x, x]).tolist() == [by_hand(x)] * 2


def test_checksum_shows_any_changed_byte_and_swapped_values():
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    changed = [x.copy() for _ in range(8 * x.nbytes)]
    for bit, y in enumerate(changed):
        y.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
    for i, j in itertools.combinations(range(x.size), 2):
        changed.append(x.copy())
        changed[-1].reshape(-1)[[i, j]] = x.reshape(-1)[[j, i]]
    changed += [-x, x[::-1], x * (np.arange(5) != 2), np.zeros_like(x)]
    assert checksums([x])[0] not in checksums(changed)


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))], ids=str)
def test_checksum_does_not_depend_on_devices(spec):
    x = np.random.default_rng(0).normal(size=(8, 24, 3)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert checksums([jax.device_put(x, jax.NamedSharding(mesh, spec))]) == checksums([x])


@pytest.mark.parametrize("name", ["phases", "local steps"])
def test_changed_arrays_are_named(name):
    arrays = jax.tree.map(np.asarray, jgc.as_arrays(loop(name)[0](jax.random.key(7), PARAMS)))
    leaves, structure = jax.tree.flatten(arrays)
    paths = [path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(arrays)[0]]
    for i, path in enumerate(paths):
        x = np.array(leaves[i])
        x.reshape(-1).view(np.uint8)[-1] ^= 1
        error = "notes that as_arrays" if path.startswith("phase") else f"the array '{path}' "
        with pytest.raises(ValueError, match=re.escape(error) + ".*Restore an older checkpoint"):
            jgc.from_arrays(jax.tree.unflatten(structure, [*leaves[:i], x, *leaves[i + 1 :]]))
    swapped = arrays._replace(params={**arrays.params, "head": arrays.params["head"].astype(np.int32)})
    text = r"'params/head' is int32\[4, 2\], and as_arrays saved a different dtype or shape"
    with pytest.raises(ValueError, match=text):
        jgc.from_arrays(swapped)
    with pytest.raises(ValueError, match=r"as_arrays saved a state of \d+ arrays, and this one has \d+: restore into"):
        jgc.from_arrays(arrays._replace(params={"head": arrays.params["head"]}))


def test_a_changed_byte_of_orbaxs_files_is_named(tmp_path):
    params = {"w": np.random.default_rng(0).normal(size=(99, 99)).astype(np.float32)}
    arrays = jgc.as_arrays(loop("phases")[0](jax.random.key(7), params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", arrays)
    data = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match="has other values than as_arrays"):
        jgc.from_arrays(checkpointer.restore(tmp_path / "0", arrays))


def test_arrays_of_an_older_jgc_are_restored_with_a_warning():
    state = loop("phases")[0](jax.random.key(7), PARAMS)
    arrays = jgc.as_arrays(state)
    keys, phases, _ = json.loads(arrays.phase[:8192].tobytes())
    older = arrays._replace(phase=np.frombuffer(json.dumps([keys, phases]).encode().ljust(8192), np.uint8))
    with pytest.warns(UserWarning, match="these arrays were saved without checksums"):
        again = jgc.from_arrays(older)
    assert again.phase == state.phase and same_bits(jgc.as_arrays(again), arrays)


def test_arrays_are_restored_into_shapes_alone_and_on_other_devices(tmp_path):
    arrays = jgc.as_arrays(loop("phases")[0](jax.random.key(7), PARAMS))
    init, _ = jgc.make_step(loss, topk(alpha=0.2, warmup_steps=4), optax.adam(0.1), nodes_of("1 device"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", arrays)
        checkpointer.wait_until_finished()
        blank = jax.eval_shape(lambda: jgc.as_arrays(init(jax.random.key(7), PARAMS)))
        for target in (blank, jgc.as_arrays(init(jax.random.key(7), PARAMS))):
            again = jgc.from_arrays(checkpointer.restore(tmp_path / "0", target))
            assert same_bits(jgc.as_arrays(again), arrays)


def test_arrays_of_a_state_are_no_state():
    init, _ = jgc.make_step(lambda w, x: jnp.sum(w * x), jgc.compress.dense(), optax.sgd(0.1), jgc.make_nodes(1))
    with pytest.raises(TypeError, match="phase must be a jgc"):
        jgc.as_arrays(jgc.as_arrays(init(jax.random.key(0), jnp.zeros(2))))
