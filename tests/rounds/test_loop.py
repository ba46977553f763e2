"""`jgc.rounds.join` and `exchange`: nodes as threads on one folder."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("obstore")

import jgc
from jgc import compress, rounds
from jgc.rounds.loop import Rounds

PARAMS = {"kernel": jnp.ones((20, 30)), "bias": jnp.zeros(30, jnp.bfloat16), "count": jnp.int32(3)}
METHODS = {
    "topk": lambda: compress.topk(alpha=0.1, strategy="fixed", value_code="2bit"),
    "chunks": lambda: compress.topk(alpha=1 / 8, strategy="fixed", selection="chunks", chunk=16),
    "qsgd": lambda: compress.qsgd(bits=4),
    "natural": compress.natural,
    "onebit": compress.onebit,
    "cast": compress.cast,
    "dense": compress.dense,
}


def _join(path, node, **more) -> Rounds:
    more = {"compressor": METHODS["topk"](), "quorum": 2, "grace": 30, "outer": rounds.Sgd(1, 0)} | more
    return rounds.join(path / "bucket", node=node, params=PARAMS, **more)


def _moved(params, seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    flat, treedef = jax.tree.flatten(params)
    new = [
        x + 0.1 * jax.random.normal(k, x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for k, x in zip(keys, flat, strict=True)
    ]
    return jax.tree.unflatten(treedef, new)


def _train(folder, node, count=4, **more):
    run = _join(folder, node, **more)
    params, outcomes = run.params, []
    for i in range(count):
        params, outcome = run.exchange(_moved(params, i + 100 * ord(node)), tokens=10)
        outcomes += [outcome] if outcome else []
    run.leave()
    return run, [*outcomes, run.last] if more.get("overlap") else outcomes


def _both(folder, **more):
    with ThreadPoolExecutor(2) as pool:
        a, b = (pool.submit(_train, folder, node, **more) for node in "ab")
        return a.result(), b.result()


@pytest.mark.parametrize("name", METHODS)
def test_all_nodes_have_the_same_bits(name, tmp_path):
    (a, of_a), (b, of_b) = _both(tmp_path, compressor=METHODS[name]())
    assert [x.digest for x in of_a] == [x.digest for x in of_b]
    assert all(x.counted and x.members == ("a", "b") for x in of_a + of_b)
    assert a.params["bias"].dtype == jnp.bfloat16 and int(a.params["count"]) == 3
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a.params, b.params))


@pytest.mark.parametrize("merge", [1.0, 0.0, "eager"])
def test_overlap_exchanges_while_steps_run(merge, tmp_path):
    (a, of_a), (b, of_b) = _both(tmp_path, overlap=1, merge=merge)
    assert [x.digest for x in of_a] == [x.digest for x in of_b] and len(of_a) == 4
    assert a.number == b.number == 4


@pytest.mark.parametrize("overlap, momentum, more", [
    (0, 0.9, {}), (1, 0.3, {}), (1, 0.6, {"outer": rounds.Sgd(0.7, 0.6), "merge": 1.0}),
])  # fmt: skip
def test_overlap_has_other_defaults(overlap, momentum, more, tmp_path):
    settings = {"outer": None, "overlap": overlap, "quorum": 1} | more
    with _join(tmp_path, "a", **settings) as run:
        assert run.member.context.outer == rounds.Sgd(0.7, momentum)
        assert not overlap or run.merge == more.get("merge", 0.5)
        check = {"node": "b", "params": PARAMS, "compressor": METHODS["topk"](), **settings}
        assert rounds.check(tmp_path / "bucket", **check) == run.run


def test_eager_overlap_is_that_of_the_paper(tmp_path):
    """The outer gradient of a node: its share of this round, and the other's of the round before."""
    count, rate, m = 5, np.float32(0.7), np.float32(0.5)
    moves = np.random.default_rng(0).normal(size=(2, count, 40)).astype(np.float32)

    def node(k):
        run = rounds.join(
            tmp_path / "bucket", node="ab"[k], params={"w": jnp.zeros(40)}, quorum=2, start=2, overlap=1,
            compressor=compress.dense(), outer=rounds.Sgd(0.7, 0.5), merge="eager",
        )  # fmt: skip
        run.member.members = frozenset("ab")  # as after round 0: its share is a half from the beginning
        theta, starts = run.params, []
        for move in moves[k]:
            theta, _ = run.exchange({"w": theta["w"] - move}, 1)
            starts.append(np.asarray(theta["w"]))
        run.leave()
        return starts

    with ThreadPoolExecutor(2) as pool:
        starts = list(pool.map(node, range(2)))
    for k in range(2):
        theta, u, before = np.zeros(40, np.float32), np.zeros(40, np.float32), np.zeros(40, np.float32)
        for i in range(count):
            gradient = (moves[k, i] + before) / 2
            u = gradient + m * u
            theta, before = theta - rate * (gradient + m * u), moves[1 - k, i]
            np.testing.assert_allclose(starts[k][i], theta, atol=1e-5)


