"""`jgc rounds`: what it shows of a bucket, a round that a person closes, old objects that go, the demonstration."""

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

pytest.importorskip("obstore")

from jgc import compress, rounds
from jgc.lab.commands import main
from jgc.lab.rounds.history import read_history
from jgc.rounds.bucket import open_bucket
from jgc.rounds.messages import packed_message

PARAMS = {"w": jnp.zeros(8)}


def _join(folder, node, quorum=2, **more):
    return rounds.join(folder, node=node, params=PARAMS, compressor=compress.dense(), quorum=quorum, grace=30,
                       checkpoint_every=2, **more)  # fmt: skip


def _train(folder, node, count):
    run = _join(folder, node)
    for _ in range(count):
        run.exchange(run.params, tokens=10)
    run.leave()
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two nodes and five rounds; then a message of b for round 1 that nobody counted."""
    folder = tmp_path_factory.mktemp("run") / "bucket"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda node: _train(folder, node, 5), "ab"))
    bucket = open_bucket(folder)
    run = read_history(bucket, None, 9).run
    late = packed_message(run.token, "c", "life", 1, 20, "digest", {"words": jnp.zeros(8, jnp.uint32)}, None)
    assert bucket.create("rounds/00000001/c.msg", late)
    return folder


def _said(capsys, *words):
    code = main(["rounds", *map(str, words)])
    return code, capsys.readouterr()


def test_show_has_members_who_is_late_goodput_and_digests(finished, capsys):
    code, said = _said(capsys, "show", finished, "--json", "--verify")
    assert code == 0
    found = json.loads(said.out)
    assert found["closed"] == 5 and [x["members"] for x in found["rounds"]] == [["a", "b"]] * 5
    assert found["rounds"][1]["left_out"] == {"c": "late"} and found["goodput"] == pytest.approx(100 / 120)
    assert found["nodes"]["a"] == {"counted": 5, "newest": 4, "now": "has left"}
    assert found["open"] == {"round": 5, "came": [], "missing": []} and not found["dissent"]
    assert found["checkpoints"][-1] == 4 and found["checkpoint"]["agrees"] is True
    code, said = _said(capsys, "show", finished, "--last", 2)
    assert code == 0 and "goodput 1.000" in said.out and "| 3 |" in said.out and "| 2 |" not in said.out
    assert "a: counted in 2 of 2 rounds; has left" in said.out and "same parameters" in said.out


def test_a_checkpoint_older_than_the_rounds_that_are_shown_is_compared_with_its_list(finished, tmp_path, capsys):
    folder = tmp_path / "bucket"
    shutil.copytree(finished, folder)
    newest, checkpoint, older = (folder / "checkpoint" / f"0000000{i}" for i in (4, 2, 0))
    newest.unlink()  # the next one is older than the last list
    code, said = _said(capsys, "show", folder, "--last", 1, "--verify")
    assert code == 0 and "checkpoint 2 agrees with its list" in said.out
    checkpoint.write_bytes(older.read_bytes())
    for last in (1, 5):
        code, said = _said(capsys, "show", folder, "--last", last, "--verify")
        assert code == 1 and "checkpoint 2 does NOT agree with its list" in said.out
        assert "checkpoint/00000002 holds other parameters than the list of round 2 names: delete it" in said.err


def test_a_person_closes_a_round_below_its_quorum(tmp_path, capsys):
    run = _join(tmp_path / "bucket", "a", start=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.exchange, {"w": jnp.ones(8)}, 10)
        while not (tmp_path / "bucket/rounds/00000000/a.msg").exists():
            time.sleep(0.01)
        code, said = _said(capsys, "close", tmp_path / "bucket")
        params, outcome = waiting.result()
    assert code == 0 and said.out.strip() == "closed round 0 with a"
    assert outcome.counted and outcome.closed_by == "a-person" and float(params["w"][0]) > 0
    code, said = _said(capsys, "close", tmp_path / "bucket")
    assert code == 1 and "round 1 has no message to close it with" in said.err


def test_cleaning_leaves_lists_and_what_a_newcomer_needs(tmp_path, capsys):
    folder = tmp_path / "bucket"
    run = _join(folder, "a", quorum=1)
    for i in range(7):
        run.exchange({"w": jnp.full(8, float(i))}, tokens=10)
    run.leave()
    code, said = _said(capsys, "clean", folder, "--keep", 0)
    assert code == 0 and "3 checkpoints" in said.out  # 0, 2 and 4 of 0, 2, 4, 6
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {f"rounds/0000000{i}/close" for i in range(7)} <= names
    assert sorted(name for name in names if name.endswith(".msg")) == ["rounds/00000006/a.msg"]
    assert [name for name in names if name.startswith("checkpoint")] == ["checkpoint/00000006"]
    newcomer = _join(folder, "b", quorum=1)
    assert newcomer.number == 7 and newcomer.member.shared.digest == run.member.shared.digest


@pytest.mark.parametrize("words, text", [
    (["show", "nowhere"], "nowhere: there is no such folder"),
    (["show", "."], "there is no run: the bucket has no run.json"),
    (["show", ".", "--last", "0"], "--last must be at least 1"),
    (["close", "az://container/run"], "AZURE_STORAGE_ACCOUNT_NAME"),
    (["clean", ".", "--keep", "-1"], "--keep must be at least 0"),
    (["demo", "--nodes", "2"], "--nodes must be from 3 to 9, got 2"),
    (["demo", "--limit", "0"], "--limit must be above 0 and at most 1e+06, got 0"),
    (["demo", "--limit", "inf"], "--limit must be above 0 and at most 1e+06, got inf"),
])  # fmt: skip
def test_mistakes_are_one_line(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, said = _said(capsys, *words)
    assert code in (1, 2) and said.err.startswith("error: ") and text in said.err and said.err.count("\n") == 1


@pytest.mark.slow
def test_the_demonstration_ends_with_equal_digests():
    done = subprocess.run([sys.executable, "-m", "jgc", "rounds", "demo", "--limit", "400"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("kill -9 of c", "c is started again", "c counts again", "agree; c took part in"):
        assert text in done.stdout
