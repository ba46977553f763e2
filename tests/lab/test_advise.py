"""`jgc advise`: the model by hand, what it concludes, the fit to a run of `bench network`, and the command line."""

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console
from training_helpers import wide_model

import jgc
from experiments import predictions as advise_check
from experiments.commands import main as experiment
from jgc.comm.ledger import bytes_sent
from jgc.compress import METHODS, PowerSgd, powersgd
from jgc.lab.advise import (
    advice as verdicts,
    evidence,
    page as pages,
    results as advise_results,
)
from jgc.lab.advise.command import Advise, predict
from jgc.lab.advise.measure import collectives, measure
from jgc.lab.advise.model import Example, Link, Row, communication, contention, fit, step
from jgc.lab.advise.results import Place
from jgc.lab.commands import main
from jgc.lab.shared.rate import bits
from jgc.training.run import setup
from jgc.training.settings import workloads
from jgc.training.settings.config import Config
from jgc.training.settings.options import read
from jgc.types import Sent

PAYLOADS = {  # op, payload in bytes, how many
    "psum_f32": ("all-reduce", 4_000_000, 1),
    "psum_f16": ("all-reduce", 2_000_000, 1),
    "topk": ("all-gather", 8_000, 1),
    "powersgd": ("all-reduce", 30_000, 2),
    "signsgd": ("all-gather", 130_000, 1),
    "qsgd": ("collective-permute", 600_000, 6),
}
COMPUTE = {"psum_f32": 0.0, "psum_f16": 0.001, "topk": 0.02, "powersgd": 0.04, "signsgd": 0.01, "qsgd": 0.03}


def sent_of(name, hosts):
    """What the invented methods send; None for PyTorch's."""
    if name not in PAYLOADS:
        return None
    op, payload, times = PAYLOADS[name]
    return (Sent("all-reduce", "flag", Fraction(4)),) + times * (Sent(op, "values", bytes_sent(op, payload, hosts)),)


def rows(computation=0.1):
    return [Row(name, computation, seconds, sent_of(name, 4)) for name, seconds in COMPUTE.items()]


# --- the model ------------------------------------------------------------------------------------------------------


def sent(op, count):
    return Sent(op, "values", Fraction(count))


@pytest.mark.parametrize(("messages", "hosts", "link", "seconds"), [
    ([sent("all-reduce", 1500)], 4, Link(1e6, 0.001, 0.01, 1.0), 0.01 + 6 * 0.001 + 0.0015),
    ([sent("all-gather", 1500)], 4, Link(1e6, 0.001, 0.01, 0.5), 0.01 + 3 * 0.001 + 0.003),
    ([sent("collective-permute", 1000)] * 2, 3, Link(1e6, 0.001, 0.01, 1.0), 2 * (0.01 + 0.001 + 0.001)),
    ([sent("collective-permute", 1000)], 2, Link(1e6, 0.0, 0.0, 1.0), 0.002),  # one direction after the other
    ([sent("all-gather", 1000)], 8, Link(math.inf, 0.0, 0.01, 1.0, contention=4.0), 0.04),
    ([sent("all-gather", 1000)], 8, Link(1e6, 0.0, 0.0, 1.0, limit=2e6, contention=4.0), 0.002),  # processors limit
    ([sent("all-gather", 1000)], 8, Link(1e6, 0.0, 0.0, 1.0, limit=8e6, contention=4.0), 0.001),  # the cable does
    ([sent("bucket", 1000)], 4, Link(1e6, 0.1, 0.0, 0.5), 5 * 0.1 + 4 * 0.002),  # one up, then three down
    ([], 4, Link(1e6), 0.0),
])  # fmt: skip
def test_communication_by_hand(messages, hosts, link, seconds):
    assert communication(messages, hosts, link) == pytest.approx(seconds)


