"""Words to avoid in names, settings, messages and pages, each with its replacement."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from word_rates import parsed

ROOT = Path(__file__).parents[2]
FILES = [*(file for name in ("jgc", "experiments", "configs") for file in sorted((ROOT / name).rglob("*.py"))),
         ROOT / "train.py"]  # fmt: skip
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

NAMES = {  # a part of a name between underscores, or of a CamelCase name
    "absorb": "accumulate", "absorbed": "accumulated", "offer": "compensate", "keep": "update", "keeps": "conserves",
    "takein": "update", "remembering": "error_feedback", "seen": "measured", "watch": "diagnostics",
    "around": "ring", "alone": "local_copies", "kind": "placement, field or variant", "idx": "position",
}  # fmt: skip
PHRASES = {  # in strings, docstrings and pages
    r"ke(ep|eps|pt) back": "the residual",
    r"\babsorb": "accumulate",
    r"\bwhat \w+ \w+ is what\b": "a short main clause",
    r"\bsparse_gd\b": "topk",
    r"goes? through it\b": "propagates",
}


def names_of(path: Path) -> Iterator[tuple[int, str]]:
    """Public names by line: all of the library; of train.py and the commands settings, fields with a help text."""
    application = bool({"training", "lab", "configs", "experiments"} & set(path.relative_to(ROOT).parts))
    for node in parsed(path):
        if isinstance(node, ast.ClassDef):
            for x, after in zip(node.body, [*node.body[1:], None], strict=True):
                has_help = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name) and (has_help or not application):
                    yield x.lineno, x.target.id
        if application or (getattr(node, "name", None) or "_").startswith("_"):  # a handler may have none
            continue
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef):
            yield from ((x.lineno, x.arg) for x in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def parts_of(name: str) -> list[str]:
    """The words of a name.

    >>> parts_of("encode_and_keep"), parts_of("TopK")
    (['encode', 'and', 'keep'], ['top', 'k'])
    """
    return [part.lower() for part in re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", name)]


def given_up(name: str) -> str:
    """The replacement for a word in the name; "" if there is none."""
    return next((NAMES[part] for part in parts_of(name) if part in NAMES), "")


@pytest.mark.parametrize("name, bad", [("encode_and_keep", True), ("WatchMe", True), ("TopK", False)])
def test_names_are_split_at_words(name, bad):
    assert bool(given_up(name)) == bad


def test_public_names_and_settings():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: say {given_up(name)}"
        for path in FILES for line, name in names_of(path) if given_up(name)
    ]  # fmt: skip
    assert not found, "\n".join(found)


def test_messages_and_docstrings():
    found = []
    for path in FILES:
        strings = (x for x in parsed(path) if isinstance(x, ast.Constant))
        for node in strings:
            text = " ".join(node.value.split()) if isinstance(node.value, str) else ""
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {m[0]!r}: say {word}"
                      for pattern, word in PHRASES.items() if (m := re.search(pattern, text))]  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages(page):
    text = " ".join(page.read_text().split())
    found = [f"{m[0]!r}: say {word}" for pattern, word in PHRASES.items() if (m := re.search(pattern, text))]
    assert not found, "\n".join(found)
