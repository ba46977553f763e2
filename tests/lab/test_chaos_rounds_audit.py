"""`chaos --rounds`: the audit passes a good run and finds planted errors; goodput of hand-made rounds."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("obstore")

from jgc.lab.chaos.rounds import accounts, audit as audits, node as nodes
from jgc.lab.chaos.rounds.accounts import read_balance, write_balance
from jgc.lab.chaos.rounds.audit import Audit, Round, goodput
from jgc.lab.chaos.rounds.node import Settings
from jgc.rounds import open_bucket
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.lists import Entry, RoundList, pack_list, read_list
from jgc.rounds.messages import SECRET, opened, sha256_of
from jgc.rounds.names import close_name, message_name

KEY = "key"
SETTINGS = Settings("", "", "", seconds=0.01, start=2, quorum=1, grace=30.0, overlap=0)
NODES = ("oslo", "paris")


@pytest.fixture(scope="module")
def coder():
    return CompressorCoder(nodes.compressor(), nodes.first_params(), 0)


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """The folder of a run without faults: its bucket, and logs and accounts of two nodes."""
    folder = tmp_path_factory.mktemp("run")
    bucket = folder / "bucket"
    each = [
        SETTINGS._replace(bucket=str(bucket), node=node, folder=str(folder / node), seed=i)
        for i, node in enumerate(NODES)
    ]
    for node in NODES:
        (folder / node).mkdir()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv(SECRET, KEY)
        futures = [pool.submit(nodes.run, settings) for settings in each]
        while not list(bucket.glob("rounds/00000005/close")):
            assert not any(future.done() for future in futures), [x.result() for x in futures]
            time.sleep(0.02)
        for node in NODES:
            (folder / node / "stop").write_text("8")
        for future in futures:
            future.result()
    return folder


@pytest.fixture
def folder(good_run, tmp_path):
    """A copy of the run, for an error to be planted."""
    return shutil.copytree(good_run, tmp_path / "copy")


@pytest.fixture
def read(coder, monkeypatch):
    """The audit of a folder's bucket, after a look."""
    monkeypatch.setattr(audits, "CompressorCoder", lambda *args: coder)

    def read(folder):
        audit = Audit(open_bucket(folder / "bucket"), SETTINGS, KEY)
        audit.look(gaps=True)
        return audit

    return read


def test_a_good_run_passes(good_run, read):
    audit = read(good_run)
    assert len(audit.rounds) >= 6 and audit.rounds[0].list.nodes == NODES
    lines = [audit.check_log(good_run / node / "log.jsonl", node) for node in NODES]
    errors = [audit.check_balance(good_run / node / "account/balance-0.npz", node) for node in NODES]
    assert min(lines) >= 6 and 0 < max(errors) < 1e-6 and not audit.wrong


def _change_list(folder, number, change):
    path = folder / "bucket" / close_name(number)
    run = opened((folder / "bucket/run.json").read_bytes(), KEY.encode())[0]["run"]
    closed = read_list(path.read_bytes(), run, number, KEY.encode())
    path.write_bytes(pack_list(run, change(closed), KEY.encode()))


def _no_list(folder):
    (folder / "bucket" / close_name(2)).unlink()


def _no_message(folder):
    (folder / "bucket" / message_name(2, "oslo")).unlink()


def _changed_message(folder):
    path = folder / "bucket" / message_name(2, "oslo")
    data = path.read_bytes()
    path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])


def _other_theta(folder):
    _change_list(folder, 2, lambda x: x._replace(theta="0" * 64))


def _listed_twice(folder):
    _change_list(folder, 2, lambda x: x._replace(members=(x.members[0], *x.members)))


def _counted_in_two_rounds(folder):
    old = (folder / "bucket" / message_name(1, "oslo")).read_bytes()
    (folder / "bucket" / message_name(2, "oslo")).write_bytes(old)
    again = {"sha256": sha256_of(old), "size": len(old)}
    _change_list(
        folder, 2, lambda x: x._replace(members=(x.members[0]._replace(**again), *x.members[1:]))
    )


@pytest.mark.parametrize("plant, text", [
    (_no_list, "after 2 rounds: round 2 has no list, and later rounds exist"),
    (_no_message, "after 2 rounds: truncated: 0 bytes"),
    (_changed_message, "after 2 rounds: signed with a different secret, or truncated"),
    (_other_theta, "after 2 rounds: the lists give other parameters"),
    (_listed_twice, "list 2 after 2 lists; members: oslo, oslo, paris"),
    (_counted_in_two_rounds, "round 2: oslo's message counts a second time"),
])  # fmt: skip
def test_a_planted_error_in_the_bucket_is_in_the_audit(folder, read, plant, text):
    plant(folder)
    wrong = read(folder).wrong
    assert text in wrong[0], wrong


def _change_log(path, **values):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = max(i for i, x in enumerate(lines) if "digest" in x)
    lines[last] |= values
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))


