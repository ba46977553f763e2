"""`python -m jgc chaos`: the order of faults, the verdicts, the table, and a few faults against two real processes."""

import time
from itertools import islice
from random import Random

import pytest

from jgc.lab.chaos import campaign, verdict
from jgc.lab.chaos.campaign import Found, Plan, order
from jgc.lab.chaos.command import markdown
from jgc.lab.chaos.lab import Lab, Recipe, Whole, undisturbed
from jgc.lab.chaos.processes import Ended
from jgc.lab.chaos.stops import seconds_of
from jgc.lab.chaos.table import FAULTS
from jgc.lab.chaos.verdict import HANG, KINDS, SAID, SILENT, SURVIVED, TRACEBACK, CannotTest, Outcome, judge
from jgc.lab.commands import main

SAY = Ended(1, "a step\nerror: process 1 died; go on\n")
WELL = Ended(0, "")
DUMP = Ended(1, "error: no\nTraceback (most recent call last):\n")


def test_same_seed_same_order():
    plan = Plan(tuple(FAULTS), ("topk", "dgc"), 4, 5, 60.0, None, 60.0, 20.0)
    first, again, other = (list(islice(order(p), 5 * len(FAULTS))) for p in (plan, plan, plan._replace(seed=6)))
    assert first == again != other
    each = [(fault, method, 0) for fault in FAULTS for method in ("topk", "dgc")]
    assert sorted(first[: len(each)]) == sorted(each)


def test_stops_are_below_and_above_the_timeout():
    for timeout in (10.0, 20.0, 60.0):
        seconds = [seconds_of(Random(i), timeout, i) for i in range(200)]
        assert all(5 <= s <= 150 for s in seconds)
        assert len([s for s in seconds if s < timeout]) > 50 and len([s for s in seconds if s > timeout]) > 50


