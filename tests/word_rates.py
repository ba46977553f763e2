"""How often words that make English sound translated stand in jgc, per 100 kB, next to optax and diffrax.

    python tests/word_rates.py                 # this checkout
    python tests/word_rates.py FOLDER          # a different one
    python tests/word_rates.py . own beside    # also where these words stand

Searched are docstrings, comments and messages, without code in backticks, doctests and BibTeX, and the pages without
code and the targets of links. Titles of papers in quotes do not count, nor does the title of the page "Your own loop".
A rate is per 100,000 bytes of the files, code included.
"""

import ast
import gc
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
APPLICATION = ("lab", "training")
_VERB = r"(?:is|are|was|were|has|have|had|does|do|did|would|could|can|cannot|must|may|will)\b"
WORDS = {  # a name for the table, and its pattern
    "own": r"(?<=\s)own\b",
    "in place of": r"\b(?:in|takes?|took) (?:the )?place of\b",
    "beside": r"\bbeside\b",
    "alone": r"\balone\b",
    "another": r"(?<!\bone )(?<!\bone after )\banother\b",
    "those of": r"\bthose of\b",
    "what is sent": r"\bwhat is sent\b",
    "as ever": r"\bas ever\b",
    "so many": r"\bso many\b",
    "for (because)": rf"[,;:] for (?:(?!that|which|who|what|where|when)\w+ ){{1,3}}{_VERB}",
    "that there are not": r"\bthat there (?:is|are) not\b",
    "used up": r"\bused up\b",
}
_TITLE = r"\b\d{4}[a-z]?\)?[,:]? [\"“][^\"”]+[\"”]|[Yy]our own loop"


def parsed(path: Path) -> Iterator[ast.AST]:
    """The nodes of a file's syntax tree, without garbage collection during the parse.

    A collected object may log a traceback (a failed task of asyncio, left by an earlier test in this process). Python
    3.11 then parses again, and the outer parse ends in "AST constructor recursion depth mismatch".
    """
    gc.disable()
    try:
        return ast.walk(ast.parse(path.read_text()))
    finally:
        gc.enable()


def prose_of_module(path: Path) -> str:
    """Docstrings, messages and comments of a Python file; quoted identifiers are left out."""
    strings = [x.value for x in parsed(path) if isinstance(x, ast.Constant) and isinstance(x.value, str)
               and not x.value.isidentifier()]  # fmt: skip
    strings = [re.sub(r"^\s*(?:>>>|\.\.\.).*$", "", x, flags=re.M) for x in strings if not x.lstrip().startswith("@")]
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    comments = " ".join(x.string.lstrip("# ") for x in tokens if x.type == tokenize.COMMENT)
    return _plain("\n\n".join([*strings, comments]))


def prose_of_page(path: Path) -> str:
    """The text of a page in Markdown."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(), flags=re.M | re.S)
    return _plain(re.sub(r"\]\([^)\s]*\)", "]", re.sub(r"^    .*$", "", text, flags=re.M)))


def _plain(text: str) -> str:
    text = re.sub(r"``.+?``|`[^`\n]*`", "`", text)
    return re.sub(_TITLE, "", "\n".join(" ".join(part.split()) for part in text.split("\n\n")))


def prose_of_checkout(root: Path) -> dict[str, dict[Path, str]]:
    """The prose of each file: of the library, of train.py and the commands, and of the pages."""
    modules = sorted((root / "jgc").rglob("*.py"))
    applied = [path for path in modules if path.relative_to(root).parts[1] in APPLICATION]
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    return {
        "library": {path: prose_of_module(path) for path in modules if path not in applied},
        "commands": {path: prose_of_module(path) for path in applied},
        "docs": {path: prose_of_page(path) for path in pages},
    }


def rates(prose: dict[Path, str]) -> dict[str, float]:
    """Occurrences of each word per 100,000 bytes of the files."""
    size = sum(path.stat().st_size for path in prose)
    return {word: 1e5 * sum(count(word, text) for text in prose.values()) / size for word in WORDS}


def count(word: str, text: str) -> int:
    """How often a word stands in a text.

    >>> count("own", "Each node has its own.")
    1
    """
    return len(re.findall(WORDS[word], text, re.I))


def print_table(prose: dict[str, dict[Path, str]]) -> None:
    """The rates in the parts of a checkout, and in the packages that are installed here."""
    for name in ("optax", "diffrax"):
        if (spec := find_spec(name)) and spec.origin:
            modules = sorted(Path(spec.origin).parent.rglob("*.py"))
            prose = prose | {name: {path: prose_of_module(path) for path in modules}}
    columns = {name: rates(texts) for name, texts in prose.items()}
    print("| per 100 kB |", " | ".join(columns), "|")
    print("|:---|" + "---:|" * len(columns))
    for word in WORDS:
        print(f"| {word} |", " | ".join(f"{column[word]:.1f}" for column in columns.values()), "|")


def main(folder: str = str(ROOT), *words: str) -> None:
    """Print the table, and each occurrence of some words with its neighbours."""
    if unknown := set(words) - WORDS.keys():
        sys.exit(f"unknown words {sorted(unknown)}; known: {list(WORDS)}")
    prose = prose_of_checkout(Path(folder))
    print_table(prose)
    for path, text in (item for texts in prose.values() for item in texts.items()):
        for match in (x for word in words for x in re.finditer(WORDS[word], text, re.I)):
            neighbours = text[max(0, match.start() - 50) : match.end() + 30]
            print(f"{path}: {' '.join(neighbours.split())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
