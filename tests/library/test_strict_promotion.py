"""Methods trace where users have `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"`."""

import jax
import pytest
from contract import nodes_of, some_by_default

import jgc
from jgc.compress import METHODS, build

PARAMS = {
    name: jax.ShapeDtypeStruct(shape, "float32")
    for name, shape in {"conv": (3, 3, 8, 16), "kernel": (60, 40), "bias": (16,), "scale": ()}.items()
}


SETTINGS = [
    *(("cast", {"format": name, "rounding": rounding, "exchange": exchange, "hadamard": hadamard})
      for name in ("float8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4")
      for rounding, exchange, hadamard in (("stochastic", "two_shot", 32), ("nearest", "ring", 0))),
    ("qsgd", {"exchange": "two_shot", "norm": "l2", "bucket": 0}),
    ("natural", {"exchange": "two_shot"}),
    ("onebit", {"exchange": "two_shot", "bucket": 64}),
    ("terngrad", {"exchange": "two_shot", "scaler_sharing": False}),
    ("signsgd", {"combine": "feedback"}),
    ("powersgd", {"alternate": True, "rank": 2, "algorithm": "ring"}),
    ("gradiveq", {"algorithm": "ring", "sampling_bits": 0}),
    *(("topk", {"value_code": code, "residual_dtype": "bfloat16", "track_age": True})
      for code in ("float16", "8bit", "1bit", "2bit-codebook", "mxfp8_e4m3", "nvfp4")),
    ("topk", {"selection": "chunks", "alpha": 0.1, "chunk": 64}),
    ("dgc", {"value_code": "mxfp4", "clip_norm": 1.0, "warmup_steps": 8}),
    ("learned_topk", {"value_code": "4bit"}),
    ("egc", {"measure_every": 3, "literal": True, "factor_masking": True}),
    ("scalecom", {"beta": 0.5, "residual_dtype": "bfloat16"}),
]  # fmt: skip


@pytest.mark.parametrize("name, settings", some_by_default(SETTINGS, SETTINGS[4:5]), ids=str)
def test_other_settings_trace_with_strict_promotion(name, settings):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jgc.bytes_per_step(METHODS[name].factory(**settings), PARAMS, nodes_of("1 device"))


@pytest.mark.parametrize("layout", some_by_default(["1 device", "4 devices"], ["4 devices"]))
@pytest.mark.parametrize("name", METHODS)
def test_every_phase_traces_with_strict_promotion(name, layout):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        sent = jgc.bytes_per_step(build(METHODS[name].settings()), PARAMS, nodes_of(layout))
    assert all(of.uncompressed > 0 for of in sent.values())
