"""`jgc.comm.rounded` equals a cast and back, and no method converts to narrower floats without it."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import PARAMS, VARIANTS, compressor_of, nodes_of, some_by_default

import jgc
from jgc import comm
from jgc.comm.jaxprs import called
from jgc.compress import METHODS, step_of_shapes

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
# Settings that round to floats of 8 or 16 bits; with all others only the mean of a leaf in bfloat16 is rounded.
ROUNDING = {
    "cast": {"error_feedback": True},
    "cast/f16": {"format": "float16", "error_feedback": True},
    "cast/fp8": {"format": "float8_e4m3", "error_feedback": True},
    "cast/e5m2 ring": {"format": "float8_e5m2", "scaled": False, "exchange": "ring"},
    "cast/mxfp8": {"format": "mxfp8_e4m3", "rounding": "stochastic", "error_feedback": True},
    "cast/nvfp4": {"format": "nvfp4", "error_feedback": True},
    "topk/f16": {"alpha": 0.1, "value_code": "float16", "momentum_correction": True},
    "topk/bf16": {"alpha": 0.1, "value_code": "bfloat16", "residual_dtype": "bfloat16"},
    "egc/f16": {"value_code": "float16"},
    "lgc_ps/bf16": {"code_dtype": "bfloat16"},
}


def values_around(dtype) -> np.ndarray:
    """f32: random bits, all values of a dtype of 8 or 16 bits, the middle between two, and their neighbours."""
    unsigned = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
    values = np.arange(np.iinfo(unsigned).max + 1).astype(unsigned).view(dtype).astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    with np.errstate(over="ignore"):
        beyond = finite[-1] + (finite[-1] - finite[-2]) / np.float32(2)
        near = np.concatenate([finite, finite[:-1] / 2 + finite[1:] / 2, [beyond, np.inf, -np.inf, np.nan, 3e38]])
        near = near.astype(np.float32)
    random = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([random, near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)]).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
def test_rounded_on_gpu_equals_a_cast_and_back_bit_for_bit(dtype, monkeypatch):
    monkeypatch.setattr("jgc.comm.rounding.backend", lambda: "gpu")
    x = values_around(dtype)
    with jax.numpy_dtype_promotion("strict"):
        on_gpu = np.asarray(jax.jit(lambda x: comm.rounded(x, dtype))(x))
        code = np.asarray(jax.jit(lambda x: comm.rounded(x, dtype).astype(dtype))(x))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype)
    number = ~np.isnan(expected.astype(np.float32))
    assert np.array_equal(np.isnan(on_gpu), ~number) and number.any() and not number.all()
    assert np.array_equal(on_gpu[number].view(np.uint32), expected.astype(np.float32)[number].view(np.uint32))
    assert np.array_equal(code[number].tobytes(), expected[number].tobytes())


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_rounded_elsewhere_is_a_cast_and_back(backend, monkeypatch):
    monkeypatch.setattr("jgc.comm.rounding.backend", lambda: backend)
    assert comm.rounded(jnp.float32([1 / 3, 1e-7]), jnp.float16).tolist() == [0.333251953125, 1.1920928955078125e-07]
    assert comm.rounded(jnp.bfloat16([3]), jnp.float32).dtype == jnp.bfloat16  # no narrower: unchanged


def unrounded(jaxpr) -> Iterator[str]:
    """Conversions to narrower floats whose operand is not a value of the narrower dtype already."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def is_rounded(var) -> bool:
        eqn = None if hasattr(var, "val") else made.get(var)
        if eqn is None:
            return False
        if eqn.primitive.name in ("select_n", "jit", "pjit", "reshape", "squeeze", "broadcast_in_dim"):
            return any(is_rounded(x) for x in eqn.invars)
        return eqn.primitive.name in ("reduce_precision", "bitcast_convert_type")  # the latter: `to_bfloat16`

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            floats = all(jnp.issubdtype(x, jnp.inexact) for x in (old, new))
            if floats and new.itemsize < old.itemsize and not is_rounded(eqn.invars[0]):
                yield f"{old} -> {new}"
        for inner in called(eqn.params):
            yield from unrounded(inner)


def traced_for_gpu(compressor: jgc.Compressor, monkeypatch) -> list:
    """The jaxprs of all phases, as a GPU gets them."""
    monkeypatch.setattr("jgc.backend.backend_of", lambda nodes: "gpu")
    nodes, out = nodes_of("1 device"), []
    for phase in compressor.schedule:
        step, arguments = step_of_shapes(compressor, phase.value, SHAPES, nodes)
        out.append(jax.make_jaxpr(step)(*arguments).jaxpr)
    return out


@pytest.mark.parametrize("name", some_by_default(ROUNDING, ROUNDING.keys() - {"lgc_ps/bf16", "egc/f16"}))
def test_what_is_converted_to_narrower_floats_is_rounded_before(name, monkeypatch):
    method = name.partition("/")[0]
    for jaxpr in traced_for_gpu(getattr(jgc.compress, method)(**ROUNDING[name]), monkeypatch):
        assert list(unrounded(jaxpr)) == []
        assert "reduce_precision" in str(jaxpr)


@pytest.mark.parametrize("name", some_by_default([*METHODS, *VARIANTS], ["dense", "qsgd", "natural", "powersgd"]))
def test_no_method_converts_what_it_has_not_rounded(name, monkeypatch):
    for jaxpr in traced_for_gpu(compressor_of(name), monkeypatch):
        assert list(unrounded(jaxpr)) == []  # the leaf in bfloat16, whatever the method sends


def test_an_unrounded_conversion_is_seen():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(lambda y: x - y.astype(jnp.bfloat16).astype(jnp.float32))(x))(jnp.ones(3))
    assert list(unrounded(jaxpr.jaxpr)) == ["float32 -> bfloat16"]