@pytest.mark.parametrize("values, text", [
    ({"digest": "0" * 64}, "oslo: other digest after"), ({"number": 99}, "oslo knows of 99 rounds, the bucket of"),
])  # fmt: skip
def test_a_wrong_line_in_a_log_is_in_the_audit(folder, read, values, text):
    audit, log = read(folder), folder / "oslo" / "log.jsonl"
    before = read(folder).check_log(log, "oslo")
    _change_log(log, **values)
    equal = audit.check_log(log, "oslo")
    assert equal == before - ("digest" in values)
    assert [text in x for x in audit.wrong] == [True]


@pytest.mark.parametrize("field, error, wrong", [
    ("moved", 1e-5, True), ("left", 1e-5, True), ("opening", 2e-6, True), ("moved", 1e-8, False),
    ("left", 1e-8, False), ("left", np.nan, True),
])  # fmt: skip
def test_a_planted_error_of_conservation_is_in_the_audit(folder, read, field, error, wrong):
    audit, path = read(folder), folder / "oslo" / "account/balance-0.npz"
    balance = read_balance(path)
    scale = np.abs(balance.opening + balance.moved).max()
    x = getattr(balance, field).copy()
    x[7] += error * scale
    write_balance(path, balance._replace(**{field: x}))
    measured = audit.check_balance(path, "oslo")
    assert bool(audit.wrong) == wrong
    if wrong:
        assert "are not conserved" in audit.wrong[0]
        assert not measured < 0.9 * error


def _round(number, seen, members):
    entries = tuple(Entry(node, "", "", 0, 320, 0) for node in members)
    return Round(RoundList(number, "", entries, {}, "", "", True, 0.0), seen)


def _rounds(*members, seconds=5.0):
    return [_round(i, seconds * i, names) for i, names in enumerate(members)]


def _never(*hit):
    return False


MOST = 64.0  # 320 tokens in 5 s


def test_goodput_of_whole_rounds():
    assert goodput(_rounds("ab", "ab", "ab"), ["a", "b"], _never, MOST) == (1280.0, 20.0)


def test_goodput_is_lower_without_a_message_of_a_node_that_is_not_hit():
    tokens, seconds = goodput(_rounds("ab", "ab", "a", "ab", "ab"), ["a", "b"], _never, MOST)
    assert tokens / seconds == 7 / 8 * MOST


def test_goodput_is_lower_where_rounds_wait():
    rounds = [_round(i, seen, "ab") for i, seen in enumerate((0, 5, 13, 18, 23))]
    tokens, seconds = goodput(rounds, ["a", "b"], _never, MOST)
    assert tokens / seconds == pytest.approx(20 / 23 * MOST)


def test_a_round_in_which_a_node_is_hit_does_not_count_for_it():
    rounds = _rounds("ab", "ab", "a", "ab", "ab")

    def hit(node, begins, ends):
        return node == "b" and begins < 8.0 and ends > 7.0

    assert goodput(rounds, ["a", "b"], hit, MOST) == (7 * 320.0, 7 * 5.0)
    assert goodput(rounds, ["b"], lambda *_: True, MOST) == (0.0, 0.0)


def test_goodput_is_at_most_what_step_times_allow():
    """The first list was late by a grace, the last was not: three rounds seem to take 12 s."""
    rounds = [_round(i, seen, "ab") for i, seen in enumerate((3, 5, 10, 15))]
    tokens, seconds = goodput(rounds, ["a", "b"], _never, MOST)
    assert tokens / seconds == MOST and seconds == 24
    # one node's gain does not hide a different node's loss
    rounds = [_round(i, seen, "a" if i == 2 else "ab") for i, seen in enumerate((3, 5, 10, 15))]
    assert goodput(rounds, ["a", "b"], _never, MOST)[0] == 12 * MOST + 640


def test_a_kill_in_the_exchange_that_opens_an_account_brings_nothing_of_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(accounts, "_left", lambda member: np.zeros(3))
    member = SimpleNamespace(lost=0, shared=SimpleNamespace(number=3), incarnation="a")
    account = accounts.Account(tmp_path)
    account.open(member, None)
    account.begin(member, np.full(3, np.nan))
    member.lost, member.shared = 1, SimpleNamespace(number=4)  # not finite: lost, a new account
    account.end(member, np.full(3, np.nan))
    returned = SimpleNamespace(lost=0, shared=SimpleNamespace(number=4), incarnation="b")
    account = accounts.Account(tmp_path)
    account.open(returned, 4)
    assert account.balance.opened == 4 and account.balance.incarnations == ("a", "b")
    assert np.array_equal(account.balance.moved, np.zeros(3))
    account.begin(returned, np.ones(3))  # and killed before its end, with the difference on disk
    account = accounts.Account(tmp_path)
    account.open(returned, 4)
    assert np.array_equal(account.balance.moved, np.ones(3))
