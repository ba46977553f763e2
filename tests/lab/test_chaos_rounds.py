"""`chaos --rounds`: order and choice of faults, verdicts on processes, the page, options."""

from itertools import islice
from random import Random
from types import SimpleNamespace

import pytest

pytest.importorskip("obstore")

from jgc.lab.chaos.processes import Ended
from jgc.lab.chaos.rounds import campaign, command, node as nodes
from jgc.lab.chaos.rounds.campaign import RUN, Results, begin_fault, continue_fault, order, watch
from jgc.lab.chaos.rounds.faults import FAULTS
from jgc.lab.chaos.rounds.nodes import Node, Place
from jgc.lab.chaos.rounds.page import markdown
from jgc.lab.chaos.rounds.run import NoneFree, Plan
from jgc.lab.chaos.verdict import HANG, SAID, SILENT, SURVIVED, TRACEBACK, Outcome
from jgc.lab.commands import main
from jgc.training.errors import UserError

PLAN = Plan(("kill", "stop"), 60.0, 15.0, 4, 5, 60.0, nodes.Settings("", "", ""))
DUMP = 'Traceback (most recent call last):\n  File "x"\n'


def test_same_seed_same_order():
    plan = PLAN._replace(faults=tuple(FAULTS))
    count = len(FAULTS)
    first, again, other = (list(islice(order(p), 3 * count)) for p in (plan, plan, plan._replace(seed=6)))
    assert first == again != other
    assert sorted(first[:count]) == sorted(first[count : 2 * count]) == sorted(FAULTS)


# --- processes ---


@pytest.fixture
def node(tmp_path):
    settings = nodes.Settings(str(tmp_path / "bucket"), "paris", str(tmp_path / "paris"))
    node = Node(Place(tmp_path), settings, "key")
    node.running = SimpleNamespace(output=node.files.folder / "output-1.txt", alive=False)
    node.running.output.touch()
    return node


@pytest.mark.parametrize("ended, asked, kind", [
    (Ended(0, ""), True, None), (Ended(0, "a word\n"), False, SILENT), (Ended(None, ""), True, HANG),
    (Ended(1, "error: full\n"), True, SAID), (Ended(1, "error: full\n"), False, SAID),
    (Ended(1, ""), False, TRACEBACK), (Ended(1, "error: a\nerror: b\n"), False, TRACEBACK),
    (Ended(1, f"error: a\n{DUMP}"), False, TRACEBACK), (Ended(0, DUMP), True, TRACEBACK),
    (Ended(-11, ""), True, TRACEBACK),
])  # fmt: skip
def test_verdicts_on_processes(node, ended, asked, kind):
    outcome = node.verdict(ended, asked)
    assert (outcome and outcome.kind) == kind
    assert outcome is None or "paris" in outcome.what


def test_a_traceback_of_a_killed_process_is_an_outcome(node):
    for i, output in enumerate(("all well\n", DUMP, DUMP), 1):
        (node.files.folder / f"output-{i}.txt").write_text(output)
    node.running.output = node.files.folder / "output-3.txt"
    assert node.verdict(Ended(1, DUMP)).kind == TRACEBACK
    (outcome,) = node.dumps()  # the third is judged
    assert outcome.kind == TRACEBACK and "output-2.txt" in outcome.what


# --- faults under way ---


class _Fake:
    """A node whose process does nothing."""

    def __init__(self, name):
        self.name = self.label = name
        self.wanted, self.alive, self.starts = True, True, 0
        self.running, self._judged = SimpleNamespace(output=name), set()
        self.ended = Ended(0, "")

    def end(self, seconds):
        return self.ended

    def verdict(self, ended):
        return Node.verdict(self, ended)

    def start(self):
        self.wanted, self.starts = True, self.starts + 1


@pytest.fixture
def run(monkeypatch):
    """A run of four nodes without processes; `counts` says how often each counts after a fault."""
    run = SimpleNamespace(
        plan=PLAN, nodes=[_Fake(name) for name in "abcd"], others=[], hits=[], past=[], number=9,
        seconds_left=lambda: 0.0, counts=dict.fromkeys("abcd", 2),
    )  # fmt: skip
    run.is_hit = lambda node: any(node in hit.nodes for hit in run.hits)
    run.counted = lambda name, since: run.counts[name]
    monkeypatch.setitem(FAULTS, "one", _one)
    monkeypatch.setitem(FAULTS, "all", _all)
    return run


