"""Top-k in two stages: the largest rows of an embedding, then the largest values in them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import every_layout, nodes_of, same_bits

import jgc
from jgc.compress import dgc, per_layer, stacked, topk
from jgc.compress.sparse.rows import row_top_k
from jgc.compress.sparse.topk import top_k
from jgc.layout.pack import make_packing, pack
from jgc.method.whole_step import step_of_shapes
from jgc.selection.rows import cut, largest_rows, lengthen, shorten
from jgc.types import State
from jgc.wire.hlo import collectives, table

V, D, TOUCHED = 400, 16, 6
PARAMS = {"embedding": jnp.zeros((V, D)), "head": {"bias": jnp.zeros(7), "kernel": jnp.zeros((D, 7))}}


def gradients(seed=0):
    """Gradients of 8 nodes; each touches 6 rows of the embedding."""
    random = np.random.default_rng(seed)

    def leaf(x):
        magnitudes, signs = random.integers(1, 65, (8, *x.shape)), random.choice([-1, 1], (8, *x.shape))
        return np.asarray(magnitudes * signs / 64, np.float32)

    grads = jax.tree.map(leaf, PARAMS)
    for of_node in grads["embedding"]:
        of_node[random.permutation(V)[TOUCHED:]] = 0
    return grads


def run(compressor, every, layout="1 device", params=PARAMS, phase=-1):
    nodes, value = nodes_of(layout), compressor.schedule[phase].value
    state = jgc.place(compressor.init(jax.random.key(0), params, nodes), State(jgc.SHARED, jgc.LOCAL), nodes)
    step, out = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, value, nodes)), []
    for grads in every:
        aggregated, state, info = step(jax.random.key(0), jgc.place(grads, jgc.LOCAL, nodes), state)
        out.append(aggregated)
    return out, state, info, step.lower(jax.random.key(0), grads, state).compile()


def decoded(codec, v, layers):
    payload = jax.jit(lambda v: codec.encode(jax.random.key(0), v, layers))(v)
    return jax.jit(lambda payload: codec.decode(payload, layers))(payload), payload


def _embedding():
    """An embedding as a layer, and a node's gradient of it."""
    packing = make_packing({"embedding": PARAMS["embedding"]})
    return packing.layers, pack({"embedding": gradients()["embedding"][0]}, packing)


