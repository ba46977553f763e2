"""Learned positions: short; the plain ones if all is searched; all blocks have turns, in proportion to what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default

import jgc
from jgc.compress import learned_topk, step_on_nodes, topk
from jgc.layout.pack import Layer
from jgc.selection import due_blocks
from jgc.wire.account import logical_bytes

K = 4
PARAMS = {"a": jnp.zeros((300, 200)), "b": jnp.zeros((50, 70)), "bias": jnp.zeros(37)}


def steps(compressor, count):
    """The aggregates and the last state of some steps on random gradients."""
    nodes = jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    state, out = compressor.init(jax.random.key(0), PARAMS, nodes), []
    for i in range(count):
        random = np.random.default_rng(i)
        grads = jax.tree.map(lambda x, r=random: r.normal(size=(K, *x.shape)).astype(np.float32), PARAMS)
        aggregated, state, info = step(jax.random.key(i), grads, state)
        assert not info.overflow.any()
        out.append(jax.tree.map(np.asarray, aggregated))
    return out, state


@pytest.mark.slow
@pytest.mark.parametrize("memory", some_by_default([{}, {"momentum_correction": True, "factor_masking": True}], [{}]))
def test_with_all_blocks_searched_the_values_sent_are_those_of_topk(memory):
    plain, _ = steps(topk(alpha=0.01, value_code="1bit", **memory), 3)
    learned, _ = steps(learned_topk(alpha=0.01, value_code="1bit", candidates=10**6, **memory), 3)
    for a, b in zip(plain, learned, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_positions_take_few_bits_whatever_the_length():
    def bytes_of(compressor):
        shapes = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
        return logical_bytes(compressor.wire("top-k", shapes, jgc.make_nodes(K)).logical, K)["worker"]["up"]

    plain, learned = bytes_of(topk(alpha=0.001)), bytes_of(learned_topk(alpha=0.001))
    assert learned["values"] == plain["values"]
    assert learned["positions"] * 8 / (learned["values"] / 4) == pytest.approx(8, abs=0.01)
    assert learned["positions"] < 0.7 * plain["positions"]


def test_only_searched_blocks_are_sent_from_and_all_have_their_turn():
    compressor = learned_topk(alpha=0.001, candidates=64)
    out, _ = steps(compressor, 40)
    nonzero = np.array([x["a"].reshape(-1, due_blocks.BLOCK).any(axis=1) for x in out])
    searched = -(-60 * 64 // due_blocks.BLOCK)  # 60 values of each node, of 60,000
    assert nonzero.sum(axis=1).max() <= searched
    assert nonzero.any(axis=0).mean() > 0.5  # 480 of 7,500 blocks in each of 40 steps; 240 values sent


def test_turns_are_in_proportion_to_what_is_sent():
    """One block in ten is sent from nine times as often as the others: it has most of the turns, but not all."""
    layers = (Layer("a", 0, 100 * due_blocks.BLOCK, (100, due_blocks.BLOCK)),)
    cut = due_blocks.cut_in_blocks(layers, (10,), due_blocks.BLOCK)  # 10 of 100 blocks in a step
    hot, random = np.arange(0, 100, 10), np.random.default_rng(0)

    @jax.jit
    def step(known, sent):
        blocks = due_blocks.due(known, cut)
        return blocks, due_blocks.after(known, blocks, sent, cut, K)

    known, had = due_blocks.first(layers), np.zeros(100, int)
    for i in range(1500):
        sent = np.where(random.random((K, 10)) < 0.5, random.choice(hot, (K, 10)), random.integers(0, 100, (K, 10)))
        blocks, known = step(known, jnp.asarray(sent, jnp.int32))
        assert np.all(np.diff(blocks) > 0)
        if i >= 1000:
            had[np.asarray(blocks)] += 1
    others = np.setdiff1d(np.arange(100), hot)
    assert 3 < had[hot].mean() / had[others].mean() < 11
    assert had.min() >= 500 / 100  # each at least once in a hundred steps


def test_shorter_blocks_hold_no_position_past_their_layer():
    layers = (Layer("a", 0, 13, (13,)), Layer("b", 13, 9, (9,)))
    cut = due_blocks.cut_in_blocks(layers, (1, 1), 64)
    every = jnp.arange(4 * due_blocks.BLOCK)
    at = np.asarray(due_blocks.positions_of(every, jnp.arange(4), cut, 22)).reshape(4, due_blocks.BLOCK)
    assert sorted(at[at < 22].tolist()) == list(range(22))
    assert (at[1] == 22).sum() == 3 and (at[3] == 22).sum() == 7
    values = np.asarray(due_blocks.candidates_of(jnp.arange(1.0, 23.0), jnp.arange(4), cut)).reshape(at.shape)
    np.testing.assert_array_equal(values, np.where(at < 22, at + 1, 0))


@pytest.mark.parametrize("candidates", [1, 0, -3])
def test_fewer_than_two_candidates_are_refused(candidates):
    with pytest.raises(ValueError, match=f"candidates must be at least 2 .* got {candidates}"):
        learned_topk(candidates=candidates)