@pytest.mark.parametrize(
    "ended, killed, mute, different, kind",
    [
        ([WELL, WELL], (), (), "", SURVIVED),
        ([WELL, WELL], (), (), "params.head differs", SILENT),
        ([SAY, Ended(-9, "")], {1}, (), "", SAID),
        ([SAY, Ended(None, "")], (), (), "", HANG),
        ([Ended(None, ""), Ended(-9, "")], {1}, (), "", HANG),
        ([DUMP, WELL], (), (), "", TRACEBACK),
        ([Ended(-6, "*** Check failure"), SAY], (), (), "", TRACEBACK),
        ([Ended(-11, "")], (), (), "", TRACEBACK),
        ([Ended(1, ""), SAY], (), (), "", TRACEBACK),
        ([Ended(1, ""), SAY], (), {0}, "", SAID),
        ([Ended(1, "error: a\nerror: b\n")], (), (), "", TRACEBACK),
        ([Ended(-9, ""), Ended(-9, "")], {0, 1}, (), "", SAID),
    ],
)
def test_verdicts(ended, killed, mute, different, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(verdict, "difference", lambda run_dir, whole: different)
    assert judge(ended, tmp_path, tmp_path, killed, mute).kind == kind


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """Faults that do nothing, by name what becomes of them."""
    monkeypatch.setattr(campaign, "undisturbed", lambda recipe, *rest: Whole(recipe, tmp_path, 0.0, 0.0))

    def stop(lab, dice):
        raise KeyboardInterrupt

    def cannot(lab, dice):
        raise CannotTest("it needs root")

    def fails(lab, dice):
        raise ValueError("a defect")

    for kind in KINDS:
        monkeypatch.setitem(FAULTS, kind, lambda lab, dice, kind=kind: Outcome(kind, f"it was {kind}"))
    for function in (stop, cannot, fails):
        monkeypatch.setitem(FAULTS, function.__name__, function)
    for fault in FAULTS.values():
        fault.__doc__ = fault.__doc__ or "A fault."


@pytest.mark.parametrize("faults, code", [(KINDS[:2], 0), *((("survived", kind), 1) for kind in (*KINDS[2:], "fails"))])
def test_exit_code_and_table(faked, faults, code, tmp_path, capsys):
    page, folder = tmp_path / "page.md", tmp_path / "runs"
    words = ["--faults", ",".join(faults), "--count", "3", "--run-dir", str(folder), "--output", str(page)]
    assert main(["chaos", *words]) == code
    said = capsys.readouterr()
    kinds = [TRACEBACK if fault == "fails" else fault for fault in faults]
    row = [str(3 * kinds.count(kind)) for kind in KINDS]
    assert f"| all | 6 | {' | '.join(row)} |  |" in said.out and said.out.splitlines()[0].startswith(
        "[1/6, 0:00, about 0:00"
    )
    assert page.read_text().startswith("# Faults, and what became of them\n\n    python -m jgc chaos --faults ")
    assert ("error: 3 of 6 tries were silent, hung or ended in a traceback" in said.err) == bool(code)
    assert len(list(folder.glob("*/*"))) == 3 * code  # what went badly is kept


def test_stopped_by_hand_it_shows_the_table_so_far(faked, tmp_path, capsys):
    assert main(["chaos", "--faults", "survived,stop", "--count", "50", "--run-dir", str(tmp_path)]) == 130
    assert "| fault | tried | survived |" in capsys.readouterr().out


def test_what_cannot_be_produced_is_left_out(faked, tmp_path, capsys):
    assert main(["chaos", "--faults", "survived,cannot", "--count", "2", "--run-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "cannot: left out, it needs root" in out and "Left out: cannot, it needs root." in out
    assert "| all | 2 | 2 |" in out


def test_minutes_end_it(faked, tmp_path):
    plan, found = Plan(("survived",), ("topk",), 2, 0, 0.01, None, 60.0, 20.0), Found()
    campaign.run(plan, tmp_path, found, lambda line: None)
    assert found.tried > 0 and found.seconds < 30
    assert "| survived | " in markdown(plan, found)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--faults", "kil"], "--faults: unknown 'kil'; did you mean kill?"),
        (["--methods", "tpk"], "--methods: unknown 'tpk'; did you mean topk?"),
        (["--methods", ""], "--methods names none; there are dense"),
        (["--processes", "3"], "--processes must be 1, 2 or 4, for 4 nodes, got 3"),
        (["--minutes", "1", "--count", "1"], "give one of them"),
        (["--minutes", "0"], "--minutes must be above 0, got 0.0"),
        (["--rounds", "--minutes", "0"], "--seconds or --minutes must be above 0, got 0"),
        (["--minutes", "nan"], "--minutes must be above 0, got nan"),
        (["--limit", "nan"], "must be at least 10, got nan"),
        (["--count", "0"], "--count must be at least 1, got 0"),
        (["--faults", "flips"], "--faults flips goes with no other fault, and with --count N"),
        (["--timeout", "1"], "--limit and --timeout must be at least 10, got 120 and 1"),
    ],
)
def test_wrong_options(words, said, capsys):
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_real_runs(tmp_path):
    """One that is killed and one with a changed key survive; one that computes something else is found silent."""
    wholes = {}

    def of(recipe):
        if recipe not in wholes:
            wholes[recipe] = undisturbed(recipe, tmp_path, 300.0, 20.0)
        return wholes[recipe]

    def lab(name):
        folder = tmp_path / name
        folder.mkdir()
        return Lab(folder, of(Recipe("topk", 2)), 300.0, 20.0, time.monotonic() + 1000, 0, of)

    for name in ("kill", "change-key"):
        outcome = FAULTS[name](lab(name), Random(0))
        assert outcome.kind == SURVIVED, outcome
    other = lab("other")
    outcome = other.verdict(other.start(options=["--learning-rate", "0.02"]))
    assert outcome.kind == SILENT and "differs from an uninterrupted run" in outcome.what


@pytest.mark.slow
def test_flips(tmp_path, capsys):
    words = ["--faults", "flips", "--count", "10", "--processes", "2", "--limit", "300", "--run-dir", str(tmp_path)]
    assert main(["chaos", *words]) == 0
    out = capsys.readouterr().out
    assert (
        "| all | 10 | 0 | 10 | 0 | 0 | 0 |" in out and "A check that followed the flip found 10 of 10, and named" in out
    )
