"""What is written otherwise for a GPU, for fewer kernels: the results are those of other backends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgc
from jgc import comm
from jgc.comm import collectives
from jgc.compress import powersgd, step_on_nodes
from jgc.layout import batches, devices, leaves
from jgc.layout.batches import each_of, stacked, turns
from jgc.layout.leaves import buckets

MODULES = (batches, collectives, devices, leaves)
SHAPES = [(8, 6), (9, 6), (8, 6), (5,), (8, 6), (40, 6), (6, 8)]


def arrays_of(shapes: list[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.fixture
def on_gpu(monkeypatch):
    for module in MODULES:
        monkeypatch.setattr(module, "backend", lambda: "gpu")


def test_stacks_hold_the_arrays_in_their_order(on_gpu):
    arrays = arrays_of(SHAPES)
    for x, part in zip(arrays, jax.jit(stacked)(arrays), strict=True):
        np.testing.assert_array_equal(x, part)
    assert stacked([]) == []


def test_each_array_meets_its_partner(on_gpu):
    lefts, rights = arrays_of(SHAPES), arrays_of(SHAPES, seed=1)
    rights[2] = rights[2][:1]  # of a different shape than its neighbours' partners
    differences = jax.jit(lambda a, b: each_of(jnp.subtract, a, b))(lefts, rights)
    for x, y, difference in zip(lefts, rights, differences, strict=True):
        np.testing.assert_array_equal(difference, x - y)


@pytest.mark.parametrize("count", [0, 5, 40])
def test_turns_come_in_order(count, on_gpu):
    assert jax.jit(lambda: turns(2, 2 + count, lambda i, x: 3 * x + i, jnp.uint32(1)))() == np.uint32(
        _in_python(count) % 2**32
    )


def _in_python(count: int) -> int:
    x = 1
    for i in range(2, 2 + count):
        x = 3 * x + i
    return x


def test_flag_keeps_its_value(on_gpu):
    nodes = jgc.make_nodes(2, jax.devices()[:1])
    agreed = jgc.on_nodes(lambda x: comm.any_true(x, nodes), nodes, ins=(jgc.LOCAL,), outs=jgc.SHARED)
    for flags in ([False, False], [False, True]):
        assert bool(jax.jit(agreed)(jnp.array(flags))) == any(flags)


def test_buckets_of_a_gpu_hold_whole_matrices(on_gpu):
    f32 = np.dtype("float32")
    leaves = [(i, 2**20, f32) for i in range(10)]  # 4 MB each
    assert buckets(leaves) == [list(range(8)), [8, 9]]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_powersgd_computes_the_same(rank, monkeypatch):
    params = {f"{i}": jnp.zeros(shape) for i, shape in enumerate(SHAPES)}
    nodes, compressor = jgc.make_nodes(2, jax.devices()[:1]), powersgd(rank=rank)
    start = compressor.init(jax.random.key(0), params, nodes)
    steps = [
        {name: np.stack(arrays_of([x.shape] * 2, seed + int(name))) for name, x in params.items()} for seed in (1, 2)
    ]
    steps.insert(1, {**steps[0], "0": steps[0]["0"] * np.nan})  # skipped

    def play():
        step = jax.jit(step_on_nodes(compressor.aggregate, "low rank", nodes))
        state, out = start, []
        for grads in steps:
            *result, info = step(jax.random.key(0), grads, state)
            out.append(result), out.append(info._replace(finite=jnp.float32(info.finite)))
            state = result[1]
        return out

    expected = play()
    for module in MODULES:
        monkeypatch.setattr(module, "backend", lambda: "gpu")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), play(), expected)