def _one(run, hit, dice):
    hit.choose(dice)
    yield 0.0


def _all(run, hit, dice):
    hit.choose_all()
    yield 0.0


def test_a_quorum_of_nodes_is_not_hit(run):
    deck = ["one", "one", "one", "all"]
    for i in range(4):
        begin_fault(run, deck, Random(i))
    hit = [x for hit in run.hits for x in hit.nodes]
    assert len(hit) == len(set(hit)) == 2 and deck == ["one", "all"]
    for choose in (lambda: run.hits[0].choose(Random(0)), run.hits[0].choose_all):
        with pytest.raises(NoneFree):
            choose()


def _ends(run, fault="one", seconds=0.0):
    """The outcome of a fault, some seconds after its end; None if it is not over."""
    begin_fault(run, [fault], Random(0))
    (hit,), results = run.hits, Results()
    continue_fault(run, hit, results, lambda text: None)  # its end
    if run.hits and seconds:
        hit.ended -= seconds
        continue_fault(run, hit, results, lambda text: None)
    outcomes = results.outcomes.get(fault)
    return outcomes[0] if outcomes else None


def test_a_fault_is_over_once_its_nodes_count_again(run):
    assert _ends(run).kind == SURVIVED and not run.hits
    ((names, began, ended),) = run.past
    assert len(names) == 1 and began <= ended


def test_a_fault_is_not_over_before_its_nodes_count_twice(run):
    run.counts = dict.fromkeys("abcd", 1)
    assert _ends(run, seconds=30.0) is None and len(run.hits) == 1


def test_nodes_that_do_not_count_again_hang(run):
    run.counts = {"a": 2, "b": 0, "c": 2, "d": 1}
    outcome = _ends(run, "all", seconds=61.0)
    assert outcome == Outcome(HANG, "b, d did not count again within 60 s")


def test_an_error_that_the_fault_saw_is_its_outcome(run, monkeypatch):
    def silent(run, hit, dice):
        hit.silent("two of one name")
        yield 0.0

    monkeypatch.setitem(FAULTS, "silent", silent)
    assert _ends(run, "silent") == Outcome(SILENT, "two of one name")


@pytest.mark.parametrize("ended, kind", [
    (Ended(0, ""), SILENT), (Ended(1, "error: gone\n"), SAID), (Ended(1, DUMP), TRACEBACK),
])  # fmt: skip
def test_a_process_that_ends_unasked_is_an_outcome_and_starts_again(run, ended, kind):
    node, results = run.nodes[1], Results()
    watch(run, results, lambda text: None)
    assert not results.outcomes
    node.alive, node.ended = False, ended
    watch(run, results, lambda text: None)
    ((fault, (outcome,)),) = results.outcomes.items()
    assert (fault, outcome.kind, node.starts) == (RUN, kind, 1)


@pytest.mark.parametrize("ended, kinds", [(Ended(1, "error: a twin\n"), []), (Ended(0, ""), [SILENT])])
def test_of_twins_one_may_stop_with_a_line(run, ended, kinds, monkeypatch):
    monkeypatch.setitem(FAULTS, "twin", FAULTS["one"])
    begin_fault(run, ["twin"], Random(0))
    ((node,), results) = run.hits[0].nodes, Results()
    node.alive, node.ended = False, ended
    watch(run, results, lambda text: None)
    assert [x.kind for x in results.outcomes.get("twin", [])] == kinds and node.starts == 0


# --- page and options ---


def _results():
    results = Results(
        {"kill": [Outcome(SURVIVED, "paris"), Outcome(HANG, "oslo did not count again")]}, {"kill": [4.0, 10.0]},
        600.0, 120, 500, [2e-8, 3e-7], (6400.0, 100.0), (62.8, 1.0), (60.0, 1.0), 3,
    )  # fmt: skip
    results.add(RUN, Outcome(SILENT, "conservation"))
    return results


def test_page():
    page = markdown(PLAN, "a folder", _results())
    for row in (
        "| goodput of nodes that are not hit | 98.1 % |", "| goodput of all nodes, hit or not | 93.8 % |",
        "10:00 minutes, 120 rounds, 3 faults.",
        "| tokens a node and second without faults | 64.0 of at most 64.0 |",
        "| largest relative error of conservation | 3.0e-07 in 2 accounts |",
        "| kill | 2 | 1 | 0 | 0 | 1 | 0 | 7.0, 10.0 | SIGKILL of a node",
        "| the run | 1 | 0 | 0 | 1 | 0 | 0 |  | Outside of any fault |", "| all | 3 | 1 | 0 | 1 | 1 | 0 |  |  |",
        "- kill: hang: oslo did not count again", "- the run: silent: conservation",
    ):  # fmt: skip
        assert row in page, page