@given(st.floats(1e3, 1e12), st.floats(1.0, 1e6), st.integers(2, 64), st.floats(1e6, 1e12))
def test_time_falls_with_bandwidth(rate, times, hosts, limit):
    for name in PAYLOADS:
        row = Row(name, 0.1, 0.01, sent_of(name, hosts))
        slow, fast = (step(row, hosts, Link(r, limit=limit)) for r in (rate, rate * times))
        assert fast <= slow


def test_local_steps_share_an_exchange():
    row, link = Row("topk", 0.1, 0.02, sent_of("topk", 4)), Link(1e6)
    exchange = step(row, 4, link) - 0.1
    assert step(row._replace(every=30), 4, link) == pytest.approx(0.1 + exchange / 30)
    assert row._replace(every=30).bytes == row.bytes / 30


@given(st.floats(1e4, 1e10), st.integers(2, 63))
def test_time_grows_with_hosts(rate, hosts):
    for name in PAYLOADS:
        if name != "qsgd":  # a permute between two hosts takes twice as long
            here, there = (communication(sent_of(name, k), k, Link(rate)) for k in (hosts, hosts + 1))
            assert there >= here


# --- the conclusion -------------------------------------------------------------------------------------------------


def test_uncompressed_wins_at_unlimited_rate():
    link = Link(math.inf, latency=0.0, overhead=0.0)
    verdict = verdicts.conclusion(verdicts.advise(rows(), 4, link))[0]
    assert verdict == "no: uncompressed f32 takes 0.1 s a step, the best method, signsgd, 0.11 s, 1.1 times as long."


def test_pays_on_slow_link():
    advice = verdicts.advise(rows(), 4, Link(12.5e6, 0.0, 0.0, 1.0))
    verdict = verdicts.conclusion(advice)[0]
    assert advice.rows[0].method == "topk" and advice.rows[-1].method == "psum_f32"
    mine, f32 = 0.12 + 24_004 / 12.5e6, 0.1 + 6_000_004 / 12.5e6
    assert verdict.startswith(f"yes: topk takes {mine:.3g} s a step, {f32 / mine:.3g} times faster than uncompressed")
    assert "than uncompressed f16" in verdict


def test_f16_is_a_baseline():
    """Where f16 wins over f32 and over all methods, compression does not pay."""
    slow = [row._replace(compression=1.0) if row.method not in verdicts.UNCOMPRESSED else row for row in rows()]
    verdict = verdicts.conclusion(verdicts.advise(slow, 4, Link(125e6, 0.0, 0.0, 1.0)))[0]
    assert verdict.startswith("no: uncompressed f16 takes 0.125 s a step (uncompressed f32 0.148 s), the best method, ")


def test_turning_point():
    advice = verdicts.advise(rows(), 4, Link(12.5e6))
    ((low, rate),) = verdicts.paying(advice)
    assert low == 0 and 12.5e6 < rate < math.inf
    for factor, word in ((0.9, "yes"), (1.1, "no")):
        there = verdicts.advise(rows(), 4, Link(rate * factor))
        assert verdicts.conclusion(there)[0].startswith(word)
    assert f"it pays below about {bits(rate)}" in " ".join(verdicts.conclusion(advice))


def test_run_dir_excludes_config(tmp_path, capsys):
    assert main(["advise", *CONFIG, "--run-dir", str(tmp_path), "--bandwidth", "1gbit", "--hosts", "4"]) == 2
    assert "--method does not go with --run-dir" in capsys.readouterr().err


def test_a_run_of_a_gpt_asks_for_records_of_text():
    run = str(Path(__file__).parents[2] / "docs" / "results" / "local_steps" / "network.json")
    words = ["--run-dir", run, "--bandwidth", "100mbit", "--hosts", "4", "--methods", "dense"]
    advice = predict(read(Advise, words, "advise"))
    assert advice.kind == "text" and "windows of 128 tokens a host" in advice.about


def test_a_row_of_another_phase_sends_that_phases_bytes():
    of = advise_results.sent_in({"settings": {"model": "convnet5"}})
    sampling, last = (sum(s.bytes for s in of(name, 4)) for name in ("gradiveq:phase=sampling", "gradiveq"))
    assert sampling > 10 * last


