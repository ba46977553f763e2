"""Configs: precedence of values, and one-line errors for bad command lines."""

import dataclasses
import errno
import json
import re

import jax
import numpy as np
import pytest

from jgc.compress import Dense, LgcPs, TopK
from jgc.lab.shared.random_data import random_source
from jgc.training.data import MissingDataError
from jgc.training.errors import UserError, cannot_write
from jgc.training.output.announce import unused
from jgc.training.run.setup import model_of
from jgc.training.settings import cli
from jgc.training.settings.config import Config, as_json, check, resolve
from jgc.training.settings.options import options_of
from jgc.training.settings.saved_config import differences
from jgc.training.settings.workloads import WORKLOADS

LGC = ["--method", "lgc_ps"]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def write_config(path, body):
    path.write_text(
        "from jgc.compress import LgcPs\nfrom jgc.training.settings.config import Config, DataConfig, LayersConfig\n"
        f"def get_config():\n    return {body}\n"
    )
    return ["--config", str(path)]


def test_workload_fills_open_fields():
    config, workload = cli.parse(LGC), WORKLOADS["digits_convnet5"]
    assert (config.steps, config.learning_rate, config.schedule) == (workload.steps, workload.learning_rate, "cosine")
    assert (config.data.name, config.model.name) == ("digits", "convnet5")
    assert config.compressor.warmup_steps == workload.warmup_steps != LgcPs().warmup_steps


def test_several_processes_diagnose_only_when_asked():
    def every(words):
        return cli.parse(f"--method topk {words}".split()).diagnose_every

    assert every("") == WORKLOADS["digits_convnet5"].diagnose_every > 0
    assert every("--distributed.auto") == every("--distributed.coordinator host-a:5555") == 0
    assert every("--distributed.auto --diagnose-every 9") == 9


def test_workload_is_a_value_that_can_be_given():
    named = ["--optimizer", "workload", "--schedule", "workload"]
    config = cli.parse(["--method", "qsgd", "--workload", "ptb_gpt", *named])
    assert (config.optimizer, config.schedule) == ("adam", "cosine")


def test_precedence(tmp_path):
    file = write_config(
        tmp_path / "own.py",
        "Config(compressor=LgcPs(autoencoder_steps=7), steps=11, weight_decay=0.0, data=DataConfig(name='cifar100'))",
    )
    config = cli.parse([*file, "--workload=cifar10_resnet20", "--seed", "5"])
    assert (config.steps, config.weight_decay, config.compressor.autoencoder_steps) == (11, 0.0, 7)
    assert (config.data.name, config.model.name, config.seed) == ("cifar100", "resnet20", 5)
    assert config.compressor.warmup_steps == WORKLOADS["cifar10_resnet20"].warmup_steps
    typed = cli.parse([*file, "--steps", "3", "--compressor.autoencoder-steps=300", "--compressor.alpha", "0.01"])
    assert (typed.steps, typed.compressor.autoencoder_steps, typed.compressor.alpha) == (3, 300, 0.01)


def test_workload_settings_by_method():
    alphas = {
        name: cli.parse(["--method", name, "--workload", "cifar10_resnet20"]).compressor.alpha
        for name in ("lgc_ps", "lgc_ring", "scalecom", "topk")
    }
    assert alphas == {"lgc_ps": 0.005, "lgc_ring": 0.02, "scalecom": 0.05, "topk": 0.005}


@pytest.mark.parametrize(
    ("workload", "words", "norm"),
    [
        ("cifar10_resnet20", "", "batch"),  # as runs have written it down: those can be resumed
        ("cifar10_alexnet", "", "none"),
        ("cifar10_vgg19", "", "batch"),
        ("cifar10_alexnet", "--model.norm batch", "batch"),
        ("cifar10_vgg19", "--model.norm none", "none"),
    ],
)
def test_default_norm(workload, words, norm):
    config = cli.parse([*LGC, "--workload", workload, *words.split()])
    assert as_json(config)["model"]["norm"] == norm


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_workload_models_fit_data(workload):
    config = resolve(Config(compressor=Dense(), workload=workload))
    source = random_source(config)
    (_, labels), inputs, model = source.batch(0, 0, 1, config.batch_size), source.inputs(2), model_of(config, source)
    logits, variables = jax.eval_shape(
        lambda: model.module.init_with_output(jax.random.key(0), inputs, train=False)
    )
    assert logits.shape == (2, *labels.shape[2:], config.model.classes or source.classes)
    assert ("batch_stats" in variables) == (config.model.norm == "batch")


