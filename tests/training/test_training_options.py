"""One-line errors for bad options and for packages of the extra `train` that are missing."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Literal

import pytest
import tyro
from contract import some_by_default

from jgc.training.errors import UserError
from jgc.training.requirements import PACKAGES, explain
from jgc.training.settings.options import read

ROOT = Path(__file__).parents[2]


@dataclass
class Inner:
    rate: float = 0.1
    noisy: bool = False


@dataclass
class Command:
    """A command."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path
    kind: Literal["a", "b"] = "a"
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    seeds: tuple[int, ...] = (0,)
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)


def test_read_returns_what_tyro_makes():
    words = "x y --out o --set p=1 --set q=2 --seeds 3 4 --limit None --inner.rate -2 --inner.noisy --kind=b"
    made = read(Command, words.split(), "prog")
    assert made == Command((Path("x"), Path("y")), Path("o"), "b", ("p=1", "q=2"), (3, 4), None, Inner(-2.0, True))
    assert read(Command, ["--out", "o", "--limit", "5"], "prog").limit == 5


@pytest.mark.parametrize("words", ["--seeds 3,4", "--seeds=3,4", "--seeds 3 4"])
def test_numbers_of_a_list_are_parted_by_commas_or_spaces(words):
    made = read(Command, ["a,b", "--out", "o,p", "--set", "p=1,2", *words.split()], "prog")
    assert made == Command((Path("a,b"),), Path("o,p"), set=("p=1,2",), seeds=(3, 4))
    after = [*words.split(), "a,b"] if "=" in words else ["a,b", *words.split()]
    assert read(Command, ["--out", "o", *after], "prog").runs == (Path("a,b"),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--out must be given; see prog --help"),
        ("--out", "--out needs a value"),
        ("--out o --kind c", "--kind must be one of 'a', 'b', got 'c'"),
        ("--out o --seeds 1 two", "--seeds must be a whole number, got 'two'"),
        ("--out o --seeds 1,,2", "--seeds must be a whole number, got ''"),
        ("--out o --limit 1.5", "--limit must be a whole number, got '1.5'"),
        ("--out o --inner.rate=", "--inner.rate must be a number, got ''"),
        ("--out o --inner.no-noisy=1", "--inner.no-noisy takes no value, got '1'"),
        ("--out o --inner.rat 1", "unknown option --inner.rat; did you mean --inner.rate?"),
        ("--out o --set", "--set needs a value"),
        ("x --runs y --out o", "unknown option --runs"),
    ],
)
def test_read_rejects_in_one_line(words, message, capsys):
    with pytest.raises(UserError) as error:
        read(Command, words.split(), "prog")
    assert message in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_tyro_has_the_last_word():
    def command(pair: tuple[int, int] = (1, 2)) -> None:
        """Two numbers, which only tyro counts."""

    with pytest.raises(UserError, match="--pair 1 2 3 does not fit together; prog --help lists all options"):
        read(command, ["--pair", "1", "2", "3"], "prog")


def test_import_needs_the_base_install_alone():
    done = run("import jgc, sys; print(*{name.partition('.')[0] for name in sys.modules})")
    assert done.returncode == 0, done.stderr
    assert PACKAGES & set(done.stdout.split()) <= {"rich"}  # which Flax imports


TRAIN = "run_path('train.py', run_name='__main__')", "--method", "lgc_ps"
REPORT = "run_module('jgc', run_name='__main__')", "report", "runs"


@pytest.mark.parametrize(
    ("package", "program"),
    some_by_default(
        [("tyro", TRAIN), ("matplotlib", TRAIN), ("orbax", TRAIN), ("tyro", REPORT), ("matplotlib", REPORT)],
        [("tyro", TRAIN), ("matplotlib", REPORT)],
    ),
)
def test_missing_extra_is_one_line(package, program):
    start, *argv = program
    done = run(f"import runpy, sys; sys.modules[{package!r}] = None; runpy.{start}", *argv)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"{explain(ModuleNotFoundError(name=package))}\n"
    assert "pip install 'jgc[train]'" in done.stderr and "pip install -e '.[train]'" in done.stderr


def run(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, in the repository's root."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, env=env, capture_output=True, text=True)


def test_every_package_of_the_extra_is_known():
    wanted = {re.match(r"[\w-]+", line)[0] for line in requires("jgc") if re.search("extra == .train.", line)}
    if not wanted:
        pytest.skip("installed before there was the extra")
    names = packages_distributions()
    provided = {name.replace("_", "-") for package in PACKAGES for name in names.get(package, [])}
    assert {name.replace("_", "-") for name in wanted} <= provided
