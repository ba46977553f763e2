"""Reports over runs: what they show is what the runs' summaries say, and what is trained is trained once."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from training_helpers import tiny_model

from jgc.__main__ import main
from jgc.compress import Dense, Dgc, LgcPs
from jgc.lab import launch as bench_runs
from jgc.lab.report import paper, plots
from jgc.lab.report.ages import age_table
from jgc.lab.report.compare import compare, options_of, seeds_of, variants_of, words
from jgc.lab.report.latency import milliseconds, speed_up_table, values_coded
from jgc.lab.report.page import write
from jgc.lab.report.runs import Group, Run, against, baseline_of, find, pool
from jgc.lab.report.tables import bytes_table, figures, paper_bytes, ratio, score_table, settings_table, time_table
from jgc.training.errors import UserError
from jgc.training.table import size

pytestmark = pytest.mark.slow

CHANGES = {"nodes": 2, "batch_size": 16, "steps": 12, "evaluate_every": 4, "diagnose_every": 2, "schedule_steps": 12,
           "learning_rate_warmup": 2, "warmup_steps": 3, "autoencoder_steps": 4, "alpha": 0.05}  # fmt: skip
METHODS = ("baseline", "lgc_ps")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of finished runs of 12 steps, with their report."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jgc.training.setup.make_model", tiny_model)
        compare(METHODS, ["0"], "digits_convnet5", folder, changes=CHANGES)
    return folder


@pytest.fixture
def no_training(monkeypatch):
    """Training is an error."""

    def run(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(bench_runs, "run", run)


def made_up(folder: str, accuracy: float, method="dense", seed=0, total=100, extra=None, lines=(), **config) -> Run:
    """A run with what reports read of one."""
    wire = {"logical": {"worker": {"up": {"values": 4.0}}}, "physical": {}, "physical_one_node_per_device": {}}
    phase = {"name": "last", "steps": 10, "seconds_per_step": 0.5 + seed, "wire": wire}
    summary = {"method": method, "workload": "cifar10_resnet50", "seed": seed, "steps": 10, "layout": "emulated",
               "test_accuracy": accuracy, "phases": [phase], "total_bytes": total, "dense_total_bytes": 100,
               "compression_ratio": {"leader": 2.0, "worker": 2.0}, "reconstruction_cosine": None}  # fmt: skip
    settings = {"method": method, "compressor": extra or {}, "seed": seed, "steps": 10, "nodes": 2, "batch_size": 8,
                "run_dir": folder, "data": {"name": "cifar10"}, "model": {"name": "resnet50"}} | config  # fmt: skip
    return Run(Path(folder), settings, summary, list(lines))


def test_every_row_says_what_the_summary_says(trained):
    groups = pool(find([trained])[0])
    assert [group.label for group in groups] == ["baseline", "lgc_ps"]
    accuracy, sent, time = (make(groups, groups) for make in (score_table, bytes_table, time_table))
    base = json.loads((trained / "baseline-seed0" / "summary.json").read_text())
    for name in METHODS:
        summary = json.loads((trained / f"{name}-seed0" / "summary.json").read_text())
        row = next(line for line in accuracy.splitlines() if line.startswith(f"| {name} "))
        assert f" {100 * summary['test_accuracy']:.2f} |" in row
        if name != "baseline":
            points = 100 * (summary["test_accuracy"] - base["test_accuracy"])
            assert f" {points:+.2f} (1 pair) | {'yes' if points >= -1 else 'no'} |" in row
            assert f" {summary['reconstruction_cosine']:.3f} |" in row
        cells = next(line for line in sent.splitlines() if line.startswith(f"| {name} ")).split(" | ")
        wire = summary["phases"][-1]["wire"]
        logical = wire["logical"]
        worker = sum(logical["worker"]["up"].values())
        leader = sum(logical["leader"]["up"].values()) if "leader" in logical else worker
        assert cells[1:3] == [size(leader), size(worker)]
        assert cells[3:5] == [ratio(summary["compression_ratio"][role]) for role in ("leader", "worker")]
        assert cells[5] == (ratio(summary["element_ratio"]) if summary["element_ratio"] else "")
        assert cells[6] == size(summary["total_bytes"])
        assert cells[7] == ratio(summary["dense_total_bytes"] / summary["total_bytes"])
        assert (cells[8] == "") == (not wire["physical"])
        apart = wire["physical_one_node_per_device"]
        assert size(sum(count for kind, count in apart.items() if kind != "other")) in cells[9]
        for phase in summary["phases"]:
            share = f"{100 * phase['steps'] / summary['steps']:.1f} %"
            start = f"| {name} | {phase['name']} | {phase['steps']} | {share} | {phase['seconds_per_step']:.3f} |"
            assert any(line.startswith(start) for line in time.splitlines()), start


def test_the_page_and_its_pictures(trained, tmp_path):
    page = write([trained], tmp_path, figures=(10, 11), latency=True)
    text, html = page.read_text(), (tmp_path / "report.html").read_text()
    for name in ("score.png", "loss.png", "bytes.png", "figure10.png", "figure11.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in text and f'src="{name}"' in html
    assert "<table>" in html and "102.2 MB is the size" in text and "without a network" in text
    assert "another workload than the runs above" in text
    assert "Latency of the autoencoder" in text


def test_latency_is_measured_at_the_length_of_the_run(trained):
    _, lgc = pool(find([trained])[0])
    m = values_coded(lgc)
    code = lgc.runs[0].summary["phases"][-1]["wire"]["logical"]["leader"]["up"]["code"]
    assert m is not None and m % 16 == 0 and m / 16 * 4 * 4 == code
    assert all(value > 0 for value in milliseconds(m, repeats=2).values())
    assert set(milliseconds(m, "linear", repeats=1)) == {"encode", "decode"}


def test_compare_trains_nothing_twice(trained, no_training, capsys):
    page = compare(["baseline,lgc_ps"], ["0"], "digits_convnet5", trained, changes=CHANGES)
    assert page == trained / "report.md" and "hours of training steps" in page.read_text()
    assert capsys.readouterr().out.count("finished before") == 2


def test_compare_goes_on_with_what_is_missing(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "baseline-seed0", tmp_path / "baseline-seed0")
    called = []

    def run(config, console):
        called.append(config)
        shutil.copytree(trained / "lgc_ps-seed0", config.run_dir)
        return 0

    monkeypatch.setattr(bench_runs, "run", run)
    compare(METHODS, ["0"], "digits_convnet5", tmp_path, changes=CHANGES)
    assert [config.run_dir for config in called] == [str(tmp_path / "lgc_ps-seed0")]
    (config,) = called
    assert (config.steps, config.nodes, config.compressor.warmup_steps, config.resume) == (12, 2, 3, False)


def test_compare_resumes_what_was_interrupted(trained, tmp_path):
    folder = tmp_path / "baseline-seed0"
    shutil.copytree(trained / "baseline-seed0", folder)
    (folder / "summary.json").unlink()
    config = bench_runs.configure(Dense(), "digits_convnet5", 0, None, folder, CHANGES)
    assert config.resume
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jgc.training.setup.make_model", tiny_model)
        summary = bench_runs.train_one(bench_runs.Job("baseline", 0, folder, config))
    before = json.loads((trained / "baseline-seed0" / "summary.json").read_text())
    assert summary["test_accuracy"] == before["test_accuracy"]


@pytest.mark.parametrize(
    "field, value", [("steps", 13), ("nodes", 4), ("compressor.alpha", 0.1), ("schedule_steps", 9)]
)
def test_compare_refuses_other_settings(trained, no_training, field, value):
    change = {field.removeprefix("compressor."): value}
    with pytest.raises(UserError, match=rf"lgc_ps-seed0 holds .*{field} was .*, is {value}"):
        compare(["lgc_ps"], ["0"], "digits_convnet5", trained, changes=CHANGES | change)


def test_a_setting_newer_than_the_run_is_no_difference(trained, tmp_path, no_training):
    folder = tmp_path / "lgc_ps-seed0"
    shutil.copytree(trained / "lgc_ps-seed0", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["compressor"]["scale"], config["clip_norm"]
    (folder / "config.json").write_text(json.dumps(config))
    compare(["lgc_ps"], ["0"], "digits_convnet5", tmp_path, changes=CHANGES)


def test_a_run_that_diverges_does_not_stop_the_others(trained, tmp_path, monkeypatch):
    def run(config, console):
        if isinstance(config.compressor, LgcPs):
            raise bench_runs.NonFinite(3, "the loss is inf", "nothing is kept")
        shutil.copytree(trained / "baseline-seed0", config.run_dir)
        return 0

    monkeypatch.setattr(bench_runs, "run", run)
    with pytest.raises(UserError, match="1 of 2 runs did not finish"):
        compare(["lgc_ps", "baseline"], ["0"], "digits_convnet5", tmp_path, changes=CHANGES)
    assert "stopped at step 3" in (tmp_path / "report.md").read_text()


def test_seeds_are_pooled_and_paired():
    runs = [made_up("a0", 0.90), made_up("a1", 0.80, seed=1), made_up("a2", 0.70, seed=2),
            made_up("t1", 0.79, "topk", 1, 10), made_up("t0", 0.90, "topk", 0, 10)]  # fmt: skip
    base, topk = groups = pool(runs)
    assert (topk.label, topk.seeds, base.seeds) == ("sparse_gd", (0, 1), (0, 1, 2))
    f = figures(topk, groups)
    assert f.result.mean == pytest.approx(84.5) and f.result.std == pytest.approx(7.7782, abs=1e-3)
    assert f.against is not None and (f.pairs, f.against.mean) == (2, pytest.approx(-0.5))
    assert f.against.std == pytest.approx(0.70711, abs=1e-4)
    assert f.total == 10 and f.seconds == {"last": 1.0}
    table = score_table(groups, groups)
    assert "-0.50 ± 0.71 (2 pairs) | yes" in table and "91.82 (LGC, Table VI)" in table
    assert "0.102 | 1,000x |" in bytes_table(groups, groups) and "1.00x" not in bytes_table(groups, groups)
    assert "1.50x" in speed_up_table(groups)


def test_ages_are_those_of_the_last_look_and_means_over_seeds():
    lines = [{"step": 1, "oldest/a": 1.0, "mean_age/a": 1.0}, {"step": 5, "oldest/a": 5.0, "mean_age/a": 2.0},
             {"step": 9}]  # fmt: skip
    later = [{"step": 5, "oldest/a": 7.0, "oldest/b": 3.0, "mean_age/a": 5.0, "mean_age/b": 1.0}]
    runs = [made_up("a", 0.9), made_up("t0", 0.8, "topk", 0, lines=lines), made_up("t1", 0.8, "topk", 1, lines=later)]
    _, topk = groups = pool(runs)
    assert age_table(groups) == "| layer | sparse_gd: oldest / mean |\n|:---|---:|\n| a | 6 / 4 |"  # 3.5 to even
    assert age_table([topk._replace(runs=topk.runs[1:])]).endswith("| a | 7 / 5 |\n| b | 3 / 1 |")
    assert age_table(groups[:1]) == ""


def test_no_common_seed_gives_a_difference_of_means():
    base, topk = pool([made_up("a", 0.9), made_up("b", 0.8, "topk", 5)])
    difference, pairs = against(topk, base)
    assert (difference.mean, difference.std, pairs) == (pytest.approx(-10), None, 0)


def test_other_settings_are_other_rows_and_other_baselines():
    runs = [made_up("a", 0.9), made_up("b", 0.8, "topk", extra={"alpha": 0.1}),
            made_up("c", 0.8, "topk", extra={"alpha": 0.2}), made_up("d", 0.8, "lgc_ps", nodes=4)]  # fmt: skip
    groups = pool(runs)
    assert [group.label for group in groups] == ["baseline", "sparse_gd (alpha=0.1)", "sparse_gd (alpha=0.2)", "lgc_ps"]
    assert baseline_of(groups[1], groups) is groups[0] and baseline_of(groups[3], groups) is None


def test_a_name_has_settings_enough_and_the_table_all():
    falling = {"schedule": "validation", "correction": {"every": 50, "decay": 0.3}}
    steady = {"schedule": "cosine", "correction": {"every": 0, "decay": 0.1}}
    runs = [made_up("a", 0.9, **steady), made_up("b", 0.9, **falling),
            made_up("c", 0.8, "topk", extra={"alpha": 0.1}, **steady),
            made_up("d", 0.8, "topk", extra={"alpha": 0.1}, **falling),
            made_up("e", 0.8, "topk", extra={"alpha": 0.2}, **falling)]  # fmt: skip
    groups = pool(runs)
    assert [group.label for group in groups] == [
        "baseline (schedule=cosine)", "baseline (schedule=validation)", "sparse_gd (alpha=0.1, schedule=cosine)",
        "sparse_gd (alpha=0.1, schedule=validation)", "sparse_gd (alpha=0.2, schedule=validation)"]  # fmt: skip
    rows = settings_table(groups, groups).splitlines()[2:]
    assert rows[1] == ("| baseline (schedule=validation) | schedule validation, correction.every 50, "
                       "correction.decay 0.3 |")  # fmt: skip
    assert rows[4].endswith("| alpha 0.2, schedule validation, correction.every 50, correction.decay 0.3 |")


def test_the_same_run_twice_is_refused():
    with pytest.raises(UserError, match="a and b have the same settings and seed"):
        pool([made_up("a", 0.9), made_up("b", 0.9)])


def test_points_are_those_that_all_seeds_have():
    first = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 3}]
    second = [{"step": 1, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    group = Group("x", (made_up("a", 0.9, lines=first), made_up("b", 0.9, seed=1, lines=second)))
    assert [list(values) for values in plots.points(group, "loss")] == [[1], [3.0], [2.0], [4.0]]


def test_figures_13_and_14(tmp_path):
    lines = [{"step": i, "loss": 1 / i, "autoencoder_reconstruction": 1 / i, "autoencoder_similarity": 0.1 / i}
             for i in range(1, 20)]  # fmt: skip
    groups = pool([made_up(s, 0.5, "topk", extra={"strategy": s}, lines=lines) for s in ("fixed", "warmup")])
    plots.strategies(groups, tmp_path / "13.png")
    extra = {"lambda_similarity": 0.5}
    groups = pool([made_up(str(n), 0.5, "lgc_ps", extra=extra, nodes=n, lines=lines) for n in (2, 4)])
    plots.autoencoder(groups, tmp_path / "14.png")
    with pytest.raises(UserError, match=r"differ in compressor\.strategy"):
        plots.strategies(groups, tmp_path / "no.png")
    with pytest.raises(UserError, match="figure 14 needs"):
        plots.autoencoder(pool([made_up("a", 0.9)]), tmp_path / "no.png")


def test_lists_with_commas_and_spaces():
    assert words(["a,b", "c"]) == words(["a", "b,", "c"]) == ["a", "b", "c"]
    assert seeds_of(["0,1", "2"]) == [0, 1, 2]
    with pytest.raises(UserError, match="whole numbers"):
        seeds_of(["one"])
    with pytest.raises(UserError, match="the same method"):
        variants_of(["sparse_gd", "topk"])


def test_the_papers_numbers():
    (row,) = paper.reported("cifar10_resnet50", "lgc_ps")
    assert (row.accuracy, row.ratio, row.megabytes) == (93.27, (5709, 8616), (0.017, 0.012))
    assert [(row.paper, row.accuracy) for row in paper.reported("cifar10_resnet50", "dense")] == [
        ("LGC", 91.88),
        ("EGC", 86.08),
    ]
    assert paper_bytes(*paper.reported("cifar10_resnet50", "dense")) == ("102.2", "1x; 1x in values")
    (dropped,) = paper.reported("ptb_lstm", "gradient_dropping")
    assert (dropped.accuracy, dropped.ratio, dropped.paper, dropped.table) == (67.84, (100,), "EGC", "IV")
    assert paper.EGC_SWEEPS["nodes"]["egc"]["8"] == (70.03, 1044)
    assert paper.EGC_SWEEPS["ratio"]["egc"]["1024"][1] == 1041
    assert {row.workload for row in paper.REPORTED} == set(paper.WORKLOADS)
    assert paper.reported("digits", "dense") == ()


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "{report,compare,sweep,plan,bench,analyze,advise}"),
        (["reprot"], "did you mean report?"),
        (["report"], "give the folders"),
        (["report", "nowhere"], "nowhere is not a folder"),
        (["report", "empty"], "empty holds no run"),
        (["report", "started"], "started has no summary.json"),
        (["report", ".", "--figure", "12"], "--figure"),
        (["compare", "--run-dir", "x", "--methods", "baselin"], "did you mean baseline?"),
        (["compare", "--run-dir", "x", "--workload", "digit_convnet5"], "did you mean digits_convnet5?"),
        (["compare", "--methods", "baseline"], "run-dir"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.alpha=5"], "alpha must be in (0, 1]"),
        (["compare", "--run-dir", "x", "--set", "seed=5"], "compare has --workload, --seeds and --run-dir"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.seed=5"], "seed is not to be set"),
        (["compare", "--run-dir", "x", "--set", "distributed.auto=true"], "is one process"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.run-dir=y"], "run-dir is not to be set"),
        (["bench", "bytes", "--alpha", "2"], "alpha must be in (0, 1]"),
        (["bench", "bytes", "--classes", "5"], "at least the data set's 10, got 5"),
        (["bench", "bytes", "--workload", "digits_convnet5", "--stem", "imagenet"], "setting of ResNets"),
        (["bench", "step", "--repeats", "0"], "--repeats must be at least 1"),
        (["bench", "step", "--nodes", "0"], "node"),
        (["bench", "codecs", "--run-dir", "x", "--alphas", "2"], "alpha must be in (0, 1]"),
        (["compare", "--run-dir", "x", "--set", "alpha"], "METHOD.FIELD=VALUE, got 'alpha'"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dg.alpha=1"], "did you mean dgc?"),
        (["compare", "--run-dir", "x", "--set", "learning_rat=0.1"], "did you mean --learning-rate?"),
        (["compare", "--run-dir", "x", "--methods", "dgc", "--set", "dgc.alpha=little"], "little"),
    ],
)
def test_one_line_for_what_is_wrong(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "config.json").write_text("{}")
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) <= 2 and "Traceback" not in error


def test_settings_on_the_command_line_have_the_last_word(tmp_path):
    given = ["learning_rate=0.3", "model.norm=group", "dgc.clip-norm=2", "dgc.factor_masking=False", "dgc.momentum=0.5",
             "dgc.batch_size=64", "correction.every=5", "dgc.correction.decay=2"]  # fmt: skip
    options = options_of(given, ["baseline", "dgc"])
    baseline, ours = (
        bench_runs.configure(settings, "digits_convnet5", 0, None, tmp_path / "new", {"steps": 7}, options[name])
        for name, settings in (("baseline", Dense()), ("dgc", Dgc()))
    )
    assert (baseline.learning_rate, ours.learning_rate, ours.steps) == (0.3, 0.3, 7)
    assert baseline.model.norm == ours.model.norm == "group"
    assert (ours.compressor.clip_norm, ours.compressor.factor_masking) == (2.0, False)
    assert (ours.compressor.momentum, ours.momentum) == (0.5, baseline.momentum)  # both have one: the method's own
    assert (ours.batch_size, baseline.batch_size) == (64, 128)
    assert (baseline.correction.every, ours.correction.every, ours.correction.decay) == (5, 5, 2.0)


def test_train_all_without_changes_is_the_workloads(tmp_path):
    config = bench_runs.configure(LgcPs(), "digits_convnet5", 3, None, tmp_path / "new", {})
    assert (config.steps, config.seed, config.compressor.warmup_steps, config.resume) == (300, 3, 20, False)
    assert dataclasses.is_dataclass(config)