def test_public_names():
    words = (
        "--run-dir x --resume --seed 1 --steps 2 --nodes 4 --batch-size 8 --learning-rate 0.5 --checkpoint-every 3 "
        "--workload cifar10_resnet50 --data-dir d --compressor.alpha 0.2 --compressor.warmup-steps 5 "
        "--compressor.autoencoder-steps 6"
    )
    config = cli.parse([*LGC, *words.split()])
    assert (config.run_dir, config.resume, config.seed, config.steps, config.nodes) == ("x", True, 1, 2, 4)
    assert (config.batch_size, config.learning_rate, config.checkpoint_every, config.data.dir) == (8, 0.5, 3, "d")
    assert config.model.name == "resnet50"
    method = config.compressor
    assert (method.alpha, method.warmup_steps, method.autoencoder_steps) == (0.2, 5, 6)


@pytest.mark.parametrize("name", ["dense", "topk", "lgc_ps", "silent"])
@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_methods_with_workloads(name, workload):
    config = cli.parse(["--method", name, "--workload", workload])
    assert config.steps == WORKLOADS[workload].steps
    assert -1 not in as_json(config).values()


def test_help_describes_every_option(capsys):
    assert cli.main([*LGC, "--workload", "cifar10_resnet20", "--help"]) == 0
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    config = cli.parse(LGC)
    for option in [option.name for option in options_of(type(config), config)]:
        if ".no-" not in option and not option.startswith("--no-"):
            described = re.search(rf" {re.escape(option)}[ ,][^()]*?([a-z0-9:;,.%]+ ){{2,}}", text)
            assert described, f"{option} is not described"
    assert "(default: 1000)" in text and text.count("(default:") >= 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --method NAME or --config FILE; methods are dense, lgc_ring"),
        (["--methd", "topk"], "unknown option --methd; did you mean --method?"),
        (["--momentum", "0.5"], "give --method NAME or --config FILE; methods are"),
        (["--method", "topp"], "unknown method 'topp'; did you mean topk?"),
        (["--config", "configs/diloco.py", "--method", "topk"], "or --method topk, not both"),
        (["--config"], "--config needs a value"),
        (["--config", "configs/dilcoo.py"], "did you mean diloco?"),
        ([*LGC, "--stpes", "3"], "unknown option --stpes; did you mean --steps?"),
        ([*LGC, "--compressor.alhpa", "1"], "did you mean --compressor.alpha?"),
        ([*LGC, "-steps", "3"], "unknown option -steps; did you mean --steps?"),
        ([*LGC, "--zzzz"], "unknown option --zzzz; --help lists them all"),
        ([*LGC, "--steps", "many"], "--steps must be a whole number, got 'many'"),
        ([*LGC, "--learning-rate", "fast"], "--learning-rate must be a number, got 'fast'"),
        ([*LGC, "--optimizer", "sdg"], "--optimizer must be one of 'workload', 'sgd', 'adam', 'muon', got 'sdg'"),
        ([*LGC, "--steps"], "--steps needs a value"),
        ([*LGC, "--resume=yes"], "--resume takes no value, got 'yes'"),
        ([*LGC, "3"], "takes only options, got '3'"),
        ([*LGC, "--workload", "cifar10_resnet2"], "unknown workload 'cifar10_resnet2'; did you mean cifar10_resnet20?"),
        ([*LGC, "--workload="], "unknown workload ''"),
        ([*LGC, "--record.layers", "head"], "--record.layers head does nothing without --record.every"),
        ([*LGC, "--correction.decay", "0.5"], "--correction.decay 0.5 does nothing without --schedule validation"),
        ([*LGC, "--correction.every", "5"], "--correction.every needs images held out from training"),
        ([*LGC, "--nodes", "0"], "--nodes must be at least 1, got 0"),
        ([*LGC, "--nodes", "-3"], "--nodes must be at least 1, got -3"),
        ([*LGC, "--nodes", "1000000", "--batch-size", "1000000"], "--nodes must be at most 4,096, got 1000000"),
        ([*LGC, "--nodes", "12"], "12 nodes do not divide a batch of 128"),
        ([*LGC, "--nodes", "12", "--batch-size", "24"], "12 nodes do not divide among 8 devices"),
        ([*LGC, "--learning-rate", "nan"], "--learning-rate must be positive, got nan"),
        ([*LGC, "--seed", "-1"], "--seed must be at least 0, got -1"),
        ([*LGC, "--compressor.alpha", "1.5"], "alpha must be in (0, 1]"),
        ([*LGC, "--compressor.alpha", "0"], "alpha must be in (0, 1]"),
        ([*LGC, "--compressor.warmup-steps", "-1"], "warmup_steps must be at least 0, got -1"),
        ([*LGC, "--layers.top-k", "^nope"], "'^nope' matches no parameter"),
        ([*LGC, "--layers.stacked", "^nope"], "'^nope' matches no parameter to stack"),
        ([*LGC, "--layers.stacked", "bias"], "at least two, got head/bias [10]: give a pattern"),
        (["--method", "dense", "--layers.stacked", "head"], "--layers.stacked head does nothing here"),
        (["--method", "qsgd", "--optimizer", "adam", "--momentum", "0.3"], "--momentum 0.3 does nothing without --opt"),
        ([*LGC, "--adam-beta2", "0.5"], "--adam-beta2 0.5 does nothing without --optimizer adam"),
        ([*LGC, "--decay-all", "--weight-decay", "0"], "--decay-all does nothing without --weight-decay"),
        ([*LGC, "--record.every", "5", "--record.residuals", "--layers.shard", "--devices-per-node", "2"], "leave one"),
        (["--method", "qsgd", "--optimizer", "muon", "--momentum", "0.3"], "--momentum 0.3 does nothing without --opt"),
        ([*LGC, "--optimizer", "muon"], "memory and muon have a momentum: use --optimizer sgd"),
        ([*LGC, "--optimizer", "adam"], "use --optimizer sgd or --compressor.no-momentum-correction"),
        ([*LGC, "--compressor.momentum", "0.5"], "contradicts --momentum 0.9"),
        ([*LGC, "--resume"], "--resume goes on with the run in --run-dir"),
        ([*LGC, "--workload", "cifar10_resnet20", "--data-dir", "/nowhere"], "to fetch it once:"),
        ([*LGC, "--workload", "tiny_imagenet_resnet18", "--data-dir", "/nowhere"], "cd /nowhere && curl -LO"),
        (["--method", "topk", "--data-dir", "/nowhere"], "there is no folder /nowhere; the digits need none"),
        (["--method", "topk", "--data.dir", "d"], "unknown option --data.dir; did you mean --data-dir?"),
        (["--method", "topk", "--workload", "ptb_lstm", "--layers.dense", "first"], "lstm begins with an embedding"),
        ([*LGC, "--model.name", "lstm", "--model.norm", "none"], "lstm takes text, and --data.name digits has"),
        ([*LGC, "--model.name", "alexnet"], "at least 32x32 pixels for this model, got 8x8"),
        ([*LGC, "--model.name", "resnet20", "--model.norm", "none"], "must be one of 'batch', 'group', got 'none'"),
    ],
)
def test_bad_options(words, message, capsys, tmp_path):
    run_dir = tmp_path / "run"
    named = {"--config", "--method"} & {*words[:-1]} and "--resume" not in words
    code = cli.main([*words, "--run-dir", str(run_dir)] if named else words)
    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and message in said.err
    assert not run_dir.exists()


