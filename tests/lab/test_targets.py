"""Every method and phase, compiled for H100s and TPUs that are not here.

Its collectives are those that it claims, and on H100s it adds up no floats by atomics.

`pytest -m targets`. The compilers are packages (see `jgc plan --target`); without them these tests are skipped.
"""

import functools
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from contract import COLLECTIVES, PARAMS, VARIANTS, compressor_of

import jgc
from jgc.compress import METHODS, step_of_shapes
from jgc.lab.bench.against_pmean import shapes_of
from jgc.lab.bench.network.methods import settings
from jgc.lab.plan.kernels import kernels_of
from jgc.lab.plan.targets import CHIPS, Target, compiled_for, missing_packages, spec_of, stay_on_cpu, target_of
from jgc.lab.shared.hlo import Collective, collectives, parse

pytestmark = pytest.mark.targets

TARGETS = ("h100:8", "v5e:2x4", "v5e:2x4x2slices")
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
TILE = 1024  # values
# The only exceptions from equality, in bytes of one collective's operand: what the transfer between two slices of TPUs
# adds to an all-reduce. The operand is filled up to whole registers of 8 x 128 values of 4 bytes.
FILLED_UP = {("v5e:2x4x2slices", "all-reduce"): 4 * (TILE - 1)}

GPUS = "h100:8"
# Variants with further values that all nodes compute for themselves: codes of values and of positions, thresholds.
CODED = ("learned_topk/coded", "topk/chunks coded", "scalecom/chunks", "egc/old thresholds")
# Operations inside of which XLA's text does not show. cuSOLVER's results are reproducible by default, says NVIDIA of
# cusolverDnSetDeterministicMode.
REPRODUCIBLE = {"cusolver_syevd_ffi"}


def cases(names: tuple[str, ...], targets: tuple[str, ...]) -> list[tuple[str, int, str]]:
    return [(name, i, target) for name in names for i in range(len(compressor_of(name).schedule)) for target in targets]


class Program(NamedTuple):
    """A compiled step: its HLO, and the atomic operations on floats in its kernels, of which a TPU has none."""

    text: str
    float_atomics: tuple[str, ...]


@functools.cache
def devices_of(name: str) -> Target:
    missing = missing_packages(CHIPS[spec_of(name).chip].kind)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    stay_on_cpu()
    return target_of(name)


def compiled(compressor: jgc.Compressor, phase: int, shapes, target: Target) -> tuple[Collective, ...]:
    step, arguments = step_of_shapes(compressor, compressor.schedule[phase].value, shapes, target.nodes())
    return collectives(compiled_for(jax.jit(step, donate_argnums=2).lower(*arguments)))


@functools.cache
def program_of(name: str, phase: int, target: str) -> Program:
    """A method's step for one target; compiled once for all tests, which scope_of in conftest.py keeps together."""
    devices, compressor = devices_of(target), compressor_of(name)
    step, arguments = step_of_shapes(compressor, compressor.schedule[phase].value, SHAPES, devices.nodes())
    lowered = jax.jit(step, donate_argnums=2).lower(*arguments)
    if target != GPUS:
        return Program(compiled_for(lowered).as_text(), ())
    with TemporaryDirectory() as folder:
        text = compiled_for(lowered, {"xla_dump_to": folder}).as_text()
        kernels = [file.read_text() for file in Path(folder).glob("*.ptx")]
    assert any(".entry" in kernel for kernel in kernels)  # else nothing would be looked at
    return Program(text, tuple(found for kernel in kernels for found in float_atomics(kernel)))


def float_atomics(kernels: str) -> list[str]:
    """PTX's atomic operations on floats; of integers, sums and maxima do not depend on the order."""
    found = re.findall(r"\b(?:atom|red)\.[\w.:]+", kernels)
    return [atomic for atomic in found if re.search(r"\.(cas|b?f\d+x?2?)\b", atomic)]


def unordered(text: str) -> list[str]:
    """Scatters of floats that may meet a position twice, and calls of libraries that may do anything."""
    found = []
    for op in (op for ops in parse(text).computations.values() for op in ops.values()):
        if op.opcode in ("scatter", "select-and-scatter") and re.match(r"\(?b?f\d", op.shape):
            found += [] if "unique_indices=true" in op.rest else [op.line]
        if op.opcode == "custom-call" and not any(f'"{name}"' in op.line for name in REPRODUCIBLE):
            found.append(op.line)
    return found