def test_the_page_of_a_run_that_was_stopped_early_has_no_goodput():
    page = markdown(PLAN, "a folder", Results())
    assert page.count("| not measured |") == 3 and "0 faults." in page


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_was_measured_before_ctrl_c_is_on_the_page(error, monkeypatch, tmp_path, capsys):
    class Faulty:
        number, deadline, names, was_hit = 7, 0.0, ["a"], None
        audit = SimpleNamespace(rounds=[], wrong=[])

        def __init__(self, *args):
            pass

        begin = stop = end = __init__

    def faults(run, results, tell):
        results.begun = 2
        raise error

    monkeypatch.setattr(campaign, "Run", Faulty)
    monkeypatch.setattr(campaign, "SHORTEST", 0.0)
    monkeypatch.setattr(campaign, "_end", lambda *args: None)
    monkeypatch.setattr(campaign, "_wait_for_rounds", lambda *args: None)
    monkeypatch.setattr(campaign, "_faults", faults)
    main(["chaos", "--rounds", "--seconds", "0.1", "--run-dir", str(tmp_path)])
    assert "7 rounds, 2 faults." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_folder_that_an_error_names_stays(monkeypatch, tmp_path, capsys):
    def run(plan, place, folder, results, tell):
        raise UserError(f"0 of 4 rounds closed; see {folder}", 1)

    monkeypatch.setattr(command, "run", run)
    assert main(["chaos", "--rounds", "--seconds", "1", "--run-dir", str(tmp_path)]) == 1
    (folder,) = tmp_path.iterdir()
    assert str(folder) in capsys.readouterr().err


@pytest.mark.parametrize("bad, code", [(True, 1), (False, 0)])
def test_bad_outcomes_end_with_an_exit_code_and_the_folder_stays(bad, code, monkeypatch, tmp_path, capsys):
    def run(plan, place, folder, results, tell):
        results.add("kill", Outcome(HANG if bad else SURVIVED, "paris"))

    monkeypatch.setattr(command, "run", run)
    assert main(["chaos", "--rounds", "--seconds", "1", "--run-dir", str(tmp_path)]) == code
    assert len(list(tmp_path.iterdir())) == code
    text = capsys.readouterr()
    assert "| kill | 1 |" in text.out and ("1 outcomes were silent" in text.err) == bad


def test_errors_of_the_run_without_faults_are_outcomes(monkeypatch, tmp_path):
    class Quiet:
        names, number, digests, balances = ["a"], 9, 3, [1e-3]
        audit = SimpleNamespace(rounds=[], wrong=[])

        def __init__(self, plan, place, folder, tell):
            self.plan, self.folder = plan, folder

        def begin(self):
            if self.folder.name == "nodes":
                raise KeyboardInterrupt

        def end(self):
            yield Outcome(SILENT, "not conserved")

        def stop(self):
            pass

    monkeypatch.setattr(campaign, "Run", Quiet)
    monkeypatch.setattr(campaign, "SHORTEST", 0.0)
    results = Results()
    with pytest.raises(KeyboardInterrupt):
        campaign.run(PLAN._replace(seconds=0.1), Place(tmp_path), tmp_path, results, lambda text: None)
    assert results.outcomes == {RUN: [Outcome(SILENT, "not conserved")]} and results.balances == [1e-3]


@pytest.mark.parametrize("words, text", [
    (["--faults", "kil"], "--faults: unknown 'kil'; did you mean kill?"),
    (["--seconds", "0"], "--seconds or --minutes must be above 0, got 0"),
    (["--between", "nan"], "--between must be above 0, got nan"),
    (["--processes", "2"], "--processes must be from 3 to 8 with --rounds, got 2"),
    (["--overlap", "2"], "--overlap must be 0 or 1, got 2"),
    (["--server", "minio"], "--server must be one of folder, seaweedfs, got 'minio'"),
    (["--count", "3"], "does not go with --rounds"),
    (["--minutes", "1", "--seconds", "9"], "give one of them"),
])  # fmt: skip
def test_wrong_options(words, text, capsys):
    assert main(["chaos", "--rounds", *words]) == 2
    assert text in capsys.readouterr().err