def test_a_first_layer_that_a_config_file_names_for_a_model_of_text_is_an_error(tmp_path):
    words = write_config(tmp_path / "own.py", "Config(LgcPs(), workload='ptb_lstm', layers=LayersConfig('first'))")
    with pytest.raises(UserError, match=r"--layers\.dense first does nothing here: lstm begins"):
        cli.parse(words)
    assert cli.parse([*words, "--layers.dense", ""]).layers.dense == ""
    assert cli.parse(["--method", "lgc_ps", "--workload", "ptb_lstm"]).layers.dense == "first"  # the method's default


def test_options_without_effect_have_a_note():
    def noted(words):
        return unused(cli.parse(["--method", "topk", *words.split()]))

    assert noted("--schedule-steps 7 --diagnose-every 9 --schedule cosine") == []
    assert noted("--schedule-steps 7 --schedule constant") == [
        "note: --schedule-steps 7 does nothing with --schedule constant"
    ]
    (note,) = noted("--local.every 6 --local.fragments 2 --diagnose-every 9")
    assert note.startswith("note: --diagnose-every 9 does nothing with --local.fragments")
    assert noted("--distributed.timeout 9") == ["note: --distributed.timeout does nothing in a run of one process"]
    assert noted("--distributed.timeout 9 --distributed.coordinator host:5555") == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EACCES, "Permission denied", "data/x.png"), "data/x.png: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("two\nlines"), "two lines"),
        (TimeoutError(), "TimeoutError"),
        (MissingDataError("cannot read x"), "cannot read x"),
        (cannot_write("a/b", OSError(errno.EACCES, "Permission denied")), "cannot write a/b: Permission denied"),
    ],
)
def test_system_errors_in_one_line(error, said, capsys):
    def fail():
        raise error

    assert cli.exit_code_of(fail) == 1
    assert capsys.readouterr().err == f"error: {said}\n"


