"""Progress of long commands, and what Ctrl-C keeps."""

import pytest

from jgc.lab.shared.progress import each


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
    assert said[3:] == ["interrupted at item 3: the results are those of the 2 before it"]


def test_interrupt_before_the_first_result_ends_the_command():
    with pytest.raises(KeyboardInterrupt):
        each([1, 2], stopped_at(1))
