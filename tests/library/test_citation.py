"""Every method can be cited."""

import re
from pathlib import Path

import pytest

import jgc
from jgc.citation import PAPERS

FIELD = re.compile(r"\s*(\w+) = \{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\},\n")  # braces nest twice


def entries(text: str) -> dict[str, dict[str, str]]:
    """The fields of each BibTeX entry by its key. Fails on anything else in the text."""
    found = {}
    while text:
        head = re.match(r"@(?:article|inproceedings|misc|software)\{(\w+),\n", text)
        assert head, text
        text, fields = text[head.end() :], {}
        while field := FIELD.match(text):
            fields[field[1]] = " ".join(field[2].split())
            text = text[field.end() :]
        assert text.startswith("}"), text
        found[head[1]] = fields
        text = text[1:].lstrip("\n")
    return found


@pytest.mark.parametrize("method", ["", *jgc.compress.METHODS])
def test_citation_parses(method):
    if method:
        missing = set(jgc.compress.METHODS[method].citation) - entries(PAPERS.read_text()).keys()
        assert not missing, f"jgc/compress/papers.bib has no entry {', '.join(missing)}"
    found = entries(jgc.citation(method))
    assert found
    for key, fields in found.items():
        assert {"title", "author", "year"} <= fields.keys(), key
        assert re.fullmatch(r"(19|20)\d\d", fields["year"])


@pytest.mark.parametrize("name, method", jgc.compress.METHODS.items())
def test_citation_is_of_the_papers_that_the_table_names(name, method):
    """"Strom 2015; Stich et al. 2018": an entry for each, with that first author and year."""
    own = entries(jgc.citation(name))
    named = re.findall(r"([A-Z]\w+)[^;]*? (\d{4})(?:, (\d{4}))?", method.paper)
    years = sum(1 for _, *found in named for year in found if year)
    assert len(own) == (years if method.citation else 1)
    for author, *found in named:
        for year in filter(None, found):
            assert any(key.startswith(author.lower()) and fields["year"] == year for key, fields in own.items()), (
                f"METHOD of {name} names {author} {year}: give citation=(key,), with an entry of that author and year "
                f"in jgc/compress/papers.bib whose key begins with {author.lower()}")


def test_two_methods_of_a_paper_cite_it_alike():
    found: dict[str, dict[str, str]] = {}
    for name in jgc.compress.METHODS:
        for key, fields in entries(jgc.citation(name)).items():
            assert found.setdefault(key, fields) == fields


def test_unknown_method_is_an_error_that_lists_known_ones():
    with pytest.raises(ValueError, match="no method is called 'lgc'; there are dense, lgc_ring, lgc_ps"):
        jgc.citation("lgc")


def test_citation_file_has_this_version():
    text = (Path(__file__).parents[2] / "CITATION.cff").read_text()
    assert f"\nversion: {jgc.__version__}\n" in text
