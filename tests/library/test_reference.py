"""The site's API reference has every public name, and no other."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import jgc

PAGES = Path(__file__).parents[2] / "docs" / "api"
MODULES = ("jgc", "jgc.compress", "jgc.method", "jgc.comm", "jgc.rounds")
ELSEWHERE = {"jgc.compress.Compressor", "jgc.compress.Codec", "jgc.compress.Exchange", "jgc.compress.compose"}
ELSEWHERE |= {"jgc.compress.compose_phases", "jgc.compress.Any"}  # under the module that defines them


def documented() -> set[str]:
    """Names after `.. autofunction::` and the like."""
    text = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    return set(re.findall(r"^\.\. (?:auto|py:)\w+:: (\S+)$", text, flags=re.M))


def public(module: ModuleType) -> set[str]:
    """Names of a module for users; submodules are none."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return {name for name in names if not isinstance(getattr(module, name), ModuleType)}


@pytest.mark.parametrize("module", MODULES)
def test_reference_has_every_public_name(module):
    names = {f"{module}.{name}" for name in public(importlib.import_module(module))}
    missing = sorted(names - documented() - ELSEWHERE)
    assert not missing, f"docs/api/ has no `.. autofunction:: NAME` or the like for {', '.join(missing)}"


def test_reference_names_exist():
    for name in documented():
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


def test_every_page_is_in_the_index():
    index = (PAGES / "index.md").read_text().split()
    assert {page.stem for page in PAGES.glob("*.md")} - {"index"} <= set(index)


def test_every_method_stands_with_its_settings():
    for name, method in jgc.compress.METHODS.items():
        assert {f"jgc.compress.{name}", f"jgc.compress.{method.settings.__name__}"} <= documented()
