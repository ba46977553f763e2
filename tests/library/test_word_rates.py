"""How often words that make English sound translated stand in the library and on the pages."""

from pathlib import Path

import pytest
from word_rates import ROOT, WORDS, count, prose_of_checkout, prose_of_module, prose_of_page, rates

LIMITS = {  # per 100 kB: library, commands, docs. The goal is 1, 1 and 2 for every word; lower them, never raise them
    "own": (1, 1, 1),
    "in place of": (1, 1, 1),
    "beside": (1, 1, 1),
    "alone": (1, 1, 1),
    "another": (1, 1, 1),
    "those of": (1, 1, 1),
    "what is sent": (1, 1, 1),
    "as ever": (1, 1, 1),
    "so many": (1, 1, 1),
    "for (because)": (1, 1, 1),
    "that there are not": (1, 1, 1),
    "used up": (1, 1, 1),
}
BAD = {
    "own": "a state of its own",
    "in place of": "zeros in place of values",
    "beside": "accuracy beside the baseline",
    "alone": "from shapes alone",
    "another": "on another host",
    "those of": "beyond those of DGC",
    "what is sent": "what is sent stays small",
    "as ever": "logical bytes as ever",
    "so many": "after so many steps",
    "for (because)": "refuses, for its phases are of whole vectors; an error, for nobody would know",
    "that there are not": "methods that there are not",
    "used up": "arrays that are used up",
}
GOOD = ["methods, for layers that are linear", "one after another", "besides", "owner", "for each, for all"]


@pytest.mark.parametrize("column, part", [*enumerate(["library", "commands", "docs"])])
def test_rates_are_within_limits(column, part):
    measured = rates(prose_of_checkout(ROOT)[part])
    high = {word: round(rate, 2) for word, rate in measured.items() if rate > LIMITS[word][column]}
    assert not high, f"per 100 kB of {part}: {high}"


def test_each_pattern_finds_its_word_and_no_other():
    assert WORDS.keys() == LIMITS.keys() == BAD.keys()
    for word, text in BAD.items():
        assert count(word, text), word
    for text in GOOD:
        assert not [word for word in WORDS if count(word, text)], text


def test_code_titles_and_doctests_are_left_out(tmp_path: Path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    code = "`own` its\n\n    its own code\n\n```\nits own\n```\n"
    page.write_text(f'{code} (Yu 2018, "Their own title") Your own loop\n')
    module.write_text('own = 1\n"""Text.\n\n>>> "its own"\n"""\nx = "message"  # a comment of its own\n')
    assert count("own", prose_of_page(page)) == 0 and count("own", prose_of_module(module)) == 1
