"""GradiVeQ: codes that commute with the mean, bases from samples, the cycle of phases, and what the ring waits for."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default
from hypothesis import given, settings, strategies as st

import jgc
from jgc.compress import gradiveq, step_on_nodes
from jgc.compress.low_rank.slices import Sliced, code_size, codes, decoded, dimensions, no_rows, plan, principal
from jgc.lab.shared.hlo import parse
from jgc.layout.pack import make_packing, pack
from jgc.method import phases
from jgc.nodes.layouts import as_one_per_device
from jgc.types import Phase, State

K = 8
PARAMS = {
    "bias": jnp.zeros(4),
    "conv": jnp.zeros((3, 3, 2, 4)),
    "head": jnp.zeros((6, 4)),
    "wide": jnp.zeros((1, 5, 3, 8)),
}
CYCLE = {"warmup_steps": 2, "sampling_steps": 6, "compressed_steps": 4}
LAYOUTS = {
    "emulated": lambda: jgc.make_nodes(K, jax.devices()[:1]),
    "one per device": lambda: jgc.make_nodes(K),
    "two per device": lambda: jgc.make_nodes(K, jax.devices()[:4]),
}
STATE = State(jgc.SHARED, jgc.LOCAL)


def random_gradients(rng: np.random.Generator, like=PARAMS) -> dict:
    """All nodes' gradients [K, ...]."""
    return jax.tree.map(lambda x: rng.normal(size=(K, *x.shape)).astype(np.float32), like)


def flat(tree) -> np.ndarray:
    return np.asarray(pack(tree, make_packing(tree)))


def mean_of(grads) -> np.ndarray:
    return flat(jax.tree.map(lambda x: jnp.asarray(x).mean(0), grads))


@functools.cache
def compiled(phase, layout: str, **overrides):
    return jax.jit(step_on_nodes(gradiveq(**{**CYCLE, **overrides}).aggregate, phase, LAYOUTS[layout]()))


def play(steps: list[dict], layout: str = "emulated", **overrides) -> list[tuple[Phase, np.ndarray, State]]:
    """The phase, the aggregate f32[n] and the state after each step, as the training loop goes through them."""
    compressor, nodes = gradiveq(**{**CYCLE, **overrides}), LAYOUTS[layout]()
    state = jgc.place(compressor.init(jax.random.key(0), PARAMS, nodes), STATE, nodes)
    phase, out = compressor.schedule[0], []
    for i, grads in enumerate(steps):
        old, phase = phase, phases.phase_after(compressor, phase, i, state, nodes)
        if phase.value != old.value:
            state = jgc.place(compressor.transition(old.value, phase.value, state, nodes), STATE, nodes)
        key = jgc.place(jax.random.key(i), "shared", nodes)
        mean, state, _ = compiled(phase.value, layout, **overrides)(key, jgc.place(grads, "local", nodes), state)
        out.append((phase, flat(jax.tree.map(jnp.asarray, mean)), state))
    return out


def name_of(phase: Phase) -> str:
    return phase.parts[-1].name


# --- slices -------------------------------------------------------------------------------------------------------


def test_slices_follow_figure_3a():
    kernel = np.arange(3 * 3 * 2 * 4).reshape(3, 3, 2, 4)  # height, width, depth, filters
    by_hand = [kernel[h, w, d, f] for h in range(3) for w in range(3) for d in range(2) for f in range(4)]
    np.testing.assert_array_equal(kernel.reshape(-1), by_hand)
    [layer] = plan(make_packing({"conv": jnp.zeros((3, 3, 2, 4))}).layers, 3, 100, 0)
    assert layer == Sliced(0, 72, 24, 3, 3)


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 4), st.integers(0, 2**31 - 1))
@settings(max_examples=10, deadline=None)
def test_codes_are_linear_whole_or_in_parts(taps, places, reuse, seed):
    packing = make_packing({"a": jnp.zeros((places, 3, 2, 2)), "b": jnp.zeros((2, places, 3))})
    layers = plan(packing.layers, taps, 100, reuse)
    rng = np.random.default_rng(seed)
    d = [int(rng.integers(1, min(layer.width, 5) + 1)) for layer in layers]
    rows = tuple(jnp.asarray(rng.normal(size=r.shape), jnp.float32) for r in no_rows(layers, [5] * len(layers)))
    x = rng.normal(size=(4, packing.size)).astype(np.float32)
    size = code_size(layers, d)
    cuts = np.sort(rng.integers(0, size + 1, 2))

    @jax.jit
    def run(x, mean):
        each = jnp.stack([codes(layers, rows, d, v, 0, size) for v in x])
        parts = [codes(layers, rows, d, x[0], a, b) for a, b in zip((0, *cuts), (*cuts, size), strict=True)]
        return each, codes(layers, rows, d, mean, 0, size), jnp.concatenate(parts)

    each, whole, parts = run(x, x.mean(0))
    np.testing.assert_allclose(each.mean(0), whole, atol=1e-4)
    np.testing.assert_allclose(parts, each[0], atol=1e-4)


