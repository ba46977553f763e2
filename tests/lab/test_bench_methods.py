"""`jgc bench methods`: which parts are timed, what is counted, and how it is shown."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_helpers import wide_model

from jgc.compress import METHODS, build
from jgc.lab.bench import against_pmean, costs as pages, methods
from jgc.lab.bench.costs import AGGREGATE, BEFORE, OPTIMIZER, UPDATE, Costs, Row
from jgc.lab.shared.timing import rounds
from jgc.nodes.layouts import make_nodes
from jgc.training.errors import UserError
from jgc.training.settings import workloads

PARAMS = {"a": jnp.zeros((30, 4)), "b": jnp.zeros(7)}


@pytest.fixture(scope="module")
def costs():
    """Of three methods, on a model that compiles in a moment. ScaleCom has one phase and no parts."""
    return measured(["topk", "scalecom"])


def measured(names):
    digits = workloads.WORKLOADS["digits_convnet5"]
    short = {"scalecom": {"warmup_steps": 0}}
    tiny = dataclasses.replace(digits, batch_size=4, methods=short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "WORKLOADS", {"tiny": tiny})
        patch.setattr("jgc.training.run.setup.make_model", wide_model)
        return methods.measure("tiny", 2, 1, names, 0.01)


@pytest.mark.slow
def test_every_phase_has_a_row(costs):
    assert [(row.method, row.phase) for row in costs.rows] == [
        ("dense", "dense"), ("topk", "dense"), ("topk", "top-k"), ("scalecom", "top-k")]  # fmt: skip


@pytest.mark.slow
def test_only_composed_methods_have_parts(costs):
    for row in costs.rows:
        assert set(row.seconds) - {BEFORE} == {UPDATE, AGGREGATE, OPTIMIZER}
        assert (BEFORE in row.seconds) == (row.method != "scalecom")
        assert all(times.shape == (1,) and times > 0 for times in row.seconds.values())


@pytest.mark.slow
def test_calls_do_not_recompile(costs):
    """Otherwise the first round, which is counted, takes as long as compiling: seconds."""
    assert max(float(times[0]) for row in costs.rows for times in row.seconds.values()) < 1


@pytest.mark.slow
def test_bytes_of_whole_model(costs):
    n = costs.values
    assert n == 64 * 2000 + 2000 + 2000 * 10 + 10
    by_phase = {(row.method, row.phase): row.up for row in costs.rows}
    assert by_phase["dense", "dense"] == (4 * n, 4 * n)
    worker, leader = by_phase["topk", "top-k"]
    assert worker == leader == pytest.approx(0.01 * n * (4 + 8.56 / 8), rel=0.01)  # 8.56 bits for a position at 1 %
    everything, (worker, leader) = leader, by_phase["scalecom", "top-k"]
    assert leader == everything and worker == pytest.approx(0.01 * n * 4, rel=0.01)  # only the leader sends positions


@pytest.mark.slow
def test_page_has_dash_for_missing_part(costs):
    page = pages.markdown(costs, "a machine")
    times, sent = page.split("## Bytes")
    (line,) = [line for line in times.splitlines() if line.startswith("| scalecom | top-k")]
    assert line.split(" | ")[6:8] == ["-", "-"] and "±" not in line
    (line,) = [line for line in times.splitlines() if line.startswith("| dense | dense")]
    assert line.split(" | ")[4] == "1.000" and "-" not in line.split(" | ")
    assert "| topk | 0 | 4 |" in sent and "| dense | 0 | 0 |" in sent


@pytest.mark.parametrize(("name", "settings", "held"), [
    ("dense", {}, (0, 0)), ("topk", {}, (0, 4)), ("topk", {"residual_dtype": "bfloat16"}, (0, 2)),
    ("dgc", {"momentum_correction": True}, (0, 8)), ("onebit", {}, (0, 4)), ("scalecom", {}, (4 / 127, 4))])
@pytest.mark.parametrize("nodes", [1, 4])
def test_bytes_held_by_hand(name, settings, held, nodes):
    compressor = build(METHODS[name].settings(**settings))
    assert methods.bytes_held(compressor, PARAMS, make_nodes(nodes, jax.devices()[:1])) == pytest.approx(held)


def test_ratios_pair_rounds():
    """A machine that slows down in the second round slows down all alike."""
    slow = np.array([1.0, 2.0])
    dense = Row("dense", "dense", {UPDATE: slow, AGGREGATE: slow, OPTIMIZER: slow}, (4.0, 4.0))
    other = Row("topk", "top-k", {UPDATE: 3 * slow, AGGREGATE: 3 * slow, BEFORE: slow, OPTIMIZER: slow}, (0.0, 0.0))
    costs = Costs("w", 2, 2, 1, slow, (dense, other), {})
    assert pages.time_cells(other, costs) == [
        "topk", "top-k", "4500.00 ± 750.00", "6000.00 ± 1000.00", "2.000 ± 0.000", "4500.00 ± 750.00",
        "1500.00 ± 250.00", "3000.00 ± 500.00", "1500.00 ± 250.00"]  # fmt: skip
    assert pages.bytes_cells(other, costs)[2:] == ["0", "sends nothing"] * 2


def test_time_against_pmean_has_three_digits():
    row = against_pmean.Row("topk", "top-k", np.array([0.001234]), np.array([0.0000567]), 1.0, 0)
    assert against_pmean.cells(row, 4)[2:4] == ["1.23", "0.0567"]


def test_first_round_is_not_counted():
    calls: list[str] = []
    seconds = rounds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4 and {name: times.shape for name, times in seconds.items()} == {"a": (3,), "b": (3,)}


def test_configure_every_method():
    assert [method.name for method in methods.chosen([])] == list(METHODS)
    for method in METHODS.values():
        config = methods.configured(method, "cifar10_resnet20", 8, 0.25)
        assert config.layers.dense == config.layers.top_k == ""
        assert getattr(config.compressor, "alpha", 0.25) == 0.25


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "gpt25m", "nodes": 4}, "--nodes does not go with --model"),
        ({"model": "gpt25m", "alpha": 0.1}, "--alpha does not go with --model"),
        ({"devices": 4}, "--devices needs --model"),
        ({"model": "gpt800k", "devices": 0}, "the number of devices must be at least 1, got 0"),
        ({"methods": ("qsgd",), "alpha": 0.1}, "--alpha 0.1: none of qsgd has it"),
        ({"methods": ("topk",), "alpha": 7.0}, "alpha must be in (0, 1]"),
        ({"model": "gpt800k", "methods": ("powersgd:rank=0",)}, "rank must be at least 1, got 0"),
        ({"model": "gpt800k", "methods": ("lgc_ps:phase=top-k",)}, "phase= is for `bench network`"),
        ({"model": "gpt800k", "methods": ("diloco:every=30",)}, "has local steps, which `bench network` measures"),
    ],
)
def test_options_that_do_nothing_and_bad_settings_are_one_line(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        methods.Methods(**options).run("")


def test_wrong_values():
    with pytest.raises(UserError, match="unknown method 'topp'; did you mean topk"):
        methods.chosen(["topp"])
    with pytest.raises(UserError, match="3 nodes do not divide a batch of 128"):
        methods.configured(METHODS["topk"], "digits_convnet5", 3, None)
