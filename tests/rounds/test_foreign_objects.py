"""Objects in a bucket that jgc did not write, and nodes whose parameters are not finite."""

import json
import struct
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("obstore")

from jgc import compress, rounds
from jgc.lab.rounds.by_hand import Clean, Close
from jgc.lab.rounds.history import read_history
from jgc.lab.rounds.show import Show
from jgc.rounds import RoundsError, open_bucket
from jgc.rounds.messages import BadObject, _seal, opened
from jgc.training.errors import UserError


def _join(path, node="a", dtype=jnp.float32, **more):
    settings = {"quorum": 1, "compressor": compress.dense(), "outer": rounds.Sgd(1, 0)} | more
    return rounds.join(path / "bucket", node=node, params={"w": jnp.linspace(1, 2, 40, dtype=dtype)}, **settings)


def _run(path, count=3, **more):
    with _join(path, **more) as run:
        for i in range(count):
            run.exchange({"w": run.params["w"] - i}, 1)
    return run


def _object(text):
    body = struct.pack("<4sBBI", b"JGCR", 1, 0, len(text)) + text
    return body + _seal(body, None)


@pytest.mark.parametrize("text", [
    b"[]", b"null", b'{"header": [], "arrays": {}}', b'{"header": null, "arrays": {}}', b'{"header": {}}',
    json.dumps({"header": {}, "arrays": {"x": ["float32", [10**30]]}}).encode(),
    json.dumps({"header": {}, "arrays": {"x": ["float32", [-1]]}}).encode(),
    json.dumps({"header": {}, "arrays": {"x": ["float32"]}}).encode(),
])  # fmt: skip
def test_a_header_that_jgc_did_not_write_is_a_bad_object(text):
    with pytest.raises(BadObject, match="a header that cannot be read"):
        opened(_object(text), None)


def test_foreign_names_and_lists_of_rounds_to_come_change_nothing(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "bucket" / "checkpoint").mkdir(parents=True)
    (tmp_path / "other" / "bucket" / "checkpoint" / "\u00b2").write_bytes(b"")
    with _join(tmp_path / "other") as run:
        for i in range(3):
            run.exchange({"w": run.params["w"] - i}, 1)
            for number in ("\u00b2", "00000009"):
                path = tmp_path / "other" / "bucket" / "rounds" / number / "close"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(_object(b'{"header": [], "arrays": {}}'))
    assert run.member.shared.digest == _run(tmp_path / "one").member.shared.digest and run.number == 3


def test_foreign_names_of_a_message_are_said_once(tmp_path):
    run, said = _join(tmp_path), []
    run.member.context.say = said.append
    folder = tmp_path / "bucket" / "rounds" / "00000000"
    for name in ("a.msg", *(f"a.{i}.msg" for i in range(1, 4))):
        (folder / name).write_bytes(b"junk")
    run.exchange(run.params, 1)
    assert len(said) == len(set(said)) == 4 and all("is left out: truncated: 4 bytes" in line for line in said)


@pytest.mark.parametrize("broken", ["truncated", "foreign"])
def test_clean_keeps_the_newest_checkpoint_that_can_be_read(broken, tmp_path, capsys):
    _run(tmp_path, 5, checkpoint_every=1, retained=50)
    checkpoints = tmp_path / "bucket" / "checkpoint"
    newest = checkpoints / ("00000005" if broken == "truncated" else "99999999")
    newest.write_bytes(b"" if broken == "foreign" else newest.read_bytes()[:100])
    Clean(str(tmp_path / "bucket"), retained=0).run("")
    good = "00000004" if broken == "truncated" else "00000005"
    assert sorted(x.name for x in checkpoints.iterdir()) == [good, newest.name]
    with _join(tmp_path, "newcomer") as run:
        assert run.number == 5


def test_show_says_that_a_list_is_gone(tmp_path, capsys):
    _run(tmp_path, 5)
    Show(str(tmp_path / "bucket")).run("")
    (tmp_path / "bucket" / "rounds" / "00000002" / "close").unlink()
    with pytest.raises(UserError, match=r"the bucket forgets: rounds without a list.*: 2$"):
        Show(str(tmp_path / "bucket")).run("")


def test_a_round_whose_list_is_gone_is_not_closed_again(tmp_path, capsys):
    _run(tmp_path, 5, checkpoint_every=1)
    (tmp_path / "bucket" / "rounds" / "00000004" / "close").unlink()
    with pytest.raises(UserError, match=r"rounds/00000004/close is gone; no round was closed"):
        Close(str(tmp_path / "bucket")).run("")


def test_commands_read_a_run_next_to_foreign_objects(tmp_path, capsys):
    _run(tmp_path, 5, checkpoint_every=1)
    (tmp_path / "bucket" / "rounds" / "00000099").mkdir()
    (tmp_path / "bucket" / "rounds" / "00000099" / "close").write_bytes(b"junk")
    (tmp_path / "bucket" / "checkpoint" / "7").write_bytes(b"junk")
    (tmp_path / "bucket" / "checkpoint" / "old").mkdir()
    (tmp_path / "bucket" / "checkpoint" / "old" / "00000009").write_bytes(b"junk")
    Show(str(tmp_path / "bucket"), verify=True).run("")
    assert "5 rounds closed" in capsys.readouterr().out
    Clean(str(tmp_path / "bucket"), retained=0).run("")
    with _join(tmp_path, "newcomer") as run:
        assert run.number == 5
    (tmp_path / "bucket" / "rounds" / "00000003" / "close").write_bytes(b"junk")
    with pytest.raises(RoundsError, match=r"rounds/00000003/close is no list of this run"):
        read_history(open_bucket(tmp_path / "bucket"), None, 5)