def test_codes_are_the_products_of_slices_with_their_bases():
    packing = make_packing({"a": jnp.zeros((5, 2, 3))})
    layers, rng = plan(packing.layers, 1, 100, reuse=2), np.random.default_rng(0)
    rows, x = rng.normal(size=(3, 4, 6)).astype(np.float32), rng.normal(size=30).astype(np.float32)
    by_hand = [rows[m // 2, :3] @ x[6 * m :][:6] for m in range(5)]
    got = codes(layers, (jnp.asarray(rows),), [3], jnp.asarray(x), 0, 15)
    np.testing.assert_allclose(got, np.concatenate(by_hand), rtol=1e-5)
    back = decoded(layers, (jnp.asarray(rows),), [3], got)
    np.testing.assert_allclose(back, np.concatenate([rows[m // 2, :3].T @ by_hand[m] for m in range(5)]), rtol=1e-4)


# --- principal components --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples, width", [(5, 12), (12, 12), (40, 12)])
def test_basis_is_that_of_sample_covariance(samples, width):
    x = np.random.default_rng(1).normal(size=(2, samples, width)) * np.arange(1, width + 1)
    energies, directions = principal(jnp.asarray(x, jnp.float32), x.shape[1])
    for g in range(2):
        values, vectors = np.linalg.eigh(np.cov(x[g].T) * (samples - 1))
        count = min(samples - 1, width)
        np.testing.assert_allclose(energies[g, :count], values[::-1][:count], rtol=1e-3)
        for i in range(count):
            assert abs(float(vectors[:, -1 - i] @ np.asarray(directions[g, i]))) > 0.999


@pytest.mark.slow
@given(st.floats(0, 0.99), st.integers(2, 12), st.integers(0, 2**31 - 1))
@settings(max_examples=40, deadline=None)
def test_at_most_lambda_of_sample_energy_is_lost(loss, samples, seed):
    x = np.random.default_rng(seed).normal(size=(1, samples, 9)) * 2.0 ** -np.arange(9)
    energies, directions = principal(jnp.asarray(x, jnp.float32), x.shape[1])
    d = dimensions(np.asarray(energies), loss)
    centred = x[0] - x[0].mean(0)
    u = np.asarray(directions[0, :d], float)
    assert np.sum((centred - centred @ u.T @ u) ** 2) <= (loss + 1e-5) * np.sum(centred**2)
    if d > 1:
        u = u[:-1]
        assert np.sum((centred - centred @ u.T @ u) ** 2) > (loss - 1e-5) * np.sum(centred**2)


def test_d_follows_worst_basis_of_a_layer():
    assert dimensions(np.array([[9.0, 1.0, 0.0], [4.0, 3.0, 3.0]]), 0.1) == 3
    assert dimensions(np.zeros((2, 4)), 0.01) == 1
    assert dimensions(np.array([[1.0, 1.0, 1.0]]), 0.0) == 3


# --- steps ----------------------------------------------------------------------------------------------------------


def test_cycle_alternates_sampling_and_compression():
    rng = np.random.default_rng(2)
    run = play([random_gradients(rng) for _ in range(20)])
    assert [name_of(phase) for phase, _, _ in run] == (
        ["dense"] * 2 + ["sampling"] * 6 + ["compressed"] * 4 + ["sampling"] * 6 + ["compressed"] * 2
    )
    assert [phase.start for phase, _, _ in run][-1] == 18


def test_d_equal_to_k_is_lossless():
    rng = np.random.default_rng(3)
    steps = [random_gradients(rng) for _ in range(35)]
    run = play(steps, warmup_steps=0, sampling_steps=30, compressed_steps=5, loss=0.0, slice_taps=1)
    for (phase, mean, _), grads in list(zip(run, steps, strict=True))[30:]:
        assert phase.parts[-1].value == ("compressed", (8, 24))
        np.testing.assert_allclose(mean, mean_of(grads), atol=1e-5)


@functools.cache
def in_planes() -> list[dict]:
    """Gradients whose slices lie in a plane of two directions, the same for all slices of a layer; a mean of 1."""
    rng = np.random.default_rng(4)
    block = {"conv": 8, "wide": 24}
    directions = {name: rng.normal(size=(2, size)) for name, size in block.items()}

    def node(name, x):
        if name not in block:
            return rng.normal(size=x.shape)
        return (1 + rng.normal(size=(x.size // block[name], 2)) @ directions[name]).reshape(x.shape)

    return [
        {name: np.stack([node(name, x) for _ in range(K)]).astype(np.float32) for name, x in PARAMS.items()}
        for _ in range(14)
    ]


@pytest.mark.parametrize("reuse", some_by_default([0, 1, 2], [1]))
def test_gradients_in_a_plane_are_lossless_with_two_numbers_a_slice(reuse):
    settings = {"sampling_steps": 9, "sampling_bits": 0, "slice_taps": 1, "loss": 1e-6, "reuse": reuse}
    run = play(in_planes(), **settings)
    for (phase, mean, _), grads in list(zip(run, in_planes(), strict=True))[11:]:
        assert phase.parts[-1].value == ("compressed", (2, 2))
        np.testing.assert_allclose(mean, mean_of(grads), atol=1e-4)


EXCHANGES = [("psum", True), ("ring", True), ("ring", False)]


@pytest.mark.parametrize("layout", some_by_default(LAYOUTS, ("two per device",)))
@pytest.mark.parametrize("algorithm, overlapped", some_by_default(EXCHANGES, EXCHANGES[1:2]))
def test_ring_and_psum_equal_direct_computation(layout, algorithm, overlapped):
    rng = np.random.default_rng(5)
    steps = [random_gradients(rng) for _ in range(10)]
    run = play(steps, layout, algorithm=algorithm, overlapped=overlapped, sampling_bits=0, reuse=2)
    (_, _, before), (phase, mean, _) = run[-2:]
    assert name_of(phase) == "compressed"
    learned = before.shared[-1]
    packing = make_packing({name: PARAMS[name] for name in ("conv", "wide")})
    layers, d = plan(packing.layers, 3, 65_536, 2), phase.parts[-1].value[1]
    g = mean_of({name: steps[-1][name] for name in ("conv", "wide")})
    expected = np.concatenate([
        np.asarray(learned.mean)[layer.start : layer.start + layer.size]
        + _project(layer, np.asarray(rows, float), size, (g - np.asarray(learned.mean))[layer.start :][: layer.size])
        for layer, rows, size in zip(layers, learned.bases, d, strict=True)
    ])  # fmt: skip
    got = dict(zip(sorted(PARAMS), _unflat(mean), strict=True))
    np.testing.assert_allclose(np.concatenate([got["conv"], got["wide"]]), expected, atol=1e-5)
    direct = mean_of({name: steps[-1][name] for name in ("bias", "head")})
    np.testing.assert_allclose(np.concatenate([got["head"], got["bias"]]), direct, atol=1e-6)


def _project(layer: Sliced, rows: np.ndarray, d: int, x: np.ndarray) -> np.ndarray:
    """U U^T of the slices of x, in plain NumPy."""
    x = np.pad(x, (0, layer.count * layer.width - x.size)).reshape(layer.count, layer.width)
    return np.concatenate([rows[m // layer.reuse, :d].T @ (rows[m // layer.reuse, :d] @ x[m]) for m in range(len(x))])[
        : layer.size
    ]


def _unflat(vector: np.ndarray) -> list[np.ndarray]:
    tree = jgc.layout.pack.unpack(jnp.asarray(vector), make_packing(PARAMS))
    return [np.asarray(tree[name]).reshape(-1) for name in sorted(PARAMS)]


def test_samples_are_aggregates_without_skipped_steps():
    rng = np.random.default_rng(6)
    steps = [random_gradients(rng) for _ in range(8)]
    steps[4]["conv"][3, 0, 0, 0, 0] = np.nan
    run = play(steps)
    learned = run[-1][2].shared[-1]
    assert int(learned.steps) == 5 and int(learned.taken) == 7
    given = [dict(zip(sorted(PARAMS), _unflat(mean), strict=True))["conv"] for _, mean, _ in run]
    kept = [x for i, x in enumerate(given) if i != 4]  # two of them in the warm-up; there is room for six
    np.testing.assert_array_equal(learned.samples[0][0], np.stack([kept[6], *kept[1:6]])[:, :24])
    np.testing.assert_allclose(learned.mean[:72], np.sum(kept[2:], 0), atol=1e-5)


def test_feedback_returns_code_losses_in_next_sampling_phase():
    rng = np.random.default_rng(7)
    steps = [random_gradients(rng) for _ in range(18)]
    run = play(steps, error_feedback=True, centred=False, sampling_bits=0, rank=1)
    came, went = (np.cumsum(x, axis=0) for x in ([mean_of(g) for g in steps], [mean for _, mean, _ in run]))
    assert np.abs(came - went).max(1)[11] > 0.1  # the end of the compressed phase
    np.testing.assert_allclose(went[12:], came[12:], atol=1e-4)


# --- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", some_by_default(["psum", "ring"], ["ring"]))
def test_compressed_bytes_are_ring_bytes_with_little_padding(algorithm):
    compressor = gradiveq(**CYCLE, algorithm=algorithm)
    phase, packing = compressor.schedule[-1].value, make_packing({name: PARAMS[name] for name in ("conv", "wide")})
    payload = 4 * code_size(plan(packing.layers, 3, 65_536, 0), (5, 5))
    for count in (2, 3, 5, 8, 16):
        nodes = as_one_per_device(jgc.make_nodes(count, jax.devices()[:1]))
        sent = sum(s.bytes for s in compressor.wire(phase, PARAMS, nodes).physical if s.field == "codes")
        exact = 2 * (count - 1) / count * payload
        assert exact <= float(sent) < exact + 2 * 4 * count


def test_compression_overlaps_communication():
    """Algorithm 1, lines 5 and 6: in the compiled program nothing leads from a ppermute to a product but by the
    all-gather, behind which segments are decompressed."""
    graph = compressed_ring(overlapped=True)
    hops = graph.named("collective-permute")
    assert len(hops) >= K - 1  # the other leaves have a ring of their own
    behind_the_ring = graph.behind(graph.named("all-gather"))
    waiting = [op for op in graph.behind(hops) - behind_the_ring if graph.multiplies(op)]
    assert waiting == []
    products = [op for op in graph.operands if graph.multiplies(op)]
    made_before = [op for op in products if op not in graph.behind(hops)]
    assert len(made_before) >= K and any(op in behind_the_ring for op in products)  # both kinds are there to be seen
    assert not waits_for_all(graph, hops)


def test_not_overlapped_every_hop_waits_for_all_codes():
    graph = compressed_ring(overlapped=False)
    assert waits_for_all(graph, graph.named("collective-permute"))


def waits_for_all(graph: "Graph", hops: set[str]) -> bool:
    """Whether the hops of codes are behind every product before the all-gather."""
    before = {op for op in graph.operands if graph.multiplies(op)} - graph.behind(graph.named("all-gather"))
    of_codes = {hop for hop in hops if any(hop in graph.behind({op}) for op in before)}
    return bool(before) and all(of_codes <= graph.behind({op}) for op in before)


def compressed_ring(overlapped: bool) -> "Graph":
    """The compiled step with codes in a ring, one node on each device."""
    nodes = LAYOUTS["one per device"]()
    compressor = gradiveq(**CYCLE, algorithm="ring", overlapped=overlapped)
    state = jgc.place(compressor.init(jax.random.key(0), PARAMS, nodes), STATE, nodes)
    grads = jgc.place(random_gradients(np.random.default_rng(9)), "local", nodes)
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    return Graph(step.lower(jgc.place(jax.random.key(0), "shared", nodes), grads, state).compile().as_text())


class Graph:
    """Who waits for whom in the entry computation of a compiled program."""

    def __init__(self, text: str):
        self.module = parse(text)
        self.ops = self.module.computations[self.module.entry]
        found = {name: re.findall(r"%([\w.-]+)", op.rest) for name, op in self.ops.items()}
        self.operands = {name: [o for o in operands if o in self.ops] for name, operands in found.items()}

    def named(self, opcode: str) -> set[str]:
        return {name for name, op in self.ops.items() if op.opcode == opcode and op.stage in ("", "start")}

    def behind(self, sources: set[str]) -> set[str]:
        out = set(sources)
        for name, operands in self.operands.items():  # operands come before what uses them
            if out.intersection(operands):
                out.add(name)
        return out - sources

    def multiplies(self, name: str) -> bool:
        """Whether an instruction is a matrix product, or calls a computation with one in it."""
        return self._has_product(self.ops[name].line)

    def _has_product(self, line: str) -> bool:
        if re.search(r"= \S+ (dot|ragged-dot)\(|__onednn|matmul|gemm", line):
            return True
        called = re.findall(r"%([\w.-]+)", line.split("metadata=")[0])
        bodies = [self.module.computations[name] for name in called if name in self.module.computations]
        return any(self._has_product(op.line) for body in bodies for op in body.values())


# --- bad settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sampling_steps": 1}, "sampling_steps must be at least 2, got 1"),
        ({"sampling_steps": 1, "samples": 1}, r"samples must be 0 .* or at least 2, got 1"),
        ({"rank": 6, "sampling_steps": 6}, "rank must be at most the samples - 1 = 5 .* got 6"),
        ({"loss": 1.0}, r"loss \(lambda\) must be in \[0, 1\), got 1.0"),
        ({"sampling_bits": 9}, "sampling_bits must be 0 .* or 2 to 8, got 9"),
    ],
)
def test_contradicting_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        gradiveq(**settings)


def test_rank_beyond_a_slice_is_named():
    with pytest.raises(ValueError, match="rank must be at most K, which is 24 for a layer, got 30"):
        gradiveq(rank=30).init(jax.random.key(0), PARAMS, LAYOUTS["emulated"]())


def test_wide_kernels_and_other_leaves_go_uncompressed():
    nodes = LAYOUTS["emulated"]()
    wire = gradiveq(max_slice=10).wire(gradiveq(max_slice=10).schedule[-1].value, PARAMS, nodes)
    sizes = {m.field: m.bytes for m in wire.logical if m.direction == "up"}
    assert sizes == {"codes": 4 * 9 * 8, "dense": 4 * (120 + 24 + 4)}
    with pytest.warns(UserWarning, match=r"compresses 72 of the model's 220 values: 1 convolutions, wide first, have"):
        gradiveq(max_slice=10).init(jax.random.key(0), PARAMS, nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradiveq(max_slice=24).init(jax.random.key(0), PARAMS, nodes)


def test_a_model_without_convolutions_is_sent_uncompressed():
    params = {"head": jnp.zeros((6, 4))}
    compressor, nodes = gradiveq(**CYCLE), LAYOUTS["one per device"]()
    state = jgc.place(compressor.init(jax.random.key(0), params, nodes), STATE, nodes)
    grads = random_gradients(np.random.default_rng(0), params)
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    mean, _, _ = step(jgc.place(jax.random.key(0), "shared", nodes), jgc.place(grads, "local", nodes), state)
    np.testing.assert_allclose(mean["head"], grads["head"].mean(0), atol=1e-6)


def test_a_phase_with_sizes_survives_json():
    import json

    phase = phases.combined([Phase("a", 0, "a"), Phase("compressed", 7, ("compressed", (8, 16)))], 7, 1)
    assert phases.from_json(json.loads(json.dumps(phases.as_json(phase)))) == phase
