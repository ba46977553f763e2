"""`experiments sharded`: the memory that compression takes where parameters are sharded within a node."""

import jax
import pytest

from experiments.sharded import Row, Sharded, Shards, case_of, compression, markdown, measure, temporary
from jgc import compress
from jgc.training.errors import UserError


@pytest.fixture(scope="module")
def case():
    """25M parameters on 2 nodes of 4 devices."""
    return case_of("gpt25m", 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "topk", "dgc", "qsgd", "powersgd", "ef21", "scalecom"])
def test_compression_needs_at_most_one_and_a_half_gradient_shards(case, name):
    shard = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(case.params))
    assert sum(x.nbytes for x in jax.tree.leaves(case.params)) > 3.99 * shard  # they are divided
    program = compression(case, compress.METHODS[name].factory())[1]
    assert 0 < temporary(program) <= 1.505 * shard  # qsgd has 1.5004


@pytest.mark.slow
def test_every_method_has_a_row_and_whole_steps_are_compiled():
    found = measure("gpt800k", 2, 2, 1, ["topk", "powersgd:rank=2"])
    assert [row.method for row in found.rows] == ["plain pmean", "topk", "powersgd:rank=2"]
    assert all(row.temporary > 0 and row.ratio > 0 for row in found.rows)
    assert "`gpt800k`, 828,544 parameters, 2 nodes of 2 devices" in markdown(found, "a machine")


def test_ratio_is_the_median_of_the_repeats():
    row = Row("topk", 3_000_000, (4.0, 6.0, 2.0), (2.0, 2.0, 2.0))
    page = markdown(Sharded("gpt", 10, 2_000_000, 2, 4, (row,)), "a machine")
    assert row.ratio == 2 and "| topk | 3 | 1.50 | 4.0 | 2.00 |" in page


def test_unusable_options_are_one_line():
    with pytest.raises(UserError, match="--shards must be at least 2, got 1"):
        Shards(shards=1).run("")
    with pytest.raises(UserError, match="--model must be a model of text, such as gpt25m, got resnet20"):
        case_of("resnet20", 2, 4)
    with pytest.raises(UserError, match="asked for 12 devices; there are 8"):
        case_of("gpt25m", 3, 4)
