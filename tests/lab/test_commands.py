"""The command line of `python -m jgc`: help, errors, and the registry of commands."""

import dataclasses
import subprocess
import sys

import pytest

from jgc.lab.commands import COMMANDS, load, main


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help(name, capsys):
    """A frozen dataclass whose help has a summary in one line, an example and what it prints or writes."""
    kind = load(name)
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
    assert main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert f"usage: python -m jgc {name} " in said and f"    python -m jgc {name} " in said
    assert (kind.__doc__ or "").splitlines()[0].endswith(".") and (kind.__doc__ or "").splitlines()[0] in said
    indented = [line.strip() for line in (kind.__doc__ or "").splitlines() if line.startswith(" " * 8)]
    outputs = [line for line in indented if not line.startswith("python -m jgc")]
    assert outputs or name == "bench loader"  # whose speed no page has measured


@pytest.mark.parametrize("group", ["", "bench", "analyze", "rounds"])
def test_group_help_lists_commands(group, capsys):
    assert main([*group.split(), "--help"]) == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    assert usage.startswith("usage: python -m jgc")
    names = [name for name in COMMANDS if name.startswith(group)]
    assert len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert line.split() == [*name.split(), *(load(name).__doc__ or "").splitlines()[0].split()]


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "jgc", "reprot"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean report?" in done.stderr


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "{report,compare,sweep,plan,bench,analyze,advise,doctor,chaos,rounds}"),
        (["reprot"], "did you mean report?"),
        (["report"], "give the folders"),
        (["report", "nowhere"], "nowhere is not a folder"),
        (["report", "empty"], "empty holds no run"),
        (["report", "started"], "started has no summary.json"),
        (["report", "list"], "cannot read list/config.json: it should be an object in braces, and is a list"),
        (["report", ".", "--figure", "12"], "--figure"),
        (["compare", "--run-dir", "x", "--methods", "baselin"], "did you mean baseline?"),
        (["compare", "--run-dir", "x", "--workload", "digit_convnet5"], "did you mean digits_convnet5?"),
        (["compare", "--methods", "baseline"], "run-dir"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.alpha=5"], "alpha must be in (0, 1]"),
        (["compare", "--run-dir", "x", "--set", "seed=5"], "seed is not to be set: the command has its own"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.seed=5"], "seed is not to be set"),
        (["compare", "--run-dir", "x", "--set", "distributed.auto=true"], "is one process"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.run-dir=y"], "run-dir is not to be set"),
        (["plan", "--alpha", "2", "--methods", "dgc"], "alpha must be in (0, 1]"),
        (["plan", "--set", "model.classes=5"], "at least the data set's 10, got 5"),
        (["plan", "--set", "model.stem=imagenet"], "setting of ResNets"),
        (["bench"], "usage: python -m jgc bench {methods,"),
        (["bench", "method"], "unknown command 'bench method'; did you mean bench methods?"),
        (["bench", "methods", "--repeats", "0"], "--repeats must be at least 1"),
        (["bench", "methods", "--nodes", "0"], "node"),
        (["bench", "codecs", "--run-dir", "x", "--alphas", "2"], "alpha must be in (0, 1]"),
        (["compare", "--run-dir", "x", "--set", "alpha"], "METHOD.FIELD=VALUE, got 'alpha'"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dg.alpha=1"], "did you mean dgc?"),
        (["compare", "--run-dir", "x", "--set", "learning_rat=0.1"], "did you mean learning_rate?"),
        (["compare", "--run-dir", "x", "--methods", "topk,dense", "--set", "alpha=0.1"], "did you mean topk.alpha?"),
        (["compare", "--run-dir", "x", "--methods", "topk", "--set", "topk.foo=1"], "no setting of train.py or topk"),
        (["compare", "--run-dir", "x", "--set", "method=dgc"], "--set method=dgc: no setting of train.py"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.alpha=little"], "little"),
    ],
)
def test_wrong_command_is_one_line(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "list").mkdir()
    for name in ("config.json", "summary.json"):
        (tmp_path / "list" / name).write_text("[]")
    (tmp_path / "started" / "config.json").write_text("{}")
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) <= 2 and "Traceback" not in error