def claimed(compressor: jgc.Compressor, phase: int, shapes, target: Target) -> Counter:
    sums: Counter = Counter()
    for sent in compressor.wire(compressor.schedule[phase].value, shapes, target.nodes()).physical:
        sums[sent.op] += sent.bytes
    return sums


def sums_of(found: tuple[Collective, ...]) -> Counter:
    sums: Counter = Counter()
    for one in found:
        sums[one.op] += one.sent_bytes
    return sums


def id_of(name: str, phase: int, target: str) -> str:
    return f"{name}, {compressor_of(name).schedule[phase].name}, {target}"


def every_case(names: tuple[str, ...], targets: tuple[str, ...]):
    params = [pytest.param(*case, id=id_of(*case)) for case in cases(names, targets)]
    return pytest.mark.parametrize(("name", "phase", "target"), params)


@every_case((*METHODS, *COLLECTIVES), TARGETS)
def test_collectives_of_target_equal_physical_bytes(name, phase, target, record_property):
    devices, compressor = devices_of(target), compressor_of(name)
    found = collectives(program_of(name, phase, target).text)
    sent, expected = sums_of(found), claimed(compressor, phase, SHAPES, devices)
    assert sent.keys() == expected.keys() and "reduce-scatter" not in sent  # see docs/targets.md
    for op, total in sent.items():
        share = Fraction(2 * (devices.nodes().count - 1), devices.nodes().count)  # of an all-reduce's operand
        most = FILLED_UP.get((target, op), 0) * share * sum(one.times for one in found if one.op == op)
        assert expected[op] <= total <= expected[op] + most, op
    assert all(one.between_slices for one in found) == (devices.groups > 1) or not found
    record_property("audited", target)


@every_case((*METHODS, *COLLECTIVES, *CODED), (GPUS,))
def test_equal_values_of_all_nodes_do_not_depend_on_an_order(name, phase, target, record_property):
    """Each GPU computes means, scales, codebooks, weights and thresholds for itself: atomics would make them differ."""
    program = program_of(name, phase, target)
    assert not unordered(program.text)
    assert not program.float_atomics
    record_property("audited", target)


def test_atomics_and_repeated_positions_are_noticed():
    nodes = devices_of(GPUS).nodes()
    x = jax.ShapeDtypeStruct((99,), jnp.float32, sharding=jax.NamedSharding(nodes.mesh, jax.P()))
    at = jax.ShapeDtypeStruct((99,), jnp.int32, sharding=jax.NamedSharding(nodes.mesh, jax.P()))
    with TemporaryDirectory() as folder:
        lowered = jax.jit(lambda x, at: jax.ops.segment_sum(x, at, 9)).lower(x, at)
        program = compiled_for(lowered, {"xla_dump_to": folder})
        kernels = "".join(file.read_text() for file in Path(folder).glob("*.ptx"))
    assert len(unordered(program.as_text())) == len(float_atomics(kernels)) == 1
    atomics = "red.global.add.f32 atom.add.noftz.f16x2 atom.global.add.u32 red.global.max.s32 atom.sys.global.cas.b32"
    assert len(float_atomics(atomics)) == 3


@pytest.mark.parametrize("name", ["cast", "natural", "onebit", "terngrad", "qsgd", "signsgd"])
def test_codes_of_many_values_are_gathered_and_decoded_in_tiles(name, record_property):
    shapes = {"a": jax.ShapeDtypeStruct((1000, 700), jnp.float32), "b": jax.ShapeDtypeStruct((350_107,), jnp.float32)}
    devices, compressor = devices_of("v5e:2x4"), getattr(jgc.compress, name)()
    step, arguments = step_of_shapes(compressor, compressor.schedule[0].value, shapes, devices.nodes())
    program = compiled_for(jax.jit(step, donate_argnums=2).lower(*arguments))
    assert sums_of(collectives(program)) == claimed(compressor, 0, shapes, devices)
    gradient, message = 4 * 1_050_107, max(one.payload_bytes for one in collectives(program))
    assert program.memory_analysis().temp_size_in_bytes < 4 * gradient + 8 * message  # not 8 decoded gradients
    record_property("audited", "v5e:2x4")


