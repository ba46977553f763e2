"""Lines of at most 100 columns in the library; the linter allows 120 in training and lab."""

from pathlib import Path

import jgc

COLUMNS = 100
OTHERS = ("lab", "training")


def test_the_library_keeps_to_100_columns():
    library = Path(jgc.__file__).parent
    long = []
    for file in sorted(library.rglob("*.py")):
        if file.relative_to(library).parts[0] not in OTHERS:
            lines = enumerate(file.read_text().splitlines(), 1)
            long += [f"{file.relative_to(library)}:{i}" for i, x in lines if len(x) > COLUMNS]
    assert not long