@pytest.mark.parametrize("alpha", [0.004, 0.01, 0.5])
@pytest.mark.parametrize("value_code", ["float32", "4bit"])
def test_selects_the_largest_values_of_the_largest_rows(alpha, value_code):
    random = np.random.default_rng(1)
    tree = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), PARAMS)
    layers, v = make_packing(tree).layers, np.asarray(pack(tree, make_packing(tree)))
    sparse, _ = decoded(row_top_k(alpha, 5, value_code=value_code), v, layers)

    rows = np.sort(np.argsort(-np.abs(np.asarray(tree["embedding"])).sum(1))[:5])
    expected = []
    for layer in layers:
        own = np.abs(v[layer.start : layer.start + layer.size])
        if layer.name in ("embedding", "head/kernel"):  # both have more than 5 rows
            rows = np.argsort(-own.reshape(layer.shape).sum(1))[:5]
            own = np.where(np.isin(np.arange(layer.size) // layer.shape[1], rows), own, 0)
        k = min(max(1, round(alpha * layer.size)), 5 * layer.shape[1] if len(layer.shape) > 1 else layer.size)
        expected += sorted(layer.start + np.argsort(-own)[:k])
    assert np.asarray(sparse.positions).tolist() == expected
    if value_code == "float32":
        assert np.array_equal(sparse.values, v[np.asarray(expected)])


def test_rows_and_short_vector_are_inverse():
    layers = make_packing(PARAMS).layers
    v = jnp.arange(float(sum(layer.size for layer in layers)))
    plan = cut(layers, 5)
    rows = largest_rows(v, plan)
    short = shorten(v, rows, plan)
    counts = [one.short.size for one in plan]
    assert np.array_equal(v[lengthen(jnp.arange(short.size), rows, plan, counts)], short)
    assert np.array_equal(rows[:5], np.arange(V - 5, V))


def test_rows_that_are_touched_leave_no_zeros():
    """The share is 2 % of 6,400 values, and a node touches 96: without rows, 32 of 128 values are zeros."""
    layers, v = _embedding()
    whole, sent = decoded(top_k(0.02), v, layers)
    zeros = int(jnp.sum(whole.values == 0))
    assert zeros == 128 - TOUCHED * D
    by_rows, sent_rows = decoded(row_top_k(0.02, TOUCHED), v, layers)
    assert not jnp.any(by_rows.values == 0)
    scattered = [jnp.zeros_like(v).at[x.positions].add(x.values) for x in (whole, by_rows)]
    assert np.array_equal(*scattered)  # nothing is lost
    assert sum(x.nbytes for x in sent_rows.values()) < 0.75 * sum(x.nbytes for x in sent.values())


def test_whole_rows_need_no_positions_of_values():
    layers, v = _embedding()
    sparse, payload = decoded(row_top_k(1.0, TOUCHED), v, layers)
    assert payload["positions"].size == 2  # words: 6 rows of 400 take 6 * 6 + 6 + 7 bits
    assert np.array_equal(jnp.zeros_like(v).at[sparse.positions].add(sparse.values), v)


@every_layout
@pytest.mark.parametrize("method", [topk, dgc])
def test_error_feedback_sends_every_row_in_time(method, layout):
    settings = {"momentum": 0.0} if method is dgc else {}
    compressor = method(alpha=0.05, rows=3, **settings)
    every = [gradients(seed) for seed in range(3)]
    zeros = jax.tree.map(np.zeros_like, every[0])
    aggregated, _, info, compiled = run(compressor, [*every, *[zeros] * 40], layout)
    total = jax.tree.map(lambda *x: np.sum(x, axis=0), *aggregated)
    came = jax.tree.map(lambda *x: np.sum(x, axis=0).mean(0), *every)
    assert same_bits(total, came) and not info.residual_norm.any()
    nodes, sent = nodes_of(layout), table(collectives(compiled))
    wire = compressor.wire(compressor.schedule[-1].value, PARAMS, nodes)
    for op, found in sent.items():
        assert found.sent_bytes == sum(one.bytes for one in wire.physical if one.op == op)


def test_embedding_alone_by_rows_in_one_collective():
    both = per_layer([("^embedding$", topk(alpha=0.02, rows=TOUCHED))], default=topk(alpha=0.02))
    (mean,), *_, compiled = run(both, [gradients()], "4 devices")
    assert {op: one.times for op, one in table(collectives(compiled)).items()} == {"all-gather": 1, "all-reduce": 1}
    assert np.array_equal(mean["embedding"], gradients()["embedding"].mean(0))


def test_stacked_embeddings_have_rows_of_their_own():
    params = {"tables": jnp.zeros((2, V, D))}
    grads = {"tables": np.stack([gradients(seed)["embedding"] for seed in (0, 1)], axis=1)}
    (mean,), *_ = run(stacked("tables", topk(alpha=1.0, rows=TOUCHED)), [grads], params=params)
    assert np.array_equal(mean["tables"], grads["tables"].mean(0))


def test_parts_without_an_embedding_are_taken_whole():
    """What devices of a node do not divide is a vector of its own, and so is every fragment of local steps."""
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"))
    nodes, compressor = jgc.from_mesh(mesh, slow="dcn", fast="fsdp"), topk(alpha=0.02, rows=TOUCHED)
    place = {"embedding": jax.P("fsdp"), "head": {"bias": jax.P(), "kernel": jax.P()}}
    shapes = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)), PARAMS, place
    )
    step, args = step_of_shapes(compressor, compressor.schedule[-1].value, shapes, nodes)
    assert jax.tree.map(lambda x: x.shape, jax.eval_shape(step, *args)[0]) == jax.tree.map(lambda x: x.shape, PARAMS)
    with pytest.raises(ValueError, match="rows=400 leaves out nothing"):
        step_of_shapes(topk(rows=V), "top-k", shapes, nodes)
    local = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), compressor, 2, nodes_of("1 device"), fragments=2)
    init, train = local.make_step(lambda params, batch: sum(jnp.sum(x) for x in jax.tree.leaves(params)))
    state = init(jax.random.key(0), PARAMS)
    for _ in range(4):
        state, _ = train(state, jnp.zeros((8, 1)))
    assert local.bytes_per_round(PARAMS)


def test_tiny_values_are_not_taken_for_zeros():
    v = jnp.zeros((V, D)).at[7].set(1e-30)
    layers = make_packing({"x": v}).layers
    assert largest_rows(v.reshape(-1), cut(layers, 1)).tolist() == [7]


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"rows must be at least 0 .* got -1"):
        topk(rows=-1)
    with pytest.raises(ValueError, match=r"rows=400 leaves out nothing: .* there are embedding \[400, 16\], head/k"):
        run(topk(rows=400), [gradients()])
