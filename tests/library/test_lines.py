"""Lines of at most 100 columns in the rooms that have them; the linter still allows 120 elsewhere."""

from pathlib import Path

import jgc

COLUMNS = 100
# folders of jgc/, or files
ROOMS = (
    "checks", "comm", "compress/lgc", "compress/low_rank", "compress/sparse", "layout", "loops",
    "method", "nodes", "selection", "types.py", "backend.py",
)  # fmt: skip


def test_rooms_keep_to_100_columns():
    library = Path(jgc.__file__).parent
    long = []
    for room in ROOMS:
        path = library / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            lines = enumerate(file.read_text().splitlines(), 1)
            long += [f"{file.relative_to(library)}:{i}" for i, line in lines if len(line) > COLUMNS]
    assert not long
