"""Reports over runs: what they show is what the runs' summaries say, and what is trained is trained once."""

import dataclasses
import gzip
import json
import shutil

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_helpers import made_up
from tiny import tiny_model

from jgc.compress import Dense, Dgc, LgcPs, TopK
from jgc.lab import launch
from jgc.lab.report import page as page_module, plots, runs as runs_module
from jgc.lab.report.ages import age_table
from jgc.lab.report.compare import Compare, compare
from jgc.lab.report.page import write
from jgc.lab.report.runs import Group, against, baseline_of, find, pool
from jgc.lab.report.seconds import draw as draw_over_time, measured, seconds_table
from jgc.lab.report.tables import (
    bytes_table,
    fewest_bytes_table,
    figures,
    reconstruction_table,
    score_table,
    settings_table,
    time_table,
)
from jgc.lab.shared.choices import options_of, seeds_of, variants_of, words
from jgc.lab.shared.tables import ratio
from jgc.training.errors import UserError
from jgc.training.output.metrics import read
from jgc.training.output.table import size

CHANGES = {"nodes": 2, "batch_size": 16, "steps": 12, "evaluate_every": 4, "diagnose_every": 2, "schedule_steps": 12,
           "learning_rate_warmup": 2, "warmup_steps": 3, "autoencoder_steps": 4, "alpha": 0.05}  # fmt: skip
METHODS = ("baseline", "lgc_ps")


def asked(folder, methods=METHODS, **changed) -> Compare:
    """`compare` with `CHANGES`; a change is an option of its own, or of train.py."""
    changes, own = CHANGES | changed, {f.name for f in dataclasses.fields(Compare)}
    alpha = [f"lgc_ps.alpha={changes.pop('alpha')}"] if "lgc_ps" in words(methods) else []
    other = [f"{name}={value}" for name, value in changes.items() if name not in {*own, "alpha"}]
    options = {name: value for name, value in changes.items() if name in own}
    return Compare(run_dir=folder, methods=methods, seeds=("0",), set=(*alpha, *other), **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of finished runs of 12 steps, with their report."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jgc.training.run.setup.make_model", tiny_model)
        compare(asked(folder))
    return folder


