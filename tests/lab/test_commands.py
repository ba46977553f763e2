"""The command lines of `python -m jgc` and `python -m experiments`: help, errors, and the registries of commands."""

import dataclasses
import subprocess
import sys
from functools import partial

import pytest

import experiments.commands
from jgc.lab.commands import COMMANDS, PROGRAM, main, train
from jgc.training.settings.cli import resume_command

EXPERIMENTS = experiments.commands.PROGRAM
ALL = [(program, name) for program in (PROGRAM, EXPERIMENTS) for name in program.commands if name != "train"]


@pytest.mark.parametrize("program, name", ALL, ids=lambda x: x if isinstance(x, str) else x.name)
def test_command_help(program, name, capsys):
    """A frozen dataclass whose help has a summary in one line, an example and what it prints or writes."""
    entry = program.commands[name]
    kind = entry.load()
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
    assert program.main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert f"usage: {program.name} {name} " in said and f"    {program.name} {name} " in said
    assert (kind.__doc__ or "").splitlines()[0] == entry.summary
    assert entry.summary.endswith(".") and entry.summary in said
    indented = [line.strip() for line in (kind.__doc__ or "").splitlines() if line.startswith(" " * 8)]
    outputs = [line for line in indented if not line.startswith(program.name)]
    assert outputs


@pytest.mark.parametrize("group", ["", "bench", "rounds"])
def test_group_help_lists_commands(group, capsys):
    assert main([*group.split(), "--help"]) == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    assert usage.startswith("usage: python -m jgc")
    names = [name for name in COMMANDS if name.startswith(group)]
    assert len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert line.split() == [*name.split(), *COMMANDS[name].summary.split()]


def test_train_is_train_py_under_the_name_of_the_command(capsys):
    assert train.__doc__ == COMMANDS["train"].summary
    assert main(["train", "--method", "topp"]) == 2
    assert "unknown method 'topp'; did you mean topk?" in capsys.readouterr().err
    assert main(["train", "--method", "topk", "--help"]) == 0
    said = capsys.readouterr().out
    assert "usage: python -m jgc train " in said and "    python -m jgc train --method lgc_ps" in said
    assert resume_command(["--method", "topk"], "jgc train") == "jgc train --method topk --run-dir {run_dir} --resume"


def test_help_needs_no_package_of_an_extra():
    """After `pip install jgc` without [train]; a command then says in one line what to install."""
    program = "import sys; sys.modules.update(tyro=None); from jgc.lab.commands import main; sys.exit(main())"
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    shown = run([sys.executable, "-c", program, "--help"])
    assert shown.returncode == 0 and COMMANDS["plan"].summary in shown.stdout
    refused = run([sys.executable, "-c", program, "plan"])
    assert refused.returncode == 1 and refused.stderr.startswith("error: tyro is not installed: pip install")


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "jgc", "reprot"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean report?" in done.stderr


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "{train,compare,sweep,report,plan,advise,bench,doctor,chaos,rounds}"),
        (["reprot"], "did you mean report?"),
        (["report"], "give the folders"),
        (["report", "nowhere"], "nowhere is not a folder"),
        (["report", "empty"], "empty holds no run"),
        (["report", "started"], "started has no summary.json"),
        (["report", "list"], "cannot read list/config.json: it should be an object in braces, and is a list"),
        (["report", ".", "--figur", "12"], "unknown option --figur"),
        (["compare", "--run-dir", "x", "--methods", "baselin"], "did you mean baseline?"),
        (["compare", "--run-dir", "x", "--workload", "digit_convnet5"], "did you mean digits_convnet5?"),
        (["compare", "--methods", "baseline"], "run-dir"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.alpha=5"], "alpha must be in (0, 1]"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "compressor.alpha=0.1"],
         "--set compressor.alpha=0.1: name the method, METHOD.alpha=0.1"),
        (["compare", "--run-dir", "x", "--methods", "dgc:alpha=0.1"],
         "unknown method 'dgc:alpha=0.1': only bench network and experiments codecs take settings after a colon"),
        (["compare", "--run-dir", "x", "--set", "seed=5"], "seed is not to be set: the command sets it"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.seed=5"], "seed is not to be set"),
        (["compare", "--run-dir", "x", "--set", "distributed.auto=true"], "is one process"),
        (["compare", "--run-dir", "x", "--set", "record.layers=[", "--set", "record.every=1"], "no regular expression"),
        (["compare", "--run-dir", "x", "--set", "devices_per_node=2", "--nodes", "8"], "devices"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.run-dir=y"], "run-dir is not to be set"),
        (["plan", "--alpha", "2", "--methods", "dgc"], "alpha must be in (0, 1]"),
        (["plan", "--set", "model.classes=5"], "at least the data set's 10, got 5"),
        (["plan", "--set", "model.stem=imagenet"], "setting of ResNets"),
        (["bench"], "usage: python -m jgc bench {methods,"),
        (["bench", "method"], "unknown command 'bench method'; did you mean bench methods?"),
        (["bench", "methods", "--repeats", "0"], "--repeats must be at least 1"),
        (["bench", "methods", "--nodes", "0"], "node"),
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