def test_without_an_uncompressed_row_there_is_nothing_to_compare_with():
    said = verdicts.conclusion(verdicts.advise([Row("topk", 0.1, 0.0, ())], 4, Link(1e6), kind="images"))
    assert said[0].startswith("nothing to compare with: no uncompressed exchange was measured")


def test_limit_from_unlimited_rate():
    found = invented()
    free = advise_results.limit(found, 4, sent_of)
    assert free == advise_results.calibrated(found, Place(4, "unlimited"), sent_of).limit < math.inf
    found["cells"] = {name: cell for name, cell in found["cells"].items() if cell["rate"] != "unlimited"}
    assert advise_results.limit(found, 4, sent_of) == math.inf


def test_two_ranges_of_bandwidth():
    quick = Row("cast", 0.1, 0.001, (sent("all-gather", 3_900_000),))
    small = Row("topk", 0.1, 1.0, (sent("all-gather", 10),))
    plain = Row("psum_f32", 0.1, 0.01, (sent("all-reduce", 3_500_000),))
    link = Link(1e6, latency=0.0, overhead=0.0, efficiency=1.0)
    (_, slow), (fast, end) = verdicts.paying(verdicts.advise([plain, quick, small], 4, link))
    assert slow == pytest.approx(3.5e6 / 0.99, rel=0.02) and fast == pytest.approx(0.4e6 / 0.009, rel=0.02)
    assert end == math.inf
    for rate in (0.9 * slow, 1.1 * slow, 0.9 * fast, 1.1 * fast):
        said = verdicts.conclusion(verdicts.advise([plain, quick, small], 4, link._replace(rate=rate)))
        assert said[0].startswith("yes" if rate < slow or rate > fast else "no")
        assert f"below about {bits(slow)} and above about {bits(fast)}" in " ".join(said)


def test_control_is_not_recommended():
    free = [Row("silent", 0.1, 0.0, ()), Row("dense", 0.1, 0.0, ())]
    advice = verdicts.advise([*rows(), *free], 4, Link(math.inf))
    assert verdicts.best(advice, compressed=True).method in COMPUTE
    assert verdicts.conclusion(advice)[0].startswith("no: dense takes 0.1 s")
    assert any(cells[0] == "silent (control)" for cells in (pages.cells(row, advice) for row in advice.rows))


def test_fast_method_without_accuracy_on_record_is_not_recommended():
    fast = Row("random_k", 0.1, 0.0, ())
    advice = verdicts.advise([*rows(), fast], 4, Link(12.5e6), kind="images")
    said = verdicts.conclusion(advice)
    assert said[0].startswith("yes: topk takes") and advice.rows[0].method == "topk"
    assert "On record for topk on images: test accuracy +0.35 points (cifar10_resnet20" in said[1]
    assert "Faster, but not on record as keeping accuracy on images: random_k." in said[1]
    by_name = {row.method: pages.cells(row, advice)[-1] for row in advice.rows}
    assert (by_name["random_k"], by_name["topk"], by_name["psum_f32"]) == ("none", "+0.35", "")


def test_method_that_loses_accuracy_is_not_recommended():
    plain, fast = Row("psum_f32", 0.1, 0.0, (sent("all-reduce", 1e9),)), Row("lgc_ring", 0.1, 0.0, ())
    advice = verdicts.advise([fast, plain], 4, Link(12.5e6), kind="images")
    assert verdicts.best(advice, compressed=True) is None and advice.rows[0].method == "psum_f32"
    (said,) = verdicts.conclusion(advice)
    assert said.startswith("no advice: of lgc_ring none is on record as keeping its accuracy on images")
    assert pages.as_json(advice)["rows"][1]["accuracy"] == "-3.27, too far"
    assert "faster than uncompressed f32 (85.1 s): lgc_ring. Train" in said
    assert said.endswith("compare --methods dense,lgc_ring --workload cifar10_resnet20")