def test_an_error_in_the_thread_reaches_the_loop(tmp_path):
    run = _join(tmp_path, "a", quorum=1, overlap=1)
    run.member.context.coder.decode = lambda *args: 1 / 0
    run.exchange(run.params, 1)
    with pytest.raises(ZeroDivisionError):
        run.exchange(run.params, 1)


def test_with_all_present_rounds_are_local_steps(tmp_path):
    """Two rounds of one step of SGD against `jgc.local_steps` of two nodes."""
    params = {"w": jnp.linspace(-1, 1, 40).reshape(5, 8)}
    batches = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)

    def loss(params, batch):
        return jnp.mean((params["w"] @ batch - 1) ** 2)

    local = jgc.local_steps(
        optax.sgd(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True), compress.topk(alpha=0.25, strategy="fixed"),
        every=1, nodes=jgc.make_nodes(2, jax.devices()[:1]),
    )  # fmt: skip
    init, step = local.make_step(loss)
    state = init(jax.random.key(0), params)
    for batch in batches:
        state, _ = step(state, batch)

    def node(k):
        run = rounds.join(
            tmp_path / "bucket", node="ab"[k], params=params, quorum=2,
            compressor=compress.topk(alpha=0.25, strategy="fixed"),
        )  # fmt: skip
        theta = run.params
        for batch in batches:
            grads = jax.grad(loss)(theta, batch[k])
            theta, _ = run.exchange(jax.tree.map(lambda x, g: x - 0.1 * g, theta, grads), 1)
        run.leave()
        return theta

    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(node, range(2))
    assert (a["w"] == b["w"]).all()
    np.testing.assert_allclose(a["w"], state.params["w"], atol=1e-6)


@pytest.mark.parametrize("method, text", [
    (lambda: compress.powersgd(), "use topk"), (lambda: compress.signsgd(), "together"),
    (lambda: compress.terngrad(), "use topk"), (lambda: compress.random_k(), "use topk"),
    (lambda: compress.dgc(), "momentum"),
])  # fmt: skip
def test_methods_that_need_the_other_nodes_are_refused(method, text, tmp_path):
    with pytest.raises(ValueError, match=text) as error:
        _join(tmp_path, "a", compressor=method())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("setting, text", [
    ({"grace": 0}, "grace must be positive"), ({"quorum": 0}, "quorum"), ({"overlap": 2}, "overlap"),
    ({"merge": 0.5}, "does nothing"), ({"merge": "late", "overlap": 1}, "eager"),
    ({"merge": "eager", "overlap": 1, "outer": rounds.AdamW()}, "steps add up"),
    ({"node": "a/b"}, "letters"), ({"start": 1}, "below quorum"),
])  # fmt: skip
def test_settings_out_of_range_are_one_line(setting, text, tmp_path):
    node = setting.pop("node", "a")
    with pytest.raises(ValueError, match=text):
        _join(tmp_path, node, **setting)


def test_a_run_of_other_settings_is_refused(tmp_path):
    _join(tmp_path, "a", settings={"every": 30})
    with pytest.raises(rounds.RoundsError, match="every=30, here 10"):
        _join(tmp_path, "b", settings={"every": 10})


def test_a_quorum_that_does_not_come_names_who_is_missing(tmp_path):
    run = _join(tmp_path, "a", quorum=2, timeout=0.3, end=True)
    with pytest.raises(rounds.Timeout, match="1 of 2 messages \\(a\\); missing"):
        run.exchange(run.params, 1)


def test_with_a_secret_nothing_unsigned_is_read(tmp_path, monkeypatch):
    _join(tmp_path, "a")
    monkeypatch.setenv("JGC_ROUNDS_SECRET", "s")
    with pytest.raises(rounds.RoundsError, match="unsigned"):
        _join(tmp_path, "b")


def test_a_bucket_that_forgets_is_one_line(tmp_path):
    run = _join(tmp_path, "a", quorum=1)
    run.exchange(run.params, 1)
    run.leave()
    (tmp_path / "bucket/checkpoint/00000000").unlink()
    with pytest.raises(rounds.RoundsError, match="forgets"):
        _join(tmp_path, "b", quorum=1)


def test_a_killed_node_comes_back_with_its_residual(tmp_path):
    first = _join(tmp_path, "a", quorum=1, folder=tmp_path / "disk")
    first.exchange(_moved(first.params, 1), 1)
    with pytest.raises(rounds.RoundsError, match="a different process on this machine"):
        _join(tmp_path, "a", quorum=1, folder=tmp_path / "disk")
    first.member.disk.close()  # as the system does when the process dies
    second = _join(tmp_path, "a", quorum=1, folder=tmp_path / "disk")
    for name, x in first.member.memory.items():
        np.testing.assert_array_equal(second.member.memory[name], x)