@pytest.mark.parametrize("bad, overlap, method", [
    ("b", 0, "dense"), ("b", 1, "dense"), ("ab", 0, "dense"), ("ab", 1, "dense"), ("b", 0, "topk"), ("ab", 0, "qsgd"),
    ("ab", 0, "onebit"), ("ab", 0, "natural"), ("b", 0, "cast"),
])  # fmt: skip
def test_nobody_waits_for_nodes_that_are_not_finite(bad, overlap, method, tmp_path):
    """Quorum 2: their messages count without weight; their progress before stays."""
    settings = {"momentum_correction": False, "strategy": "fixed"} if method == "topk" else {}
    method = getattr(compress, method)(**settings)

    def node(name):
        outcomes = []
        arguments = {"quorum": 2, "start": 2, "grace": 1000.0, "overlap": overlap, "compressor": method}
        with _join(tmp_path, name, **arguments) as run:
            params = run.params
            for i in range(3):
                factor = np.nan if name in bad and i == 1 else 0.5
                params, outcome = run.exchange({"w": params["w"] * factor}, 1)
                assert np.isfinite(params["w"]).all()
                outcomes += [outcome] if outcome else []
        return [*outcomes, run.last] if overlap else outcomes, run

    with ThreadPoolExecutor(2) as pool:
        (of_a, a), (of_b, b) = pool.map(node, "ab")
    assert [x.counted for x in of_b] == [True, False, True] and of_b[1].discarded
    assert [x.counted for x in of_a] == [True, "a" not in bad, True]
    assert a.member.shared.digest == b.member.shared.digest and a.number == 3


def test_huge_movement_does_not_stay_in_a_node_that_goes_ahead(tmp_path):
    with _join(tmp_path, overlap=1, merge="eager", outer=rounds.Sgd(0.7, 0.9)) as run:
        begin = np.asarray(run.params["w"])
        params, _ = run.exchange({"w": run.params["w"] - 1e20}, 1)
        for _ in range(3):
            np.testing.assert_allclose(params["w"], begin, atol=1e-3)
            params, _ = run.exchange(params, 1)


@pytest.mark.parametrize("overlap", [0, 1])
def test_rounding_of_the_parameters_is_no_progress(overlap, tmp_path):
    """In bfloat16 a node holds fewer bits than the shared parameters have; without steps these stay as they are."""
    with _join(tmp_path, dtype=jnp.bfloat16, overlap=overlap) as run:
        run.exchange({"w": run.params["w"] * jnp.bfloat16(0.7)}, 1)
        params, _ = run.exchange(run.params, 1) if overlap else (run.params, None)
        theta = run.member.shared.theta.copy()
        for _ in range(3):
            params, _ = run.exchange(params, 1)
    assert overlap or (run.member.shared.theta == theta).all()
    assert np.asarray(run.params["w"]).dtype == jnp.bfloat16


def test_movement_without_tokens_goes_with_the_next_message(tmp_path):
    def node(name):
        with _join(tmp_path, name, quorum=2, start=2) as run:
            begin = np.asarray(run.params["w"])
            moved = 1.0 if name == "a" else 0.0
            _, first = run.exchange({"w": begin - moved}, int(name == "b"))
            assert (run.params["w"] == begin).all()
            _, second = run.exchange(run.params, 1)
            np.testing.assert_allclose(run.params["w"], begin - 0.5, atol=1e-6)
        return [(x.counted, x.reason) for x in (first, second)]

    with ThreadPoolExecutor(2) as pool:
        of_a, of_b = pool.map(node, "ab")
    assert of_a == [(False, "it has no tokens"), (True, "")] and of_b == [(True, "")] * 2


@pytest.mark.parametrize("damage", [b"", b"JGCR" + bytes(60)])
def test_a_damaged_file_of_a_node_is_said(damage, tmp_path, caplog):
    _run(tmp_path, folder=tmp_path / "disk")
    (tmp_path / "disk" / "a.rounds").write_bytes(damage)
    with _join(tmp_path, folder=tmp_path / "disk"):
        assert "a comes back without its residual" in caplog.text
    (tmp_path / "disk" / "a.rounds").unlink()
    (tmp_path / "disk" / "a.rounds").mkdir()
    with pytest.raises(rounds.RoundsError, match=r"a\.rounds cannot be read: Is a directory"):
        _join(tmp_path, folder=tmp_path / "disk")


def test_other_settings_are_a_short_line(tmp_path):
    many = {f"setting{i:02d}": i for i in range(30)}
    _join(tmp_path, settings=many).leave()
    with pytest.raises(rounds.RoundsError, match=r"setting00=0, here None; .*; and 24 more$") as error:
        _join(tmp_path, "b")
    assert len(str(error.value)) < 400