@pytest.mark.parametrize(
    ("options", "most"), [({}, 120), ({"selection": "chunks"}, 95), ({"alpha": 0.01}, 145)], ids=str
)
def test_top_k_on_a_gpu_is_few_kernels_and_asks_the_host_nothing(options, most, record_property):
    """Nor does it call XLA's TopK, which leaves NaN out. 51 leaves; flags and norms are counted, too."""
    compressor, nodes = jgc.compress.topk(**options), devices_of("h100:1").nodes()
    step, arguments = step_of_shapes(compressor, compressor.schedule[-1].value, shapes_of("gpt25m"), nodes)
    program = compiled_for(jax.jit(step, donate_argnums=2).lower(*arguments))
    kernels = kernels_of(program)
    assert kernels.is_complete and kernels.host_copies == 0 and kernels.launches <= most
    assert "topk" not in program.as_text().lower().replace("topk.py", "") and " sort(" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * 4 * 25_338_368  # v; nothing else of its size
    record_property("audited", "h100:1")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["dense", "cast"])
def test_messages_of_16_bits_stay_16_bits_wide(name, target, record_property):
    shapes = {"kernel": jax.ShapeDtypeStruct((96, 130), jnp.bfloat16 if name == "dense" else jnp.float32)}
    compressor = jgc.compress.dense() if name == "dense" else jgc.compress.cast(format="bfloat16")
    found = [one for one in compiled(compressor, 0, shapes, devices_of(target)) if one.dtype != "s32"]  # the flag
    assert {one.dtype for one in found} <= {"bf16", "f16", "u16", "u32"}
    size = 2 * 96 * 130
    assert size <= sum(one.payload_bytes for one in found) < size + 4 * TILE  # words of two values have 32 bits
    record_property("audited", target)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16, jnp.bfloat16])
@pytest.mark.parametrize("target", TARGETS)
def test_sums_of_narrow_numbers_stay_narrow(dtype, target, record_property):
    """XLA for GPU adds integers of 16 bits as 32; for TPU it fills up few of them, and matrices of odd columns."""
    nodes = devices_of(target).nodes()
    step = jgc.on_nodes(lambda x: jgc.comm.psum(2 * x, nodes, "sum"), nodes, ins=(jgc.LOCAL,), outs=jgc.SHARED)
    x = jax.ShapeDtypeStruct((nodes.count, 96, 65), dtype, sharding=jax.NamedSharding(nodes.mesh, jax.P(nodes.slow)))
    (found,) = collectives(compiled_for(jax.jit(step).lower(x)))
    size = dtype.dtype.itemsize * 96 * 65
    assert found.op == "all-reduce" and size <= found.payload_bytes <= size + 2 + FILLED_UP.get((target, found.op), 0)
    record_property("audited", target)


