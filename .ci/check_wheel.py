"""Check a built wheel: the library, train.py's application and the commands, and nothing else.

    python .ci/check_wheel.py dist/jgc-0.1.0-py3-none-any.whl
"""

import sys
import zipfile
from pathlib import Path, PurePosixPath

LINES = 46_000
"""Python lines at most: what there is, so that growth is noticed. The aim is 25,000."""


def main(path: Path) -> None:
    """Print the lines by part; an error if something is missing, superfluous or too long."""
    lines: dict[str, int] = {}
    with zipfile.ZipFile(path) as wheel:
        names = [PurePosixPath(name) for name in wheel.namelist()]
        inside = [name for name in names if name.parts[0] == "jgc"]
        for name in inside:
            if name.suffix == ".py":
                part = name.parts[1] if name.parts[1] in ("lab", "training") else "library"
                lines[part] = lines.get(part, 0) + wheel.read(str(name)).count(b"\n")
        entry_points = [wheel.read(str(name)).decode() for name in names if name.name == "entry_points.txt"]
    sys.stdout.write(", ".join(f"{part} {count:,}" for part, count in lines.items()) + f": {sum(lines.values()):,}\n")
    others = {name.parts[0] for name in names if name.parts[0] != "jgc" and not name.parts[0].endswith(".dist-info")}
    assert not others, f"{path.name} also holds {', '.join(sorted(others))}"
    tree = {str(file) for file in Path("jgc").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    differ = tree ^ {str(name) for name in inside}
    assert not differ, f"jgc/ and {path.name} differ in {sorted(differ)}"
    assert "jgc = jgc.__main__:main" in "".join(entry_points), f"{path.name} has no console script jgc"
    assert sum(lines.values()) <= LINES, f"{path.name} has {sum(lines.values()):,} lines, at most {LINES:,} are allowed"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