def test_powersgd_with_one_all_reduce_has_its_accuracy_and_the_mean_of_its_phases_bytes():
    chosen = Config(compressor=PowerSgd(alternate=True, rank=2), workload="ptb_gpt")
    measured = measure(chosen, 8, ["powersgd"], 1, computation=1.0, parameters=10_000)
    row = next(row for row in measured.rows if row.method.startswith("powersgd"))
    assert pages.accuracy(row, "text") == "+0.50 nats, too far"
    embedding, nodes = {"w": np.zeros((5000, 64), np.float32)}, jgc.make_nodes(8)
    method = powersgd(alternate=True, rank=2)
    even, odd = (sum(s.bytes for s in method.wire(x.value, embedding, nodes).physical) for x in method.schedule[-2:])
    mean = sum(s.bytes for s in collectives(method, method.schedule[-2:], embedding, nodes))
    assert even > 20 * odd and mean == (even + odd) / 2


def test_dense_with_local_steps_saves():
    plain, local = (
        Row(name, 0.1, 0.0, sent_of("psum_f32", 4), every) for name, every in (("psum_f32", 1), ("dense", 30))
    )
    said = verdicts.conclusion(verdicts.advise([plain, local], 4, Link(12.5e6), kind="text"))
    assert said[0].startswith("yes: dense every 30 steps takes 0.117 s a step, 5.2"), said
    diloco = "On record for dense every 30 steps on text: validation loss +0.04 nats (ptb_gpt, AdamW, 3,000 steps, "
    assert said[1].startswith(diloco)
    assert pages.accuracy(Row("topk", 0.1, 0.0, ()), "text") == "+0.52 nats, too far"
    assert pages.accuracy(Row("gradient_dropping", 0.1, 0.0, ()), "text") == "+0.25"  # perplexity
    pictures = verdicts.conclusion(verdicts.advise([plain, local], 4, Link(12.5e6), kind="images"))
    none = "no advice: of dense every 30 steps none is on record as keeping its accuracy on images. In "
    assert pictures[0].startswith(none)
    assert pictures[0].endswith("compare --methods dense --workload cifar10_resnet20 --set local.every=30")


def test_local_steps_are_judged_by_records_of_local_steps():
    rows = [
        Row("psum_f32", 0.1, 0.0, sent_of("psum_f32", 4)),
        *(Row(name, 0.1, 0.0, (), 30) for name in ("qsgd", "gradient_dropping", "topk")),
    ]
    advice = verdicts.advise(rows, 4, Link(12.5e6), kind="text")
    said = verdicts.conclusion(advice)
    assert said[0].startswith("yes: qsgd every 30 steps")
    assert "DiLoCo with 4 bits" in said[1] and "gradient_dropping" not in said[1]
    shown = {row.method: pages.accuracy(row, "text") for row in rows}
    assert shown == {
        "psum_f32": "", "qsgd": "+0.04 nats", "gradient_dropping": "none", "topk": "+0.49 nats, too far",
    }  # fmt: skip


def test_no_method_is_faster_and_none_on_record():
    plain, slow = Row("psum_f32", 0.1, 0.0, ()), Row("topk", 0.1, 0.1, ())
    (said,) = verdicts.conclusion(verdicts.advise([slow, plain], 4, Link(12.5e6), kind="text"))
    assert said == "no: uncompressed f32 takes 0.1 s a step, and no method takes less."


@pytest.mark.parametrize("record", evidence.RECORD, ids=lambda x: f"{x.method}-{x.kind}-{x.every}")
def test_record_stands_on_its_page(record):
    """The page holds the difference, or both figures whose difference it is."""
    method = record.method.partition(":")[0]
    assert method in METHODS and record.kind in ("images", "scenes", "text")
    page = (Path(__file__).parents[2] / record.page).read_text()
    shown = {f"{abs(record.difference):.2f}", f"{abs(record.difference):.1f}"}
    assert method.replace("_", " ").split()[0] in page.lower() and any(text in page for text in shown)


