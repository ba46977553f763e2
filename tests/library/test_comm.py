"""The collectives, in the three layouts and in some others."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import LAYOUT, LAYOUTS, nodes_of, same_bits, some_by_default
from hypothesis import given, strategies as st
from jax.sharding import AxisType

import jgc
from jgc import comm
from jgc.backend import plain_operations
from jgc.comm import collectives as words
from jgc.comm.jaxprs import all_sent
from jgc.comm.ledger import UnknownCollectiveError
from jgc.lab.shared.hlo import collectives, table
from jgc.nodes.layouts import as_one_per_device, from_mesh
from jgc.nodes.placement import LOCAL, SHARED
from jgc.types import Nodes

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "int16", "uint32", "float8_e4m3fn")
SPECIAL = np.array([0x80000000, 0x7FC12345, 0xFF800001, 0x00000001, 0x3F800000], np.uint32)  # -0, NaNs, denormal, 1


@functools.cache
def _mesh(a: int, b: int):
    return jax.make_mesh((a, b), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: a * b])


OTHERS = {
    "two axes": lambda: from_mesh(_mesh(2, 3), slow=("a", "b")),
    "two axes and two per device": lambda: from_mesh(_mesh(2, 3), slow=("a", "b"), per_device=2),
    "slow and fast axis": lambda: from_mesh(_mesh(4, 2), slow=("a",), fast=("b",)),
    "one node": lambda: jgc.make_nodes(1),
}
every_layout = pytest.mark.parametrize("layout", some_by_default([*LAYOUTS, *OTHERS], [LAYOUT, *OTHERS]))


@functools.cache
def _nodes(layout: str) -> Nodes:
    return OTHERS[layout]() if layout in OTHERS else nodes_of(layout)


def _run(fn, nodes: Nodes, *arrays, outs=SHARED):
    """fn of each node's part of the arrays, which all nodes must agree on."""
    arrays = [jgc.place(x, LOCAL, nodes) for x in arrays]
    return jax.jit(jgc.on_nodes(fn, nodes, ins=(LOCAL,) * len(arrays), outs=outs))(*arrays)