@pytest.fixture
def no_training(monkeypatch):
    """Training is an error."""

    def run(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(launch, "run", run)


@pytest.mark.slow
def test_tables_match_summaries(trained):
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
            assert f" {points:+.2f} (1 pair) |  |" in row
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


@pytest.mark.slow
def test_page_and_pictures(trained, tmp_path):
    page = write([trained], tmp_path)
    text, html = page.read_text(), (tmp_path / "report.html").read_text()
    for name in ("score.png", "loss.png", "bytes.png", "step_bytes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in text and f'src="{name}"' in html
    assert "<table>" in html and 'name="viewport"' in html


@pytest.mark.slow
def test_compare_skips_finished_runs(trained, no_training, capsys):
    page = compare(asked(trained, ("baseline,lgc_ps",)))
    assert page == trained / "report.md" and "hours of training steps" in page.read_text()
    assert capsys.readouterr().out.count("finished before") == 2


@pytest.mark.slow
def test_compare_trains_missing_runs(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "baseline-seed0", tmp_path / "baseline-seed0")
    called = []

    def run(config, console):
        called.append(config)
        shutil.copytree(trained / "lgc_ps-seed0", config.run_dir)
        return 0

    monkeypatch.setattr(launch, "run", run)
    compare(asked(tmp_path))
    assert [config.run_dir for config in called] == [str(tmp_path / "lgc_ps-seed0")]
    (config,) = called
    assert (config.steps, config.nodes, config.compressor.warmup_steps, config.resume) == (12, 2, 3, False)


@pytest.mark.slow
def test_compare_resumes_interrupted_run(trained, tmp_path):
    folder = tmp_path / "baseline-seed0"
    shutil.copytree(trained / "baseline-seed0", folder)
    (folder / "summary.json").unlink()
    config = launch.configure(Dense(), "digits_convnet5", 0, None, folder, CHANGES)
    assert config.resume
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jgc.training.run.setup.make_model", tiny_model)
        summary = launch.train_one(launch.Job("baseline", 0, folder, config))
    before = json.loads((trained / "baseline-seed0" / "summary.json").read_text())
    assert summary["test_accuracy"] == before["test_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "field, value", [("steps", 13), ("nodes", 4), ("compressor.alpha", 0.1), ("schedule_steps", 9)]
)
def test_compare_refuses_other_settings(trained, no_training, field, value):
    changed = {field.removeprefix("compressor."): value}
    with pytest.raises(UserError, match=rf"lgc_ps-seed0 holds .*{field} was .*, is {value}"):
        compare(asked(trained, ("lgc_ps",), **changed))


@pytest.mark.slow
def test_new_setting_is_no_difference(trained, tmp_path, no_training):
    folder = tmp_path / "lgc_ps-seed0"
    shutil.copytree(trained / "lgc_ps-seed0", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["compressor"]["scale"], config["clip_norm"]
    (folder / "config.json").write_text(json.dumps(config))
    compare(asked(tmp_path, ("lgc_ps",)))


@pytest.mark.slow
def test_diverging_run_stops_no_other(trained, tmp_path, monkeypatch):
    def run(config, console):
        if isinstance(config.compressor, LgcPs):
            raise launch.NonFinite(3, "the loss is inf", "nothing is kept")
        shutil.copytree(trained / "baseline-seed0", config.run_dir)
        return 0

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(UserError, match="1 of 2 runs did not finish"):
        compare(asked(tmp_path, ("lgc_ps", "baseline")))
    assert "stopped at step 3" in (tmp_path / "report.md").read_text()


def test_seeds_are_pooled_and_paired():
    runs = [made_up("a0", 0.90), made_up("a1", 0.80, seed=1), made_up("a2", 0.70, seed=2),
            made_up("t1", 0.79, "topk", 1, 10), made_up("t0", 0.90, "topk", 0, 10)]  # fmt: skip
    base, topk = groups = pool(runs)
    assert (topk.label, topk.seeds, base.seeds) == ("topk", (0, 1), (0, 1, 2))
    f = figures(topk, groups)
    assert f.result.mean == pytest.approx(84.5) and f.result.std == pytest.approx(7.7782, abs=1e-3)
    assert f.against is not None and (f.pairs, f.against.mean) == (2, pytest.approx(-0.5))
    assert f.against.std == pytest.approx(0.70711, abs=1e-4)
    assert f.total == 10 and f.seconds == {"last": 1.0}
    table = score_table(groups, groups)
    assert "-0.50 ± 0.71 (2 pairs) |  |" in table


def test_ages_of_last_diagnose_step():
    lines = [{"step": 1, "oldest/a": 1.0, "mean_age/a": 1.0}, {"step": 5, "oldest/a": 5.0, "mean_age/a": 2.0},
             {"step": 9}]  # fmt: skip
    later = [{"step": 5, "oldest/a": 7.0, "oldest/b": 3.0, "mean_age/a": 5.0, "mean_age/b": 1.0}]
    runs = [made_up("a", 0.9), made_up("t0", 0.8, "topk", 0, lines=lines), made_up("t1", 0.8, "topk", 1, lines=later)]
    _, topk = groups = pool(runs)
    assert age_table(groups) == "| layer | topk: oldest / mean |\n|:---|---:|\n| a | 6 / 4 |"  # 3.5 to even
    assert age_table([topk._replace(runs=topk.runs[1:])]).endswith("| a | 7 / 5 |\n| b | 3 / 1 |")
    assert age_table(groups[:1]) == ""


def test_reconstruction_and_score_before_compression():
    """What `bench accuracy` showed: the score where compression starts, and cosines beside trivial codes."""
    cosines = {"reconstruction_cosine": 0.6, "reconstruction_cosine_p5": 0.5, "ceiling_cosine": 0.8,
               "signs_means_cosine": 0.55, "without_code_cosine": 0.58, "relative_error": None}  # fmt: skip
    runs = [made_up("base", 0.9)]
    for seed, before in enumerate((0.2, 0.3)):
        run = made_up(f"lgc{seed}", 0.8, "lgc_ps", seed)
        phases = [{**run.summary["phases"][0], "name": "dense", "test_accuracy": before}, *run.summary["phases"]]
        runs.append(run._replace(summary=run.summary | cosines | {"phases": phases}))
    groups = pool(runs)
    head, _, base, lgc = score_table(groups, groups).splitlines()
    at = head.split(" | ").index("before compression")
    assert (base.split(" | ")[at], lgc.split(" | ")[at]) == ("", "25.00 ± 7.07")
    assert "before compression" not in score_table(groups[:1], groups)
    *_, row = reconstruction_table(groups).splitlines()
    assert row == "| lgc_ps | 0.600 | 0.500 | 0.800 | 0.550 | 0.580 | n/a | 0.750 |"
    assert reconstruction_table(groups[:1]) == ""


def test_difference_of_means_without_common_seed():
    base, topk = pool([made_up("a", 0.9), made_up("b", 0.8, "topk", 5)])
    difference, pairs = against(topk, base)
    assert (difference.mean, difference.std, pairs) == (pytest.approx(-10), None, 0)


def test_settings_separate_rows():
    runs = [made_up("a", 0.9), made_up("b", 0.8, "topk", extra={"alpha": 0.1}),
            made_up("c", 0.8, "topk", extra={"alpha": 0.2}), made_up("d", 0.8, "lgc_ps", nodes=4)]  # fmt: skip
    groups = pool(runs)
    assert [group.label for group in groups] == ["baseline", "topk (alpha=0.1)", "topk (alpha=0.2)", "lgc_ps"]
    assert baseline_of(groups[1], groups) is groups[0] and baseline_of(groups[3], groups) is None


def test_labels_and_settings_table():
    falling = {"schedule": "validation", "correction": {"every": 50, "decay": 0.3}}
    steady = {"schedule": "cosine", "correction": {"every": 0, "decay": 0.1}}
    runs = [made_up("a", 0.9, **steady), made_up("b", 0.9, **falling),
            made_up("c", 0.8, "topk", extra={"alpha": 0.1}, **steady),
            made_up("d", 0.8, "topk", extra={"alpha": 0.1}, **falling),
            made_up("e", 0.8, "topk", extra={"alpha": 0.2}, **falling)]  # fmt: skip
    groups = pool(runs)
    assert [group.label for group in groups] == [
        "baseline (schedule=cosine)", "baseline (schedule=validation)", "topk (alpha=0.1, schedule=cosine)",
        "topk (alpha=0.1, schedule=validation)", "topk (alpha=0.2, schedule=validation)"]  # fmt: skip
    rows = settings_table(groups, groups).splitlines()[2:]
    assert rows[1] == ("| baseline (schedule=validation) | schedule validation, correction.every 50, "
                       "correction.decay 0.3 |")  # fmt: skip
    assert rows[4].endswith("| alpha 0.2, schedule validation, correction.every 50, correction.decay 0.3 |")


def test_seeds_of_runs_in_several_processes_are_one_row():
    ports = {seed: {"coordinator": f"host:{5000 + seed}", "num_processes": 2, "process_id": 0} for seed in (0, 1)}
    runs = [made_up(f"rows/a/{seed}", 0.9, seed=seed, distributed=ports[seed]) for seed in ports]
    assert [group.seeds for group in pool(runs)] == [(0, 1)]


def test_a_ramp_is_not_before_compression():
    run = made_up("rows/a/0", 0.9, "dgc")
    last = run.summary["phases"][0]
    for name, shown in (("top-k 25 %", ""), ("dense", "9.17")):
        run.summary["phases"] = [{**last, "name": name, "test_accuracy": 0.0917}, last]
        lines = score_table(pool([run]), pool([run])).splitlines()
        assert ("before compression" in lines[0]) == bool(shown) and shown in lines[2]


def test_a_smoothed_band_shows_how_seeds_differ_and_not_steps():
    offsets = {0: 0.0, 1: 0.1}

    def run(seed):
        lines = [{"step": i, "loss": 2 + offsets[seed] + (-1) ** (i + seed)} for i in range(500)]
        return made_up(f"rows/one/{seed}", 0.9, seed=seed, lines=lines)

    groups = pool([run(seed) for seed in offsets], by_folder=True)
    _, mean, low, high = plots.points(groups[0], "loss", smoothed=True)
    assert np.allclose([mean[9:-9], low[9:-9], high[9:-9]], np.array([[2.05], [2.0], [2.1]]))
    _, _, low, high = plots.points(groups[0], "loss")
    assert np.all(high - low > 1.8)


def test_fewest_bytes_of_each_method_that_is_as_good():
    rows = [("full", "dense", 0.90, 1000), ("much", "topk", 0.95, 400), ("less", "topk", 0.895, 200),
            ("least", "topk", 0.85, 100), ("poor", "egc", 0.8, 50)]  # fmt: skip
    runs = [made_up(f"rows/{row}/x", score, method, total=total) for row, method, score, total in rows]
    groups = pool(runs, by_folder=True, baseline="full")
    lines = fewest_bytes_table(groups, groups).splitlines()[2:]
    assert lines == ["| topk | none |  |  |  | 3 | less: 200 B, -0.50 (1 pair) |", "| egc | none |  |  |  | 1 |  |"]
    for name, method, score, total in (("full", "dense", 0.90, 1000), ("much", "topk", 0.95, 400)):
        runs += [made_up(f"rows/{name}/{seed}", score, method, seed, total=total) for seed in (1, 2)]
    groups = pool(runs, by_folder=True, baseline="full")
    line = fewest_bytes_table(groups, groups).splitlines()[2]
    assert line == "| topk | much | 4 B | 400 B | +5.00 ± 0.00 (3 pairs) | 3 | less: 200 B, -0.50 (1 pair) |"
    assert [group.label for group in plots.near_baseline(groups)] == ["much", "less"]  # 5 below: more than 3 tolerances
    assert plots.as_good_from(groups) == pytest.approx(89.0)
    alone = pool(runs[1:3], by_folder=True)
    assert fewest_bytes_table(alone, alone) == "" and plots.as_good_from(alone) is None


def test_rows_by_folder_beside_a_row_of_choice():
    runs = [made_up("rows/late/b", 0.8, "topk", 0), made_up("rows/adam/a", 0.9, learning_rate=2.0),
            made_up("rows/late/c", 0.7, "topk", 1), made_up("rows/two/d", 0.6, "topk", extra={"alpha": 0.5}),
            made_up("rows/two/e", 0.6, "lgc_ps")]  # fmt: skip
    groups = pool(runs, by_folder=True, baseline="late")
    assert [group.label for group in groups] == ["late", "adam", "two, topk (alpha=0.5)", "two, lgc_ps"]
    assert groups[0].seeds == (0, 1) and {baseline_of(group, groups).label for group in groups} == {"late"}
    assert figures(groups[1], groups).against.mean == pytest.approx(10)  # of the common seed, whatever differs
    said = ["late | none", "adam | learning_rate 2.0", "two, topk (alpha=0.5) | alpha 0.5", "two, lgc_ps | none"]
    assert settings_table(groups, groups).splitlines()[2:] == [f"| {row} |" for row in said]
    other = made_up("rows/other/a", 0.9)
    other.summary["workload"] = "digits"
    everything = pool([*runs, other], by_folder=True, baseline="late")
    (apart,) = (group for group in everything if group.label == "other")
    assert baseline_of(apart, everything) is None
    twice = pool([made_up("one/adam/a", 0.9), made_up("two/adam/a", 0.8), made_up("two/b/a", 0.7)], by_folder=True)
    assert [group.label for group in twice] == ["one/adam", "two/adam", "b"]
    with pytest.raises(UserError, match=r"got 'lat'; did you mean late.*the rows are adam, late"):
        pool(runs, by_folder=True, baseline="lat")


def test_metrics_of_published_runs_are_read_packed(tmp_path):
    lines = b"".join(b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2))
    (tmp_path / "metrics.jsonl.gz").write_bytes(gzip.compress(lines))
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]
    (tmp_path / "metrics.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl\.gz"):
        read(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 7}\n')
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [7]


def test_score_over_measured_seconds(tmp_path):
    evaluated = [{"step": 5, "phase": "last"}, {"step": 10, "phase": "last", "test_accuracy": 0.5}]
    groups = pool([made_up("rows/a/x", 0.9, lines=evaluated), made_up("rows/b/x", 0.8, "topk", lines=evaluated)],
                  by_folder=True)  # fmt: skip
    cells = [(2, "100mbit", "dense", 3.0), (2, "10mbit", "dense", 9.0), (2, "10mbit", "topk", 1.0),
             (2, "unlimited", "dense", 0.1), (4, "1gbit", "dense", 0.1)]  # fmt: skip
    found = {"settings": {}, "methods": {}, "versions": {}, "cells": {
        str(at): {"hosts": hosts, "rate": rate, "method": method, "full": [seconds, 10 * seconds, seconds]}
        for at, (hosts, rate, method, seconds) in enumerate(cells)}}  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(found))

    def told(**rows):
        (tmp_path / "seconds.json").write_text(json.dumps({"results": "results.json", "rows": rows}))
        return measured(tmp_path / "seconds.json", groups)

    times = told(a="dense", b="topk")
    assert list(times.items()) == [("10mbit", {"a": 9.0, "b": 1.0}), ("100mbit", {"a": 3.0})]  # slowest first
    assert "| b | 1.000 |  | 0.2 |  |" in seconds_table(groups, times)
    draw_over_time(groups, tmp_path / "seconds.png", times)
    assert (tmp_path / "seconds.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="names the row 'c'; the rows are a, b"):
        told(c="dense")
    with pytest.raises(UserError, match="no measurement 'qsgd' with 2 hosts; it has dense, topk"):
        told(b="qsgd")
    for wrong in ([], {"rows": {"a": ["dense"]}, "results": "results.json"}, {"rows": {}, "results": "results.json"}):
        (tmp_path / "seconds.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="must hold"):
            measured(tmp_path / "seconds.json", groups)
    for cell in ({"hosts": 2, "full": [1]}, "cell", {"hosts": 2, "rate": "fast", "method": "dense", "full": [1]}):
        (tmp_path / "results.json").write_text(json.dumps(found | {"cells": {"0": cell}}))
        with pytest.raises(UserError, match=r"results\.json is not a file of bench network"):
            told(a="dense")
    alone = pool([made_up("rows/a/x", 0.9, nodes=4)], by_folder=True)  # of its own number of hosts
    (tmp_path / "results.json").write_text(json.dumps(found))
    (tmp_path / "seconds.json").write_text('{"results": "results.json", "rows": {"a": "dense"}}')
    assert measured(tmp_path / "seconds.json", alone) == {"1gbit": {"a": 0.1}}
    alone[0].runs[0].summary["workload"] = "digits"
    with pytest.raises(UserError, match="one workload"):
        measured(tmp_path / "seconds.json", [*groups, *alone])


def test_same_run_twice_is_an_error():
    with pytest.raises(UserError, match="a and b have the same settings and seed"):
        pool([made_up("a", 0.9), made_up("b", 0.9)])


def test_points_at_common_steps():
    first = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 3}]
    second = [{"step": 1, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    group = Group("x", (made_up("a", 0.9, lines=first), made_up("b", 0.9, seed=1, lines=second)))
    assert [list(values) for values in plots.points(group, "loss")] == [[1], [3.0], [2.0], [4.0]]


def test_bytes_of_a_step_leave_out_earlier_phases_and_what_travels_once():
    lines = [{"step": step, "bytes": sent, "phase": phase} for step, sent, phase in (
        (1, 1000.0, "dense"), (2, 500.0, "last"), (3, 12.0, "last"), (4, 8.0, "last"))]  # fmt: skip
    assert made_up("a", 0.5, "topk", lines=lines).step_bytes == 10.0
    assert made_up("a", 0.5, "topk", lines=lines[:2]).step_bytes == 500.0  # the only one
    # with local steps most steps send none, and the weights travel in the first round
    sent = [700.0, 0.0, 0.0, 30.0, 0.0, 0.0, 30.0]  # a phase begins with its exchange
    lines = [{"step": i, "bytes": x, "phase": "last"} for i, x in enumerate(sent, start=1)]
    assert made_up("a", 0.5, "topk", lines=lines, local={"every": 3}).step_bytes == 10.0
    assert made_up("a", 0.5, "topk", lines=lines, local={"every": 6, "fragments": 2}).step_bytes == 10.0


def test_bytes_of_local_steps_are_those_of_a_step_not_of_a_round():
    groups = pool([made_up("a", 0.5), made_up("b", 0.5, "topk", local={"every": 4})])
    assert [figures(group, groups).worker for group in groups] == [4.0, 1.0]


@pytest.mark.parametrize("bucket", ["", "s3://bucket/run"])
def test_one_node_sends_something_only_in_rounds(bucket):
    line = {"phase": "last", "bytes": 3.0}
    group, *_ = pool([made_up("a", 0.5, "topk", nodes=1, lines=[line], rounds={"bucket": bucket})])
    axes = Figure().subplots()
    plots._point(axes, group, lambda run: run.step_bytes, "black", "o", False)
    assert axes.get_legend_handles_labels()[1] == [f"topk{'' if bucket else ': sends nothing, not shown'}"]


def test_runs_without_metrics_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "find", lambda paths: ([made_up("a", 0.5, "topk")], []))
    assert "| topk |" in write([tmp_path], tmp_path).read_text()


def test_a_summary_that_lacks_figures_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot read the run in .*: its summary.json has no 'method'"):
        find([tmp_path])


def test_runs_are_found_below_a_folder_at_any_depth(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "read_run", lambda folder: folder)
    folders = [tmp_path / "rows" / "topk" / "topk-seed0", tmp_path / "other-seed0"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "summary.json").write_text("{}")
    (unfinished := tmp_path / "rows" / "late").mkdir()
    (unfinished / "config.json").write_text("{}")
    found, others = find([tmp_path])
    assert sorted(found) == sorted(folders) and others == [unfinished]
    (chosen := tmp_path / "rows" / "chosen").mkdir()
    (chosen / "linked").symlink_to(folders[0])
    assert find([chosen])[0] == [chosen / "linked"]


def test_hours_leave_out_times_of_waiting():
    run = made_up("a", 0.5, lines=[{"step": 1, "bytes": 1.0, "phase": "last", "seconds": 3600.0}])
    assert run.hours == 0.5 * 10 / 60 / 60  # the phase's median, ten steps


@pytest.mark.parametrize("seeds, said", [(2, ""), (3, "yes")])
def test_as_good_as_the_baseline_is_said_of_three_pairs_or_more(seeds, said):
    runs = [made_up(f"{method}{seed}", 0.9, method, seed) for method in ("dense", "topk") for seed in range(seeds)]
    groups = pool(runs)
    head, _, _, row = score_table(groups, groups).splitlines()
    at = head.split(" | ").index("within 1.0 point")
    assert row.split(" | ")[at] == said and f"+0.00 ± 0.00 ({seeds} pairs)" in row


def test_lists_of_methods_and_seeds():
    assert words(["a,b", "c"]) == words(["a", "b,", "c"]) == ["a", "b", "c"]
    assert seeds_of(["0,1", "2"]) == [0, 1, 2] and seeds_of(["0,00,1"]) == [0, 1]
    with pytest.raises(UserError, match="whole numbers"):
        seeds_of(["one"])
    with pytest.raises(UserError, match="the same method"):
        variants_of(["topk", "topk"])


def test_set_overrides(tmp_path):
    given = ["learning_rate=0.3", "model.norm=group", "dgc.clip-norm=2", "dgc.factor_masking=False", "dgc.momentum=0.5",
             "dgc.batch_size=64", "correction.every=5", "dgc.correction.decay=2"]  # fmt: skip
    options = options_of(given, ["baseline", "dgc"])
    baseline, ours = (
        launch.configure(settings, "digits_convnet5", 0, None, tmp_path / "new", {"steps": 7}, options[name])
        for name, settings in (("baseline", Dense()), ("dgc", Dgc()))
    )
    assert (baseline.learning_rate, ours.learning_rate, ours.steps) == (0.3, 0.3, 7)
    assert baseline.model.norm == ours.model.norm == "group"
    assert (ours.compressor.clip_norm, ours.compressor.factor_masking) == (2.0, False)
    assert (ours.compressor.momentum, ours.momentum) == (0.5, baseline.momentum)  # both have one: the method's own
    assert (ours.batch_size, baseline.batch_size) == (64, 128)
    assert (baseline.correction.every, ours.correction.every, ours.correction.decay) == (5, 5, 2.0)


def test_an_option_that_no_method_has_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--autoencoder-steps 4: neither the run nor baseline or topk has it"):
        launch.train_all({"baseline": Dense(), "topk": TopK()}, tmp_path, "digits_convnet5", [0], None,
                         {"steps": 7, "warmup_steps": 2, "autoencoder_steps": 4})  # fmt: skip


def test_configure_keeps_workload(tmp_path):
    config = launch.configure(LgcPs(), "digits_convnet5", 3, None, tmp_path / "new", {})
    assert (config.steps, config.seed, config.compressor.warmup_steps, config.resume) == (300, 3, 20, False)
    assert dataclasses.is_dataclass(config)