def test_page_and_json_hold_every_row(tmp_path):
    advice = verdicts.advise(rows(), 4, Link(math.inf), "about", {"klt": "too small"})
    page = pages.markdown(advice)
    assert all(f"| {verdicts.name(name)} |" in page for name in COMPUTE)
    assert page.startswith("No: uncompressed f32") and "Left out: klt: too small" in page and "estimate" in page
    pages.write(tmp_path / "out", "Title", "python -m jgc advise", page, pages.as_json(advice))
    data = json.loads((tmp_path / "out" / "advise.json").read_text(), parse_constant=pytest.fail)
    assert data["link"]["rate"] is None and {row["method"] for row in data["rows"]} == set(COMPUTE)
    assert (tmp_path / "out" / "advise.md").read_text().startswith("# Title\n\n    python -m jgc advise\n")


# --- a run of `bench network` ---------------------------------------------------------------------------------------

TRUE = Link(12.5e6, 0.0007, 0.0015, 0.9, 150e6)


def invented(link=TRUE, hosts=(2, 4, 8), rates=("100mbit", "1gbit", "unlimited")):
    """Results as the benchmark writes them, of hosts that do exactly what the model says."""
    cells = {}

    def add(k, rate, method, **parts):
        cells[f"{k}/{rate}/{method}"] = {"hosts": k, "rate": rate, "method": method,
                                         **{part: [seconds] * 3 for part, seconds in parts.items()}}  # fmt: skip

    for k in hosts:
        share = contention(k, 2)
        for rate in rates:
            add(k, rate, advise_results.OWN, computation=0.1 * share, cpu_computation=0.1)
            add(k, rate, "ddp_f32", full=1.0, alone=0.5)
            for name, compression in COMPUTE.items():
                messages = sent_of(name, k)
                here = link._replace(rate=advise_results.rate_of(rate), contention=share)
                alone, busy = (0.1 + compression) * share, float(sum(s.bytes for s in messages)) / link.limit
                add(k, rate, name, alone=alone, full=alone + communication(messages, k, here),
                    cpu_alone=0.1 + compression, cpu_full=0.1 + compression + busy)  # fmt: skip
    settings = {"model": "convnet5", "batch": 2, "machine": "2 CPU cores, x86_64"}
    return {"settings": settings, "cells": cells, "methods": {}, "versions": {}}


def assert_same(found, wanted):
    for name in ("efficiency", "overhead", "latency", "limit"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-3), name


@pytest.mark.parametrize("on", [Place(4, "100mbit"), Place(2, "100mbit"), Place(8, "100mbit")])
def test_fit_recovers_link(on):
    assert_same(advise_results.calibrated(invented(), on, sent_of), TRUE)


def test_fit_recovers_processor_limit():
    found = advise_results.calibrated(invented(), Place(4, "unlimited"), sent_of)
    assert (found.limit, found.overhead) == pytest.approx((TRUE.limit, TRUE.overhead), rel=1e-3)


def test_fit_stays_in_bounds():
    """Steps over the network that are shorter than those without: noise, not a negative latency."""
    noisy = [Example(sent_of(name, 4), -0.001, 0.1, -0.01) for name in PAYLOADS]
    found = fit(noisy, 4, 12.5e6, 2.0)
    assert found.latency >= 0 and found.overhead >= 0 and 0.5 <= found.efficiency <= 1 and found.limit == math.inf


def test_check_of_true_model_has_no_error():
    outcome = advise_check.check(invented(), Place(4, "100mbit"), sent_of)
    assert len(outcome.cells) == 8 * len(COMPUTE) and not any(cell.at == (4, "100mbit") for cell in outcome.cells)
    assert max(abs(cell.error) for cell in outcome.cells) < 1e-3
    assert len(outcome.winners) == 8 and all(w.right and w.pays == w.pays_predicted for w in outcome.winners)
    assert outcome.skipped == ("ddp_f32",)
    page = advise_check.markdown(outcome, invented())
    assert sum(line.startswith(("| 2 |", "| 4 |", "| 8 |")) for line in page.splitlines()) == 8 * (len(COMPUTE) + 1)
    assert "8 of 8 places (100 %; goal: at least 80 %: met)" in page and "Median error 0.0 %" in page


