"""Nodes of several devices: parameters divided over them are encoded shard by shard."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

pytest.importorskip("obstore")

from jgc import compress, rounds
from jgc.layout.pack import make_packing, unpack
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.shards import fill, shards_of

SPECS = {"w": P("x", None), "e": P(None, ("x", "y")), "b": P(), "n": P("y")}
PARAMS = {"w": np.ones((8, 6)), "e": np.ones((3, 16)), "b": np.zeros(5), "n": np.zeros(4), "count": np.int32(3)}


def _params(devices, seed=0):
    mesh = Mesh(np.array(devices).reshape(2, 2), ("x", "y"))
    draw = np.random.default_rng(seed)
    arrays = {k: jnp.asarray(x + draw.normal(size=x.shape), jnp.float32) for k, x in PARAMS.items() if k != "count"}
    divided = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in arrays.items()}
    return divided | {"count": jnp.int32(3)}


def _whole(params):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)


def test_every_value_is_in_one_shard():
    params = _params(jax.devices()[:4])
    leaves = jax.tree.leaves(params)
    times = [np.zeros(x.shape) for x in leaves]
    shards = shards_of(leaves, [x.dtype == jnp.float32 for x in leaves])
    for shard in shards:
        for count, piece in zip(times, shard.pieces, strict=True):
            if piece is not None:
                count[tuple(slice(*part) for part in piece)] += 1
    assert [int(x.min()) for x in times] == [1, 0, 1, 1, 1] and max(x.max() for x in times) == 1
    assert len(shards) == len({shard.device for shard in shards}) == 4
    assert len(shards_of([np.zeros(3)], [True])) == 1


@pytest.mark.parametrize("method", [compress.dense(), compress.topk(alpha=0.2, strategy="fixed")])
def test_messages_and_residuals_of_shards_add_up_to_the_difference(method):
    coder = CompressorCoder(method, _params(jax.devices()[:4]), 0)
    difference = np.random.default_rng(1).normal(size=coder.size).astype(np.float32)
    fields, memory = coder.encode(0, coder.first(), difference, 7)
    assert fields["words"].shape == coder.shapes(0)["words"].shape
    residual = np.zeros(coder.size, np.float32)
    for i, (shard, part) in enumerate(zip(coder.shards, coder.parts, strict=True)):
        if f"{i:03d}/000" in memory:
            tree = unpack(jnp.asarray(memory[f"{i:03d}/000"]), make_packing(part.like))
            leaves = iter(jax.tree.leaves(tree))
            pieces = [None if piece is None else next(leaves) for piece in shard.pieces]
            fill(residual, shard, coder.leaves.vector_shapes, pieces)
    decoded = coder.decode(0, fields)
    np.testing.assert_array_equal(decoded + residual, difference)
    assert (np.count_nonzero(decoded) < coder.size / 2) == bool(memory)


def _moved(params, by):
    return jax.tree.map(lambda x: x * 0.5 + by if x.dtype == jnp.float32 else x, params)


def test_two_nodes_of_four_devices_have_the_same_bits(tmp_path):
    def node(k):
        params = _params(jax.devices()[4 * k : 4 * k + 4])
        run = rounds.join(
            tmp_path / "bucket", node="ab"[k], params=params, quorum=2,
            compressor=compress.topk(alpha=0.2, strategy="fixed"), outer=rounds.Sgd(1.0, 0.0),
        )  # fmt: skip
        theta, digests = run.params, []
        for i in range(3):
            theta, outcome = run.exchange(_moved(theta, k + i), 1)
            digests.append(outcome.digest)
        run.leave()
        placed = [theta[name].sharding == params[name].sharding for name in SPECS]
        return digests, placed, _whole(theta)

    with ThreadPoolExecutor(2) as pool:
        (of_a, placed_a, a), (of_b, placed_b, b) = pool.map(node, range(2))
    assert of_a == of_b and all(placed_a + placed_b)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)) and int(a["count"]) == 3


def test_nodes_that_divide_their_parameters_otherwise_are_refused(tmp_path):
    settings = {"quorum": 1, "compressor": compress.dense()}
    rounds.join(tmp_path / "bucket", node="a", params=_params(jax.devices()[:4]), **settings).leave()
    with pytest.raises(rounds.RoundsError, match="shards="):
        rounds.join(tmp_path / "bucket", node="b", params=_whole(_params(jax.devices()[:4])), **settings)
