"""The rooms of the library: devices stand below methods, and no two files import each other."""

import ast
import re
from pathlib import Path

import pytest

import jgc

ROOT = Path(jgc.__file__).parent
ROOMS = (
    "types.py", "backend.py", "checks", "comm", "nodes", "selection", "layout", "wire", "method", "compress", "loops",
)  # fmt: skip
DEVICE = re.compile(r"\bbackend\(|\bbackend_of\b|\boptimization_barrier\b|\bopaque\b")

def files(*rooms: str) -> list[Path]:
    """The modules of some rooms."""
    paths = [ROOT / room for room in rooms]
    return sorted(p for path in paths for p in ([path] if path.suffix else path.rglob("*.py")))


def test_methods_know_no_devices():
    assert not [p for p in files("method", "compress") if DEVICE.search(p.read_text())]


def test_there_is_one_skeleton():
    assert not [p for p in files(*ROOMS) if re.search(r"\bCore\b", p.read_text())]


def imports(path: Path) -> set[Path]:
    """The modules of jgc that a module imports when it is loaded."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jgc"):
            base = ROOT.parent.joinpath(*node.module.split("."))
            found |= {base.with_suffix(".py")} | {base / f"{alias.name}.py" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {ROOT.parent.joinpath(*a.name.split(".")).with_suffix(".py") for a in node.names}
    return {p for p in found if p.exists()}


@pytest.mark.parametrize("room", ROOMS)
def test_no_two_files_import_each_other(room):
    for path in files(room):
        assert not [other for other in imports(path) if path in imports(other)], path


def test_no_circle_of_imports():
    seen: dict[Path, bool] = {}  # whether a file's imports are done

    def visit(path: Path, above: tuple[Path, ...]):
        assert path not in above, [str(p.relative_to(ROOT)) for p in (*above[above.index(path) :], path)]
        if path not in seen:
            seen[path] = True
            for other in sorted(imports(path)):
                visit(other, (*above, path))

    for path in files(*ROOMS):
        visit(path, ())