def test_broken_config_files(tmp_path, capsys):
    for body, message in (
        ("1 / 0", "ZeroDivisionError"),
        ("LgcPs()", "must return"),
        ("Config(stpes=1)", "stpes"),
        ("Config(compressor=None)", "compressor must be the settings of a method, as TopK(), got None"),
        ("Config(compressor=LgcPs)", "compressor must be the settings of a method, as TopK(), got <class"),
        ("Config(compressor=DataConfig())", "DataConfig is not the settings class of a method"),
        ("Config(compressor=LgcPs(), nodes='four')", "nodes must be a whole number, got 'four'"),
        ("Config(compressor=LgcPs(), nodes=True)", "nodes must be a whole number, got True"),
        ("Config(compressor=LgcPs(), learning_rate=[1])", "learning_rate must be a number, got [1]"),
        ("Config(compressor=LgcPs(), data=None)", "data must be DataConfig, got None"),
        ("Config(compressor=LgcPs(), optimizer='sdg')", "optimizer must be one of 'workload', 'sgd', 'adam', 'muon'"),
        ("Config(compressor=LgcPs(alpha='x'))", "compressor.alpha must be a number, got 'x'"),
        ("__import__('sys').exit(0)", "SystemExit: 0"),
        ("__import__('sys').exit('no')", "SystemExit: no"),
    ):
        assert cli.main(write_config(tmp_path / "broken.py", body)) == 2, body
        said = capsys.readouterr().err
        assert message in said and said.startswith("error: ") and said.count("\n") == 1


def test_differences():
    old = as_json(resolve(Config(compressor=TopK(alpha=0.1))))
    free = dataclasses.replace(resolve(Config(compressor=TopK(alpha=0.1))), steps=9, nodes=2, run_dir="x", log_every=3)
    assert differences(old, as_json(free)) == []
    other = dataclasses.replace(free, seed=4, compressor=dataclasses.replace(free.compressor, alpha=0.2))
    assert differences(old, as_json(other)) == ["compressor.alpha was 0.1, is 0.2", "seed was 0, is 4"]
    assert differences(old, as_json(resolve(Config(compressor=Dense()))))[0] == "method was 'topk', is 'dense'"


def test_numpys_numbers_are_pythons_in_a_config_file():
    config = resolve(Config(compressor=TopK(alpha=np.float64(0.01)), steps=np.int64(7), learning_rate=np.float32(0.5)))
    assert json.loads(json.dumps(as_json(config)))["steps"] == 7
    assert [type(as_json(config)[name]) for name in ("steps", "learning_rate")] == [int, float]


@pytest.mark.parametrize("name", ["steps", "nodes", "learning_rate", "evaluate_every", "momentum"])
def test_minus_one_is_a_value_like_others(name):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} must be "):
        check(resolve(Config(compressor=Dense(), **{name: -1})))


def test_none_as_an_option_is_the_methods_own():
    default = cli.parse(["--method", "topk"]).layers
    assert cli.parse(["--method", "topk", "--layers.dense", "None", "--layers.top-k", "None"]).layers == default
    assert default.dense == "first"


def test_unknown_settings_class():
    with pytest.raises((UserError, ValueError), match="not the settings"):
        as_json(Config(compressor=object))