@pytest.mark.parametrize("words", [2, 11, 129, 11_530])  # of a single word, TPUs send 2 (n - 1)/n, not n - 1
@pytest.mark.parametrize("target", TARGETS)
def test_gathers_of_any_length_stay_gathers(words, target, record_property):
    """On TPU, XLA makes an all-reduce of a gather whose rows are no whole tiles, unless something keeps the rows."""
    devices = devices_of(target)
    nodes = devices.nodes()

    def one(x):  # x: u32[words] of a node, computed and used as methods do: joined, gathered, cut, scattered
        mine = jnp.concatenate([x[: words // 2] ^ 1, jnp.cumsum(x[words // 2 :])])
        whole = jgc.comm.all_gather(mine, nodes, "words")
        return jnp.zeros((words,), jnp.uint32).at[whole[:, : words // 2 + 1].reshape(-1) % words].add(whole[0, -1])

    step = jgc.on_nodes(one, nodes, ins=(jgc.LOCAL,), outs=jgc.SHARED)
    sharding = jax.NamedSharding(nodes.mesh, jax.P(nodes.slow))
    x = jax.ShapeDtypeStruct((nodes.count, words), jnp.uint32, sharding=sharding)
    (found,) = collectives(compiled_for(jax.jit(step).lower(x)))
    assert (found.op, found.sent_bytes) == ("all-gather", 4 * words * (nodes.count - 1))
    record_property("audited", target)


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
def test_nodes_of_a_device_are_computed_together(target, record_property):
    """Two nodes a device: one convolution of both, where a CPU has one for each node."""
    nodes = jgc.make_nodes(16, devices_of(target).devices)

    def loss(w, x):
        return jnp.mean(jax.lax.conv(x, w, (1, 1), "SAME") ** 2)

    sharding = jax.NamedSharding(nodes.mesh, jax.P(nodes.slow))
    w = jax.ShapeDtypeStruct((8, 8, 3, 3), jnp.float32, sharding=jax.NamedSharding(nodes.mesh, jax.P()))
    x = jax.ShapeDtypeStruct((16, 4, 8, 16, 16), jnp.float32, sharding=sharding)
    convolutions = {}
    for unroll in (None, False, True):
        text = compiled_for(jax.jit(jgc.node_grads(loss, nodes, unroll=unroll)).lower(w, x)).as_text()
        convolutions[unroll] = len(re.findall(r" convolution\(|cudnn\$conv", text))
    assert convolutions[None] == convolutions[False] < convolutions[True]
    record_property("audited", target)


@pytest.mark.parametrize(("shape", "dtype", "op", "share"), [
    ((2**20,), jnp.float32, "all-reduce", 2), ((8000,), jnp.int32, "all-reduce", 2),
    ((2**20,), jnp.bfloat16, "all-reduce", 2), ((65536, 128), jnp.float32, "reduce-scatter", 1),
])  # fmt: skip
def test_reduce_scatter_of_a_flat_vector_is_an_all_reduce_on_tpu(shape, dtype, op, share, record_property):
    """As docs/targets.md says; so no method of jgc's has a reduce-scatter."""
    nodes = devices_of("v5e:2x4").nodes()
    scatter = jax.shard_map(
        lambda x: jax.lax.psum_scatter(2 * x[0], nodes.slow, tiled=True),
        mesh=nodes.mesh, in_specs=jax.P(nodes.slow), out_specs=jax.P(nodes.slow),
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((8, *shape), dtype, sharding=jax.NamedSharding(nodes.mesh, jax.P(nodes.slow)))
    (found,) = collectives(compiled_for(jax.jit(scatter).lower(x)))
    assert (found.op, found.sent_bytes) == (op, share * Fraction(7, 8) * x.size // 8 * dtype.dtype.itemsize)
    record_property("audited", "v5e:2x4")


@pytest.mark.parametrize("format", ["bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
def test_rounding_is_kept(format, record_property):
    """XLA for GPU removes f32 -> f16 -> f32 and the like; the residual would be computed from unrounded values."""
    devices = devices_of("h100:1")
    compressor = jgc.compress.cast(format=format, scaled=False, error_feedback=True)
    shapes = {"a": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    step, arguments = step_of_shapes(compressor, compressor.schedule[0].value, shapes, devices.nodes())
    text = compiled_for(jax.jit(step).lower(*arguments)).as_text()
    assert re.search(r"= f32\[4096\]\S* reduce-precision\(", text)
    record_property("audited", "h100:1")


@pytest.mark.parametrize(("count", "devices_per_node"), [(2, 8), (16, 1), (4, 4), (2, 1), (8, 1)])
def test_make_nodes_on_two_slices(count, devices_per_node):
    devices = devices_of("v5e:2x4x2slices").devices
    nodes = jgc.make_nodes(count, devices[::-1], devices_per_node)
    slices = [device.slice_index for device in nodes.mesh.devices.flat]
    used = count * devices_per_node
    assert nodes.count == count and slices == [0] * (used // 2) + [1] * (used // 2)
    assert len(set(nodes.mesh.devices.flat)) == used


# on 25.3M values in 51 leaves; leaf by leaf they would be 123, 151, 79, 153, 277 and 391 kernels
@pytest.mark.parametrize(("name", "target", "most"), [
    ("dense", "h100:1", 14), ("dense", "h100:8", 26), ("cast", "h100:1", 16), ("qsgd", "h100:1", 92),
    ("powersgd", "h100:1", 60), ("powersgd:rank=4", "h100:1", 110),
])  # fmt: skip
def test_step_on_a_gpu_has_few_kernels(name, target, most, record_property):
    devices, compressor = devices_of(target), jgc.compress.build(settings(name))
    step, arguments = step_of_shapes(compressor, compressor.schedule[-1].value, shapes_of("gpt25m"), devices.nodes())
    kernels = kernels_of(compiled_for(jax.jit(step, donate_argnums=2).lower(*arguments)))
    assert kernels.launches <= most and kernels.host_copies == 0
    record_property("audited", target)


def test_all_variants_named_here_exist():
    assert set(CODED) <= set(VARIANTS)