def test_check_finds_errors_and_wrong_winners():
    """Figures that no link explains: every cell of 1 Gbit/s ten times as slow, the fastest of all a hundred times."""
    found = invented()
    first = {w.at.hosts: w.measured.method for w in advise_check.check(found, Place(4, "100mbit"), sent_of).winners
             if w.at.rate == "1gbit"}  # fmt: skip
    for cell in found["cells"].values():
        if cell["rate"] == "1gbit" and "full" in cell:
            cell["full"] = [(100 if cell["method"] == first[cell["hosts"]] else 10) * x for x in cell["full"]]
    outcome = advise_check.check(found, Place(4, "100mbit"), sent_of)
    wrong = {cell.error for cell in outcome.cells if cell.at.rate == "1gbit"}
    assert max(wrong) == pytest.approx(-0.9, abs=1e-3) and min(wrong) == pytest.approx(-0.99, abs=1e-3)
    assert {w.at for w in outcome.winners if not w.right} == {(k, "1gbit") for k in (2, 4, 8)}
    assert not any(w.tied for w in outcome.winners if w.at.rate == "1gbit")
    assert advise_check.as_json(outcome)["winners_right"] == 5


def test_check_skips_missing_cells():
    found = invented()
    del found["cells"]["8/1gbit/topk"]
    del found["cells"]["8/1gbit/qsgd"]["full"]
    for rate in ("100mbit", "1gbit", "unlimited"):
        del found["cells"][f"2/{rate}/topk"]["alone"]  # taken from 4 hosts, half of which wait for a processor
    outcome = advise_check.check(found, Place(4, "100mbit"), sent_of)
    assert len(outcome.cells) == 8 * len(COMPUTE) - 2
    assert max(abs(cell.error) for cell in outcome.cells) < 1e-3


def test_rows_use_processor_times():
    found, failed = advise_results.rows_from(invented(), 16, sent_of, "100mbit", [*COMPUTE, "klt"])
    assert {row.method: pytest.approx(row.compression) for row in found} == COMPUTE
    assert {row.computation for row in found} == {0.1} and failed == {"klt": "not measured in that run"}
    assert found[0].sent == sent_of("psum_f32", 16)


def test_too_few_cells_is_an_error():
    small = invented(hosts=(4,), rates=("100mbit",))
    with pytest.raises(advise_check.UserError, match="nothing has been measured but 4/100mbit"):
        advise_check.check(small, Place(4, "100mbit"), sent_of)
    for name in ("topk", "powersgd", "signsgd", "qsgd"):
        del small["cells"][f"4/100mbit/{name}"]
    with pytest.raises(advise_check.UserError, match="at least 3 methods, got 2"):
        advise_results.calibrated(small, Place(4, "100mbit"), sent_of)


# --- the command line -----------------------------------------------------------------------------------------------

CONFIG = ["--method", "topk"]


