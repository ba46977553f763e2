"""`experiments papers` and `papers_bytes`: figures that fit the runs, and ours next to what the papers print."""


import pytest
from report_helpers import made_up

from experiments.commands import main
from experiments.papers import figures, reported, wallclock
from experiments.papers.command import Papers
from experiments.papers.latency import milliseconds, values_coded
from experiments.papers.tables import paper_bytes
from jgc.lab.report.runs import pool
from jgc.training.errors import UserError


def test_figures_13_and_14(tmp_path):
    lines = [{"step": i, "loss": 1 / i, "autoencoder_reconstruction": 1 / i, "autoencoder_similarity": 0.1 / i}
             for i in range(1, 20)]  # fmt: skip
    groups = pool([made_up(s, 0.5, "topk", extra={"strategy": s}, lines=lines) for s in ("fixed", "warmup")])
    figures.strategies(groups, tmp_path / "13.png")
    extra = {"lambda_similarity": 0.5}
    groups = pool([made_up(str(n), 0.5, "lgc_ps", extra=extra, nodes=n, lines=lines) for n in (2, 4)])
    figures.autoencoder(groups, tmp_path / "14.png")
    with pytest.raises(UserError, match=r"differ in compressor\.strategy"):
        figures.strategies(groups, tmp_path / "no.png")
    with pytest.raises(UserError, match="figure 14 needs"):
        figures.autoencoder(pool([made_up("a", 0.9)]), tmp_path / "no.png")


def test_figure_7_has_an_uncompressed_run_of_the_same_settings(tmp_path):
    lines = [{"step": 1, "bytes": 1.0, "phase": "last", "seconds": 1.0}]
    groups = pool([made_up("a", 0.5, lines=lines), made_up("b", 0.5, "topk", nodes=4, lines=lines)])
    with pytest.raises(UserError, match=r"figure 7 needs an uncompressed run .* set like topk"):
        wallclock.draw(groups, tmp_path / "no.png", 1e6, "8mbit")
    with pytest.raises(UserError, match=r"figure 7 needs metrics\.jsonl of every run"):
        wallclock.draw(pool([made_up("a", 0.5)]), tmp_path / "no.png", 1e6, "8mbit")


def test_paper_figures():
    (row,) = reported.rows_of("cifar10_resnet50", "lgc_ps")
    assert (row.accuracy, row.ratio, row.megabytes) == (93.27, (5709, 8616), (0.017, 0.012))
    assert [(row.paper, row.accuracy) for row in reported.rows_of("cifar10_resnet50", "dense")] == [
        ("LGC", 91.88),
        ("EGC", 86.08),
    ]
    assert paper_bytes(*reported.rows_of("cifar10_resnet50", "dense")) == ("102.2", "1x; 1x in values")
    (dropped,) = reported.rows_of("ptb_lstm", "gradient_dropping")
    assert (dropped.accuracy, dropped.ratio, dropped.paper, dropped.table) == (67.84, (100,), "EGC", "IV")
    assert reported.EGC_SWEEPS["nodes"]["egc"]["8"] == (70.03, 1044)
    assert reported.EGC_SWEEPS["ratio"]["egc"]["1024"][1] == 1041
    assert {row.workload for row in reported.REPORTED} == set(reported.WORKLOADS)
    assert reported.rows_of("digits", "dense") == ()


def test_page_has_ours_next_to_the_papers_and_says_which_figures_do_not_fit(tmp_path, monkeypatch, capsys):
    lines = [{"step": i, "loss": 1 / i, "test_accuracy": 0.5, "seconds": 0.1, "phase": "last", "bytes": 8.0}
             for i in range(1, 5)]  # fmt: skip
    run = made_up("a", 0.5, "topk", extra={"strategy": "fixed"}, lines=lines)
    monkeypatch.setattr("experiments.papers.command.find", lambda paths: ([run], []))
    Papers((tmp_path,), tmp_path / "out", (7, 13, 10)).run("the command")
    text, error = (tmp_path / "out" / "papers.md").read_text(), capsys.readouterr().err
    for number, why in ((7, "figure 7 needs an uncompressed run"), (13, "figure 13 compares runs that differ")):
        line = f"Figure {number} is left out: {why}"
        assert line in text and line in error
        assert f"(figure{number}.png)" not in text and not (tmp_path / "out" / f"figure{number}.png").exists()
    assert "(figure10.png)" in text and (tmp_path / "out" / "figure10.png").exists()
    assert "| topk | 50.00 | 91.82 (LGC, Table VI) |" in text
    assert "102.2 MB is the size" in text and "(not trained in the runs above: not to be compared)" in text


def test_lengths_of_codes_are_read_from_the_bytes_of_a_run():
    run = made_up("a", 0.5, "lgc_ps")
    run.summary["phases"][-1]["wire"]["logical"]["leader"] = {"up": {"code": 4.0 * 4 * 7}}
    (group,) = pool([run])
    assert values_coded(group) == 16 * 7  # a code of four channels, a sixteenth as long as its input
    assert set(milliseconds(values_coded(group), "linear", repeats=1)) == {"encode", "decode"}


def test_bytes_next_to_the_papers(capsys):
    words = "--workload cifar10_resnet50 --alpha 0.001 --methods baseline,lgc_ps --set lgc_ps.positions=leader"
    assert main(["papers_bytes", *words.split(), *"--set model.stem=imagenet --set model.classes=1000".split()]) == 0
    said = capsys.readouterr().out
    assert "with 25,557,032 parameters" in said  # Table VI: 102.2 MB
    (row,) = [line for line in said.splitlines() if line.startswith("| lgc_ps |")]
    assert "| 840.7x | 1,703x |" in row and "| 0.017 / 0.012 | 5,709x / 8,616x |" in row
