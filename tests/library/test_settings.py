"""Bad settings of every method: one clear line when it is built, with the name, the bad value and good ones."""

import dataclasses
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest

import jgc
from jgc.compress import METHODS
from jgc.method.phases import as_json, in_sequence

NAN = float("nan")
BAD = {
    "alpha": (0.0, -0.1, 1.5, NAN),
    "min_values": (0, -3),
    "momentum": (-0.1, 1.0, NAN),
    "warmup_steps": (-1,),
    "autoencoder_steps": (-1,),
    "residual_decay": (0.0, 1.5, NAN),
    "residual_dtype": ("int8", "float31", "float8_e4m3fn"),
    "algorithm": ("tree",),
    "positions": ("mine",),
    "candidates": (1, -1),
    "leader": ("random",),
    "innovation": (-0.1, 1.1, NAN),
    "innovation_by": ("size",),
    "feedback": ("none",),
    "scale": ("global",),
    "autoencoder_optimizer": ("lion",),
    "autoencoder_loss": ("median",),
    "autoencoder_learning_rate": (0.0, -1.0, NAN),
    "lambda_similarity": (-1.0, NAN),
    "code_dtype": ("int4",),
    "decoder": ("relu", "leaky_relu"),  # the latter is the paper's, with its feedback
    "strategy": ("linear",),
    "value_code": ("3bit", "float64"),
    "clip_norm": (-1.0, NAN),
    "beta": (0.0, 1.5, NAN),
    "threshold": (-0.1, NAN),
    "capacity": (0.0, 1.5, NAN),
    "share": (0.0, 1.5, NAN),
    "refresh": (-1,),
    "decay": (-0.1, 1.0, NAN),
    "max_mode": (0,),
    "selection": ("rows",),
    "chunk": (0,),
    "bits": (0, 1, 9),
    "bucket": (-1,),
    "bins": (1, -1),
    "ratio": (0.5, -1.0, NAN),
    "measure_every": (0, -1),
    "exchange": ("tree",),
    "norm": ("l1",),
    "magnitude": (0.0, -1.0, NAN),
    "clip": (-1.0, NAN),
    "combine": ("mean",),
    "format": ("int8",),
    "rounding": ("up",),
    "hadamard": (-2, 1, 48, 2**17),
    "loss": (-0.1, 1.0, NAN),
    "rank": (-1,),
    "slice_taps": (0,),
    "max_slice": (0,),
    "reuse": (-1,),
    "sampling_steps": (1,),
    "compressed_steps": (0,),
    "samples": (-1, 99),
    "sampling_bits": (-1, 1, 9),
}
# Of a method whose range differs.
BAD_OF = {("gradiveq", "rank"): (-1, 100), ("powersgd", "rank"): (-1, 0)}

# Of a setting that is not in the table, by its type: a new method needs no line here.
BY_TYPE = {"int": (-1,), "float": (-1.0, NAN), "str": ("nothing",)}


def type_of(method: str, field: str) -> str:
    kind = next(f.type for f in dataclasses.fields(METHODS[method].settings) if f.name == field)
    return getattr(kind, "__name__", "str")


def bad_values(method: str, field: str) -> tuple:
    """Values of a setting that must be refused; both of a bool are good."""
    known = BAD_OF.get((method, field), BAD.get(field, ()))
    kind = type_of(method, field)
    return known or (() if kind == "bool" else BY_TYPE.get(kind, BY_TYPE["str"]))


FIELDS = [(name, field.name) for name, method in METHODS.items() for field in dataclasses.fields(method.settings)]


@pytest.mark.parametrize(
    "method, field, value",
    [(m, f, value) for m, f in FIELDS for value in bad_values(m, f)],
)
def test_bad_setting_is_named(method, field, value):
    try:
        jgc.compress.build(METHODS[method].settings(**{field: value}))
        pytest.fail(f"{method} accepts {field}={value!r}: refuse it, or give the method's bad values in BAD_OF")
    except ValueError as error:
        message = str(error)
    assert field in message and str(value) in message
    assert "\n" not in message


@pytest.mark.parametrize("setting", ["factor_masking", "momentum_at_once"])
def test_setting_of_momentum_correction_needs_it(setting):
    with pytest.raises(ValueError, match=f"{setting}=True does nothing without momentum_correction=True"):
        jgc.compress.topk(**{setting: True})
    assert not jgc.compress.dgc(momentum_correction=False).owns_momentum  # masking is on by default there


def test_decay_of_residuals_is_none_of_momentum_correction():
    with pytest.raises(ValueError, match=r"residual_decay=0\.9 needs momentum_correction=False"):
        jgc.compress.dgc(residual_decay=0.9)


@pytest.mark.parametrize("method, field", FIELDS)
def test_every_setting_is_checked_and_has_help(method, field):
    assert bad_values(method, field) or type_of(method, field) == "bool"
    source = "".join(inspect.getsource(x) for x in METHODS[method].settings.__mro__[:-1])
    assert re.search(rf'^    {field}: .*?\n    """', source, re.MULTILINE), (
        f"{field} of {METHODS[method].settings.__name__} has no string under it, which is its --help")


@pytest.mark.parametrize("method", METHODS)
def test_default_settings_are_valid(method):
    compressor = jgc.compress.build(METHODS[method].settings())
    assert compressor.schedule[0].start == 0
    assert hash(tuple(phase.value for phase in compressor.schedule)) is not None


@pytest.mark.parametrize("method", METHODS)
def test_numpys_numbers_are_plain_ones_in_phases(method):
    numbers = {int: np.int64, float: np.float64}
    settings = METHODS[method].settings()
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    values |= {"warmup_steps": 3} if "warmup_steps" in values else {}
    values = {name: numbers.get(type(x), lambda x: x)(x) for name, x in values.items()}
    schedule = jgc.compress.build(type(settings)(**values)).schedule
    json.dumps([as_json(phase) for phase in schedule])  # as jgc.as_arrays writes them


def test_lengths_of_numpy_are_plain_ones_in_phases():
    schedule = in_sequence(("dense", np.int64(3)), ("top-k", np.int64(0)))
    assert [type(phase.start) for phase in schedule] == [int, int] and schedule[1].start == 3


def test_unknown_settings_class_is_an_error_that_lists_known_ones():
    names = ", ".join(method.settings.__name__ for method in METHODS.values())
    with pytest.raises(ValueError, match=f"dict is not the settings class of a method; there are {names}$"):
        jgc.compress.build({})


def test_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="alfa"):
        jgc.compress.topk(alfa=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_setting_without_its_name_is_an_error_that_lists_the_names(method):
    own = METHODS[method].settings
    names = ", ".join(field.name for field in dataclasses.fields(own))
    message = f"expected settings {own.__name__}, or single ones by name ({names}), got 0"
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(jgc.compress, method)(0)  # 0 is false, too


@pytest.mark.parametrize("method", METHODS)
def test_method_has_a_row_in_readme_and_on_the_site(method):
    root = Path(__file__).parents[2]
    pages = [(root / name).read_text().splitlines() for name in ("README.md", "docs/train.md")]
    rows = [sum(line.startswith(f"| `{method}` |") for line in page) for page in pages]
    assert rows == [1, 1], f"README.md and docs/train.md need one row | `{method}` | ... | each, have {rows}"