@pytest.mark.parametrize(("words", "line"), [
    ([], "give --workload NAME, --method NAME, --config FILE or --parameters N, or --run-dir"),
    (["--method", "topp"], "unknown method 'topp'; did you mean topk?"),
    ([*CONFIG, "--every", "0"], "--local.every must be at least 1 step, got 0"),
    (["--every", "30", "--run-dir", "none"], "--every does not go with --run-dir"),
    (["--parameters", "350e6"], "--parameters needs --computation, the seconds that a step of your model takes"),
    (["--parameters", "350", "--computation", "1"], "--parameters must be from 1e4 to 1e12, such as 350e6, got 350"),
    (["--parameters", "350e6", "--computation", "1", "--batch-size", "8"], "--batch-size does not go with"),
    (["--parameters", "350e6", "--run-dir", "none"], "--parameters does not go with --run-dir"),
    ([*CONFIG, "--hosts", "1"], "--hosts must be at least 2, got 1"),
    ([*CONFIG, "--latency", "-0.1"], "--latency must be seconds, at least 0, got -0.1"),
    ([*CONFIG, "--computation", "nan"], "--computation must be seconds, at least 0, got nan"),
    ([*CONFIG, "--efficiency", "1.2"], "--efficiency must be above 0 and at most 1, got 1.2"),
    ([*CONFIG, "--bandwidth", "fast"], "a rate must be written as 100mbit or 1gbit, got 'fast'"),
    ([*CONFIG, "--methods", "topp"], "unknown method 'topp'; did you mean topk?"),
    ([*CONFIG, "--hosts", "3"], "3 nodes do not divide a batch of 128"),
    ([*CONFIG, "--repeats", "0"], "--repeats must be at least 1, got 0"),
    (["--config", "configs/none.py"], "no config file configs/none.py"),
    (["--config", "none.py"], "no config file none.py (there are configs/diloco.py,"),
    (["--config", "README.md"], "--config takes a Python file such as configs/diloco.py, got README.md"),
    ([*CONFIG, "--calibrate", "none"], "no results of bench network at none"),
    (["--run-dir", "none"], "no results of bench network at none"),
    (["--run-dir", "none", "--link", "bucket"], "--run-dir does not go with --link bucket"),
    ([*CONFIG, "--link", "bukket"], "--link must be one of 'network', 'bucket', got 'bukket'"),
])  # fmt: skip
def test_wrong_option_is_one_line(words, line, capsys, monkeypatch):
    monkeypatch.setattr("jgc.lab.advise.measure.interleaved", lambda *_: pytest.fail("measured all the same"))
    assert main(["advise", *words]) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(said) == 1 and line in said[0]


def test_wrong_results_file_or_place(tmp_path, capsys):
    (tmp_path / "results.json").write_text("[]")
    assert experiment(["predictions", str(tmp_path)]) == 2
    assert "is not a file of bench network" in capsys.readouterr().err
    (tmp_path / "results.json").write_text(json.dumps(invented(hosts=(4,))))
    assert experiment(["predictions", str(tmp_path), "--calibrate-on", "4-1gbit"]) == 2
    assert "--calibrate-on must be hosts/rate such as 4/100mbit, got '4-1gbit'" in capsys.readouterr().err
    assert experiment(["predictions", str(tmp_path), "--calibrate-on", "2/1gbit"]) == 2
    assert "nothing has been measured at 2/1gbit to calibrate on; there is 4/100mbit" in capsys.readouterr().err


@pytest.mark.slow
def test_advice_from_bench_network(tmp_path, capsys):
    """With what the methods really send; the figures are invented for a different model, so that errors are large."""
    (tmp_path / "results.json").write_text(json.dumps(invented(hosts=(4,))))
    assert experiment(["predictions", str(tmp_path), "--output", str(tmp_path / "check")]) == 0
    assert len(json.loads((tmp_path / "check" / "advise.json").read_text())["cells"]) == 2 * len(COMPUTE)
    run = ["advise", "--run-dir", str(tmp_path), "--calibrate", str(tmp_path), "--hosts", "16", "--methods", "topk"]
    assert main([*run, "--bandwidth", "10mbit", "--output", str(tmp_path / "advice")]) == 0
    told = json.loads((tmp_path / "advice" / "advise.json").read_text())
    assert {row["method"] for row in told["rows"]} == {"psum_f32", "psum_f16", "topk"}
    assert told["rows"][0]["method"] == "topk" and told["hosts"] == 16
    assert "yes: topk takes" in capsys.readouterr().out
    assert main([*run, "--overhead", "5", "--efficiency", "0.5"]) == 0  # what is given is not fitted
    said = " ".join(capsys.readouterr().out.split())
    assert "overhead 5 s a collective, messages get 50.0 % of the bandwidth" in said


