"""Progress of long commands, and what Ctrl-C keeps."""

import pytest

from jgc.lab.shared import progress
from jgc.lab.shared.page import write_page
from jgc.lab.shared.progress import each


@pytest.fixture(autouse=True)
def nothing_cut_short(monkeypatch):
    monkeypatch.setattr(progress, "cut_short", [])

def stopped_at(last):
    def work(x):
        if x == last:
            raise KeyboardInterrupt
        return x * x

    return work


def test_interrupt_keeps_what_is_done(capsys):
    assert each([1, 2, 3, 4], stopped_at(3), lambda x: f"item {x}") == [1, 4]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "[1/4] item 1" and said[1].startswith("[2/4, 0:0") and said[1].endswith("left] item 2")
    assert said[3:] == ["interrupted at item 3: results are of the 2 before it"]


def test_page_says_what_was_cut_short(tmp_path):
    page = tmp_path / "page.md"
    write_page(page, "Title", "a command", "the text")
    assert page.read_text() == "# Title\n\n    a command\n\nthe text"
    each([1, 2, 3, 4], stopped_at(3), lambda x: f"item {x}")
    write_page(page, "Title", "a command", "the text")
    assert "a command\n\nStopped by Ctrl-C at item 3: 2 of 4 are here.\n\nthe text" in page.read_text()


def test_interrupt_before_the_first_result_ends_the_command():
    with pytest.raises(KeyboardInterrupt):
        each([1, 2], stopped_at(1))
