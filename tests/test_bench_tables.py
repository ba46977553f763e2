"""The tables of `jgc bench bytes` and `jgc bench step` beside the paper's."""

import pytest

from jgc.bench import message_sizes, step_time
from jgc.compress import METHODS


@pytest.fixture(scope="module")
def measured():
    return message_sizes.measure("cifar10_resnet50", 0.001, "imagenet", 1000)


def test_the_papers_model_has_the_papers_size(measured):
    _, rows = measured
    assert {row.method for row in rows} == set(METHODS)
    assert {row.dense for row in rows} == {4 * 25_557_032.0}  # Table VI: 102.2 MB


def test_bytes_are_those_of_what_is_sent(measured):
    by_name = {row.method: row.up for row in measured[1]}
    assert by_name["dense"] == {"worker": {"dense": 4 * 25_557_032.0}}
    topk, lgc = by_name["topk"]["worker"], by_name["lgc_ps"]
    assert topk["values"] == pytest.approx(4 * 0.001 * 25.5e6, rel=0.01)
    assert topk["dense"] == 4 * 7 * 7 * 3 * 64  # the first layer
    assert set(lgc["leader"]) - set(lgc["worker"]) == {"signs", "code"}
    assert lgc["leader"]["positions"] == topk["positions"]


def test_the_paper_stands_beside_ours(measured):
    config, rows = measured
    page = message_sizes.markdown(config, rows, 0.001)
    assert "25,557,032 parameters (102.2 MB), 2 nodes" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| lgc_ps")]
    assert "5,709x / 8,616x" in line


def test_table_v_is_in_multiples_of_each_ones_own_dense_step():
    row = step_time.Row("lgc_ps", "top-k", 0.1, 0.4, 2.0)
    page = step_time.markdown(step_time.StepTimes("w", 8, 0.3, (row,), {}), "a machine")
    (line,) = [line for line in page.splitlines() if line.startswith("| lgc_ps | top-k | 0.400")]
    assert line == "| lgc_ps | top-k | 0.400 | 1.6 | 2.00 | 1.60 |"