def _integers(nodes: Nodes, n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(-50, 50, (nodes.count, n)).astype(np.float32)


# --- collectives --------------------------------------------------------------------------------------------------


@every_layout
def test_sum_mean_and_ring_match_numpy(layout):
    nodes = _nodes(layout)
    x, short = _integers(nodes, 13), _integers(nodes, 3)  # neither divides among the nodes: the ring pads
    total, mean, ring, short_ring = _run(
        lambda x, short: (
            comm.psum(x, nodes, "x"), comm.pmean(x, nodes, "x"),
            comm.ring_mean(x, nodes, "x"), comm.ring_mean(short, nodes, "x"),
        ), nodes, x, short,
    )  # fmt: skip
    assert np.array_equal(total, x.sum(0))
    assert np.array_equal(mean, ring)
    for got, numpys in ((mean, x.mean(0)), (short_ring, short.mean(0))):  # XLA multiplies by 1 / K
        np.testing.assert_allclose(got, numpys, rtol=0 if nodes.count in (1, 4, 8) else 2e-7)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("n", [1, 5, 8])
@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_narrow_integers_add_up_side_by_side(dtype, n, device, monkeypatch):
    """As on GPU and TPU: whole words travel, and the sums are exact up to the ends of the range."""
    monkeypatch.setattr(comm.collectives, "backend", lambda: device)
    nodes, most = _nodes("8 devices"), np.iinfo(dtype).max // 8
    x = np.random.default_rng(n).integers(-most, most + 1, (8, n, 3)).astype(dtype)
    x[:, 0, 0] = -most
    with comm.ledger() as sent:
        total = _run(lambda x: comm.psum(x, nodes, "x"), nodes, x)
    assert total.dtype == dtype and np.array_equal(total, x.sum(0, dtype=np.int64))
    assert sent[0].bytes == Fraction(14, 8) * 4 * -(-3 * n * x.itemsize // 4)
    with plain_operations():
        assert np.array_equal(_run(lambda x: comm.psum(x, nodes, "x"), nodes, x), total)


@pytest.mark.parametrize("shape", [(3, 5), (8, 128), (7,)])
def test_collectives_for_tpu_equal_plain_ones(shape, monkeypatch):
    """Without padding, and with the barrier that keeps rows."""
    monkeypatch.setattr(comm.collectives, "backend", lambda: "tpu")
    nodes = _nodes("8 devices")
    x = _integers(nodes, int(np.prod(shape))).reshape(8, *shape)

    def all_of(x):
        return comm.psum(x, nodes, "a"), comm.pmax(x, nodes, "b"), comm.all_gather(x, nodes, "c")

    tuned = _run(all_of, nodes, x)
    with plain_operations():
        plain = _run(all_of, nodes, x)
    assert same_bits(tuned, plain)
    for result, expected in zip(plain, (x.sum(0), x.max(0), x), strict=True):
        assert np.array_equal(result, expected)


@every_layout
def test_gather_keeps_node_order(layout):
    nodes = _nodes(layout)
    x = _integers(nodes, 5)
    index, gathered, both = _run(
        lambda x: (
            comm.all_gather(comm.node_index(nodes), nodes, "i"), comm.all_gather(x, nodes, "x"),
            comm.all_gather_dict({"b": x, "a": x[:3].astype(jnp.bfloat16)}, nodes),
        ), nodes, x,
    )  # fmt: skip
    assert index.tolist() == list(range(nodes.count))
    assert np.array_equal(gathered, x) and np.array_equal(both["b"], x)
    assert same_bits(both["a"], x[:, :3].astype(jnp.bfloat16))


@every_layout
def test_broadcast_is_bit_exact_for_every_leader(layout):
    nodes = _nodes(layout)
    bits = np.stack([np.roll(SPECIAL, i) ^ (i << 8) for i in range(nodes.count)]).astype(np.uint32)
    half = bits.astype(np.uint16)[:, :3]

    def from_each(x, half):
        leaders = range(nodes.count)
        alone = [comm.broadcast(x, jnp.int32(i), nodes, "x") for i in leaders]
        joined = [comm.broadcast_dict({"x": x, "half": half}, jnp.int32(i), nodes) for i in leaders]
        return alone, joined

    alone, joined = _run(from_each, nodes, bits.view(np.float32), half.view(jnp.bfloat16))
    for i in range(nodes.count):
        assert same_bits(alone[i], bits[i].view(np.float32))
        assert same_bits(joined[i], {"x": bits[i].view(np.float32), "half": half[i].view(jnp.bfloat16)})


@every_layout
def test_a_flag_on_one_node_reaches_all(layout):
    nodes = _nodes(layout)
    for raised in (None, 0, nodes.count - 1):
        flags = np.arange(nodes.count) == (-1 if raised is None else raised)
        assert bool(_run(lambda f: comm.any_true(f, nodes), nodes, flags)) == (raised is not None)


@every_layout
def test_only_leaders_device_holds_leaders_value(layout):
    nodes = _nodes(layout)
    x, leader = _integers(nodes, 4), nodes.count - 1
    held = _run(lambda x: comm.on_leaders_device(x, jnp.int32(leader), nodes), nodes, x, outs=LOCAL)
    expected = np.zeros_like(x)
    expected[nodes.count - nodes.per_device :] = x[leader]
    assert np.array_equal(held, expected)


@every_layout
def test_node_keys_do_not_depend_on_layout(layout):
    nodes = _nodes(layout)
    draw = lambda x: jax.random.bits(comm.node_key(jax.random.key(5), nodes), (2,))  # noqa: E731
    drawn = _run(draw, nodes, _integers(nodes, 1), outs=LOCAL)
    assert len(np.unique(drawn)) == drawn.size
    expected = [jax.random.bits(jax.random.fold_in(jax.random.key(5), i), (2,)) for i in range(nodes.count)]
    assert np.array_equal(drawn, expected)


WRAPPED = {
    "jit": lambda f, x: jax.jit(f)(x),
    "scan": lambda f, x: jax.lax.scan(lambda carry, x: (carry, f(x)), 0, x[None])[1][0],
    "switch": lambda f, x: jax.lax.switch(jnp.int32(1), [lambda x: -f(x), f], x),
    "remat": lambda f, x: jax.checkpoint(f)(x),
}


@every_layout
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_collectives_work_inside_jit_scan_switch_and_remat(wrapped, layout):
    nodes = _nodes(layout)
    x = _integers(nodes, 4)

    def f(x):
        gathered = comm.all_gather(x, nodes, "x")[comm.node_index(nodes)]  # this node's own again
        received = comm.broadcast(x, jnp.int32(nodes.count - 1), nodes, "x")
        return gathered + received + comm.psum(x, nodes, "x") + nodes.count * comm.ring_mean(x, nodes, "x")

    got = _run(lambda x: WRAPPED[wrapped](f, x), nodes, x, outs=LOCAL)
    np.testing.assert_allclose(got, x + x[-1] + 2 * x.sum(0), rtol=1e-6)


@every_layout
def test_rows_of_an_all_to_all_are_equal_where_jax_traces_again(layout):
    nodes = _nodes(layout)
    x = _integers(nodes, 5)

    def gathered(x):
        def rows(_, total):  # JAX traces the body of a loop several times
            return total + words.all_gather_at_once(x, nodes, "x") * 2

        start = jnp.zeros((nodes.count, 5))
        both = jax.lax.fori_loop(0, 2, rows, start)
        return jax.lax.cond(jnp.sum(both) > 1e9, lambda: start, lambda: rows(0, both))

    np.testing.assert_array_equal(_run(gathered, nodes, x), 6 * x)


# --- the bytes ----------------------------------------------------------------------------------------------------


def _halves_around(x, nodes: Nodes):
    segments = jnp.resize(x, (comm.ring_size(nodes), 5))
    encode, decode = lambda key, x: {"a": x.astype(jnp.bfloat16), "b": x[:1]}, lambda p: p["a"].astype(jnp.float32)
    return comm.ring_quantized_mean(jax.random.key(0), segments, encode, decode, nodes)[0]


CALLS = {
    "total": lambda x, nodes: comm.psum(x, nodes, "x"),
    "ring": lambda x, nodes: comm.ring_mean(x, nodes, "x"),
    "ring of codes": lambda x, nodes: _halves_around(x, nodes),
    "gather": lambda x, nodes: comm.all_gather(x, nodes, "x"),
    "gather of several": lambda x, nodes: comm.all_gather_dict({"a": x, "b": x.astype(jnp.bfloat16)}, nodes),
    "broadcast": lambda x, nodes: comm.broadcast(x, jnp.int32(0), nodes, "x"),
    "flag": lambda x, nodes: comm.any_true(x[0] > 0, nodes),
}


@every_layout
@pytest.mark.parametrize("call", CALLS)
def test_ledger_matches_compiled_program(call, layout):
    nodes = _nodes(layout)
    x = jgc.place(_integers(nodes, 13), LOCAL, nodes)
    on_axis = jax.jit(jgc.on_nodes(lambda x: CALLS[call](x, nodes), nodes, ins=(LOCAL,), outs=SHARED))
    with comm.ledger() as sent:
        lowered = on_axis.lower(x)
    found = {op: (total.times, total.sent_bytes) for op, total in table(collectives(lowered.compile())).items()}
    claimed = dict.fromkeys({s.op for s in sent}, (0, 0))
    for s in sent:
        claimed[s.op] = (claimed[s.op][0] + 1, claimed[s.op][1] + s.bytes)
    assert claimed == {op: value for op, value in found.items() if value[1]}
    assert bool(sent) == (nodes.mesh is not None and nodes.count > 1)


def test_ledger_works_on_abstract_mesh():
    nodes = as_one_per_device(nodes_of("1 device"))
    with comm.ledger() as sent:
        jax.eval_shape(jgc.on_nodes(lambda x: comm.psum(x, nodes, "x"), nodes, (LOCAL,), SHARED), jnp.zeros((8, 4)))
    assert [(s.op, s.field, s.bytes) for s in sent] == [("all-reduce", "x", 28)]  # 2 * 7/8 of 16 bytes


_SUM_OF_ITS_OWN = jax.jit(lambda x, nodes: comm.psum(x, nodes, "x"), static_argnums=1)


def _turns(x, nodes: Nodes):
    return jax.lax.scan(lambda total, _: (total + comm.psum(x + total, nodes, "x"), ()), jnp.zeros(13), length=3)[0]


UNRECORDED = {
    "loop": _turns,
    "loop in a loop": lambda x, nodes: jax.lax.map(lambda y: _turns(y, nodes), jnp.stack([x, 2 * x])).sum(0),
    "jit of its own": lambda x, nodes: _SUM_OF_ITS_OWN(x, nodes) + _SUM_OF_ITS_OWN(2 * x, nodes),
    "branches": lambda x, nodes: jax.lax.cond(
        comm.any_true(x[0] > 0, nodes), lambda: comm.psum(x, nodes, "x"), lambda: comm.psum(3 * x, nodes, "y")
    ),
    "jax.lax": lambda x, nodes: jax.lax.all_gather(comm.vary_over(x, nodes.slow), nodes.slow, to="invarying").sum(0),
}


@pytest.mark.parametrize("layout", ["8 devices", "slow and fast axis"])
@pytest.mark.parametrize("call", UNRECORDED)
def test_bytes_include_loops_branches_and_functions_that_jax_has_traced(call, layout):
    nodes = _nodes(layout)
    x = jgc.place(_integers(nodes, 13), LOCAL, nodes)
    on_axis = jgc.on_nodes(lambda x: UNRECORDED[call](x, nodes), nodes, ins=(LOCAL,), outs=SHARED)
    with comm.ledger() as sent:
        traced = jax.make_jaxpr(on_axis)(x)
    found = all_sent(sent, traced, nodes)
    compiled = table(collectives(jax.jit(on_axis).lower(x).compile()))
    assert {one.op: one.bytes for one in found} == {op: total.sent_bytes for op, total in compiled.items()}
    assert sum(one.bytes for one in found) != sum(one.bytes for one in sent)


def _of_many_turns(x, nodes: Nodes):
    return jax.lax.while_loop(lambda y: y[0] < 100, lambda y: comm.psum(x + y, nodes, "x"), jnp.zeros(x.shape))


UNKNOWN = {
    "while": _of_many_turns,
    "send different bytes": lambda x, nodes: jax.lax.cond(
        comm.any_true(x[0] > 0, nodes), lambda: comm.psum(x, nodes, "x"), lambda: jnp.zeros(x.shape)
    ),
}


@pytest.mark.parametrize("call", UNKNOWN)
def test_bytes_that_nobody_knows_before_the_step_are_an_error(call):
    nodes = nodes_of("4 devices")
    on_axis = jgc.on_nodes(lambda x: UNKNOWN[call](x, nodes), nodes, ins=(LOCAL,), outs=SHARED)
    with pytest.raises(UnknownCollectiveError, match=call):
        all_sent((), jax.make_jaxpr(on_axis)(jgc.place(_integers(nodes, 13), LOCAL, nodes)), nodes)


# --- outside the node axis ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_collective_outside_node_axis_is_an_error(call, layout):
    with pytest.raises(RuntimeError, match=r"outside the node axis.*jgc\.node_grads"):
        CALLS[call](jnp.ones(3), nodes_of(layout))


# --- words --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 99))
def test_words_roundtrip_bit_for_bit(dtype, shape, seed):
    dtype = jnp.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    x = raw.view(dtype).reshape(shape)
    bits = jax.jit(words.to_words)(x)
    assert (bits.dtype, bits.shape) == (jnp.uint32, (-(-x.nbytes // 4),))
    assert same_bits(jax.jit(lambda bits: words.from_words(bits, x))(bits), x)


@given(st.dictionaries(st.text("abc ", min_size=1), st.tuples(st.sampled_from(DTYPES), st.integers(0, 5)), min_size=1))
def test_joined_words_roundtrip(spec):
    payload = {name: np.arange(n).astype(dtype) for name, (dtype, n) in spec.items()}
    assert same_bits(jax.jit(lambda payload: words.from_words(words.to_words(payload), payload))(payload), payload)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8", "int16", "float8_e4m3fn"])
@pytest.mark.parametrize("n", [0, 1, 7, 600])
def test_words_on_tpu_roundtrip_bit_for_bit(dtype, n, monkeypatch):
    monkeypatch.setattr(words, "backend", lambda: "tpu")
    raw = np.random.default_rng(n).integers(0, 256, n * np.dtype(jnp.dtype(dtype)).itemsize).astype(np.uint8)
    x = jnp.asarray(raw.view(jnp.dtype(dtype)))
    packed = words.to_words(x)
    assert packed.size == -(-x.nbytes // 4)
    assert same_bits(words.from_words(packed, x), x)
    with plain_operations():  # other bits of a word, the same array
        assert same_bits(words.from_words(words.to_words(x), x), x)


def test_eight_byte_numbers_become_two_words():
    with jax.enable_x64(True):
        x = jnp.asarray(np.array([1.5, -0.0, np.pi]))
        assert words.to_words(x).size == 6
        assert same_bits(words.from_words(words.to_words(x), x), x)


def test_booleans_are_refused_as_words():
    with pytest.raises(TypeError, match="pack booleans into bits"):
        words.to_words(jnp.ones(3, bool))


# --- a vmap of the caller's, and axes in any order ----------------------------------------------------------------


@every_layout
def test_a_vmap_over_rows_keeps_rows_apart(layout):
    nodes = _nodes(layout)
    x = _integers(nodes, 12).reshape(nodes.count, 3, 4)

    def one(x):
        over_rows = [lambda r, f=f: f(r, nodes, "x") for f in (comm.pmean, comm.ring_mean, comm.pmax, comm.all_gather)]
        return [jax.jit(jax.vmap(f))(x) for f in over_rows]

    mean, ring, largest, everyone = _run(one, nodes, x)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(ring, x.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(largest, x.max(0))
    np.testing.assert_array_equal(everyone, x.swapaxes(0, 1))


def test_ring_takes_slow_axes_in_any_order():
    given_nodes = [from_mesh(_mesh(2, 3), slow=axes) for axes in (("a", "b"), ("b", "a"))]
    assert given_nodes[0] == given_nodes[1]
    x = _integers(given_nodes[1], 10)
    mean = _run(lambda x: comm.ring_mean(x, given_nodes[1], "x"), given_nodes[1], x)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)


@pytest.mark.parametrize("per_device", [1, 2])
def test_ledger_counts_every_entry_of_a_vmap(per_device):
    nodes = from_mesh(_mesh(2, 3), slow="a", fast="b", per_device=per_device)
    x = jgc.place(_integers(nodes, 12).reshape(nodes.count, 3, 4), LOCAL, nodes)

    def one(x):
        x = comm.vary_over(x, ("b",)) + jax.lax.axis_index("b")  # as the gradients of a node's devices differ
        inside = comm.sum_inside(x, ("b",), nodes, "inside") + comm.exact_mean(2 * x, nodes)
        return jax.vmap(lambda r: comm.pmean(r, nodes, "rows"))(inside)

    run = jax.jit(jgc.on_nodes(one, nodes, (LOCAL,), SHARED))
    with comm.ledger() as sent:
        lowered = run.lower(x)
    assert [entry.bytes for entry in sent] == [4 * 12 * per_device * 4 / 3] * 2 + [4 * 12]
    assert sum(entry.bytes for entry in sent) == sum(one.sent_bytes for one in collectives(lowered.compile()))