def test_a_narrow_terminal_cuts_no_figure(capsys):
    far = Row("powersgd", 12.4, 1234.567, (sent("all-reduce", 2_760_000),))
    pages.show(verdicts.advise([*rows(), far], 4, Link(12.5e6), kind="text"), Console(width=60))
    said = capsys.readouterr().out
    assert "1234.567" in said and "2.76 MB" in said and "\u2026" not in said


def test_a_model_that_is_no_workload_is_a_transformer_of_its_size(tmp_path):
    words = ["--parameters", "1e5", "--computation", "0.5", "--hosts", "3", "--methods", "topk", "--repeats", "1"]
    assert main(["advise", *words, "--bandwidth", "1mbit", "--output", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "advise.json").read_text())
    found = {row["method"]: row for row in told["rows"]}
    values = 12 * 12 * 24**2
    assert found["psum_f32"]["bytes"] == pytest.approx(2 * 2 / 3 * 4 * values)
    assert found["topk"]["computation"] == 0.5 and 0 < found["topk"]["bytes"] < 0.05 * 4 * values * 2
    assert f"A transformer of {values:,} parameters, computation given" in (tmp_path / "advise.md").read_text()
    assert told["conclusion"][0].startswith("no advice: of topk none is on record as keeping its accuracy on text")


@pytest.mark.slow
def test_measured_on_this_device(tmp_path, monkeypatch):
    tiny = dataclasses.replace(workloads.WORKLOADS["digits_convnet5"], batch_size=4)
    monkeypatch.setattr(workloads, "WORKLOADS", {"tiny": tiny})
    monkeypatch.setattr(setup, "make_model", wide_model)
    words = [*CONFIG, "--workload", "tiny", "--bandwidth", "1mbit", "--methods", "topk,signsgd", "--repeats", "1"]
    assert main(["advise", *words, "--output", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "advise.json").read_text())
    by_name = {row["method"]: row for row in told["rows"]}
    assert by_name["psum_f32"]["bytes"] == 1.5 * 4 * by_name["psum_f32"]["bytes"] / 6 > 0
    assert by_name["psum_f16"]["bytes"] == by_name["psum_f32"]["bytes"] / 2
    assert 0 < by_name["topk"]["bytes"] < by_name["signsgd"]["bytes"] < by_name["psum_f32"]["bytes"] / 8
    assert all(0 < row["compression"] < 1 and row["computation"] > 0 for row in told["rows"])  # compiled before
    assert told["conclusion"][0].startswith("yes: topk takes")
    words[words.index("topk,signsgd")] = "topk,dgc"
    assert main(["advise", *words, "--every", "10", "--computation", "0.1", "--output", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "advise.json").read_text())
    rounds = {row["method"]: row for row in told["rows"]}
    assert rounds["topk"]["bytes"] == by_name["topk"]["bytes"] / 10 and list(told["failed"]) == ["dgc"]
    assert rounds["psum_f32"]["bytes"] == by_name["psum_f32"]["bytes"] and "outer optimiser" in told["failed"]["dgc"]
    words[words.index("topk,dgc")] = "topk,powersgd"
    bucket = ["--link", "bucket", "--every", "10", "--computation", "0.1", "--output", str(tmp_path)]
    assert main(["advise", *words, *bucket]) == 0
    told = json.loads((tmp_path / "advise.json").read_text())
    found = {row["method"]: row for row in told["rows"]}
    message = 10 * found["topk"]["bytes"]
    assert found["topk"]["collectives"] == [{"op": "bucket", "kind": "message", "bytes": message}]
    assert found["topk"]["communication"] == pytest.approx((5 * 0.05 + 4 * message / (0.9415 * 125e3)) / 10, rel=1e-3)
    assert list(told["failed"]) == ["powersgd"] and "for rounds, use topk" in told["failed"]["powersgd"]
    assert found["psum_f32"]["bytes"] == 2 * found["psum_f16"]["bytes"] > message
