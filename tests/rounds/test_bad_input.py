"""What a node is refused, and what it says of a full disk and of a bucket that forgets: one line each."""

import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_helpers import small_files

pytest.importorskip("obstore")

from jgc import compress, rounds
from jgc.rounds.bucket import BucketError, NoBucket, open_bucket
from jgc.rounds.context import Context, Pauses

PARAMS = {"w": jnp.zeros(500)}


def _arguments(**more):
    return {"node": "a", "params": PARAMS, "compressor": compress.dense(), "quorum": 1, "grace": 30} | more


def _join(path, **more):
    return rounds.join(path / "bucket", **_arguments(**more))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A bucket with a run of one node."""
    path = tmp_path_factory.mktemp("run")
    run = _join(path, settings={"every": 30, "data": "x" * 500})
    run.exchange(run.params, 1)
    run.leave()
    return path


@pytest.mark.parametrize("changes, text", [
    ({"settings": {"every": 10, "data": "x" * 500}}, "every=30, here 10"),
    ({"settings": {"every": 30, "data": "y"}}, "data='xxxx.*xxx\\.\\.\\., here 'y'"),
    ({"settings": {"data": "x" * 500}}, "every=30, here None"),
    ({"quorum": 2}, "quorum=1, here 2"),
    ({"seed": 3}, "seed=0, here 3"),
    ({"outer": rounds.Sgd(0.5)}, "rate=0.7, here 0.5"),
    ({"outer": rounds.AdamW()}, "outer='Sgd', here 'AdamW'"),
    ({"compressor": compress.cast()}, "phases=.*words="),
    ({"params": {"w": jnp.zeros(7)}}, "params=.*500.*, here .*7"),
])  # fmt: skip
def test_a_setting_that_differs_is_named_with_both_values(begun, changes, text):
    arguments = _arguments(settings={"every": 30, "data": "x" * 500}, node="b") | changes
    for refused in (rounds.check, rounds.join):
        with pytest.raises(rounds.RoundsError, match=text) as error:
            refused(begun / "bucket", **arguments)
        assert "\n" not in str(error.value) and len(str(error.value)) < 600


NAN = float("nan")


@pytest.mark.parametrize("changes, text", [
    *[({name: x}, f"{name} must be") for name, values in {
        "patience": (NAN, -1, "x"), "total": (0, 1.5, "8", True),
        "outliers": (NAN, 0.5, "x"), "grace": (NAN, "60", None), "quorum": (True, 1.5),
        "poll": ((0, 0), (1, 0.5), (0.1,), "ab", 5, (NAN, 1)), "seed": (-1, 1.5, "x", None, True),
    }.items() for x in values],
    ({"overlap": 1, "merge": True}, "merge must be"),
    ({"overlap": 1, "merge": NAN}, "merge must be"),
    ({"settings": {"every": NAN}}, "settings\\['every'\\] must be a finite number"),
    ({"settings": {"every": jnp.ones(2)}}, "settings\\['every'\\] must be"),
    ({"settings": {"every": [1]}}, "settings\\['every'\\] must be"),
    ({"settings": [1]}, "settings must be a dict"),
    ({"overlap": jnp.ones(2)}, "overlap must be 0 or 1 round"),
    ({"settings": {"quorum": 9}}, "settings may not have 'quorum'"),
    ({"outer": rounds.Sgd}, "outer must be jgc.rounds.Sgd or AdamW.*got Sgd"),
    ({"outer": "sgd"}, "outer must be jgc.rounds.Sgd or AdamW.*got str"),
    ({"outer": optax.sgd(0.7)}, "outer must be jgc.rounds.Sgd or AdamW.*got GradientTransformation"),
    ({"params": {"w": 1.0}}, "the leaf 'w' is not an array"),
    ({"params": {"w": jnp.ones(3), "key": jax.random.key(0)}}, "'key' of the parameters is a random key"),
])  # fmt: skip
def test_arguments_that_no_run_can_use_are_one_line(changes, text, tmp_path):
    for refused in (rounds.check, rounds.join):
        with pytest.raises((ValueError, TypeError), match=text) as error:
            refused(tmp_path / "bucket", **_arguments(**changes))
        assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("make, text", [
    (lambda: rounds.Sgd("x"), "rate must be finite and positive, got 'x'"),
    (lambda: rounds.AdamW(0.1, b1=None), "b1 must be in .*got None"),
    (lambda: rounds.join(None, **_arguments()), "bucket must be a URL, a folder or an open bucket, got None"),
    (lambda: rounds.join("memory:///", **_arguments(folder=3)), "folder must be the path of a folder, or None, got 3"),
])  # fmt: skip
def test_values_of_a_wrong_type_are_one_line(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def test_a_run_does_not_begin_with_nan(tmp_path):
    with pytest.raises(ValueError, match="params must be finite"):
        _join(tmp_path, params={"w": jnp.full(3, NAN)})
    assert not list(tmp_path.rglob("*.json"))


def test_a_folder_or_bucket_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rounds.RoundsError, match=r"folder .*file cannot be used: File exists"):
        _join(tmp_path, folder=tmp_path / "file")
    for nothing in ("", " "):
        with pytest.raises(NoBucket, match="the bucket has no name"):
            rounds.join(nothing, **_arguments())


def test_what_an_exchange_cannot_send_is_refused_before_it_is_sent(tmp_path):
    with _join(tmp_path) as run:
        for tokens in (2**53, 2**70, -1, 1.5, True):
            with pytest.raises(ValueError, match="tokens must be a whole number"):
                run.exchange(run.params, tokens)
        with pytest.raises(ValueError, match="the parameter 'w' had the shape \\(500,\\), now \\(3,\\)"):
            run.exchange({"w": jnp.zeros(3)}, 1)
        assert run.exchange(run.params, np.int64(5))[1].counted


def test_settings_of_numpy_are_numbers(begun):
    settings = {"every": np.int64(30), "data": np.str_("x" * 500)}
    assert rounds.check(begun / "bucket", **_arguments(settings=settings, node="b"))


def test_an_error_is_said_once_although_it_names_the_seconds_that_passed():
    said = []
    context = Context("a", None, rounds.Sgd(), rounds.Rules(), say=said.append)
    pauses = Pauses(context)
    for seconds in ("31.569", "24.2"):
        pauses.failed(BucketError(f"no answer, after 3 retries in {seconds}\u00b5s"))
    pauses.failed(BucketError("denied"))
    assert len(said) == 2


def test_check_says_which_run_there_is_and_writes_nothing(begun, tmp_path):
    arguments = _arguments(settings={"every": 30, "data": "x" * 500})
    before = sorted(begun.rglob("*"))
    assert len(rounds.check(begun / "bucket", **arguments) or "") == 16
    assert sorted(begun.rglob("*")) == before
    assert rounds.check(tmp_path / "bucket", **arguments) is None and not list(tmp_path.glob("bucket/*"))


def test_check_takes_every_argument_of_join(tmp_path):
    arguments = _arguments(folder=tmp_path / "disk", overlap=1, merge=0.5, pause=time.sleep)
    assert rounds.check(tmp_path / "bucket", **arguments) is None and not (tmp_path / "disk").exists()
    with pytest.raises(ValueError, match=r"merge=0\.5 does nothing without overlap=1"):
        rounds.check(tmp_path / "bucket", **arguments | {"overlap": 0})


def test_an_unknown_argument_names_the_rules(tmp_path):
    with pytest.raises(TypeError, match="join has no argument 'quorm'; rules are quorum, grace"):
        _join(tmp_path, quorm=2)


def test_a_full_bucket_is_one_line(tmp_path):
    bucket = open_bucket(tmp_path)
    with small_files(1000), pytest.raises(BucketError, match="is full; delete old rounds") as error:
        bucket.create("a", bytes(5000))
    assert "\n" not in str(error.value) and bucket.get(["a"]) == [None]


def test_a_full_disk_costs_the_residual_and_is_said(tmp_path, caplog):
    run = _join(tmp_path, folder=tmp_path / "disk", params={"w": jnp.zeros(5000)}, compressor=compress.onebit())
    with small_files(4000), caplog.at_level(logging.WARNING, "jgc.rounds"):
        _, outcome = run.exchange({"w": jnp.ones(5000)}, 1)
    assert outcome.counted and "a cannot keep its residual on disk: File too large" in caplog.text
    assert not (tmp_path / "disk" / "a.rounds").exists()


@pytest.mark.parametrize("lost, text", [
    (["checkpoint"], "the bucket forgets: it has rounds, and no checkpoint"),
    (["rounds"], "the bucket forgets: this node was in round 3, and the bucket ends before round 1"),
    (["rounds/00000001/close"], "the bucket forgets: round 1 has no list, and later rounds exist"),
])  # fmt: skip
def test_a_bucket_that_forgets_is_one_line(tmp_path, lost, text):
    run = _join(tmp_path, folder=tmp_path / "disk", poll=(0.001, 0.01))
    for _ in range(3):
        run.exchange(run.params, 1)
    run.leave()
    for name in lost:
        path = tmp_path / "bucket" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(rounds.RoundsError, match=text) as error:
        _join(tmp_path, folder=tmp_path / "disk", poll=(0.001, 0.01))
    assert "\n" not in str(error.value)


def test_local_steps_without_an_exchange_are_sent_later(tmp_path):
    first = _join(tmp_path, folder=tmp_path / "disk", outer=rounds.Sgd(1.0, 0.0))
    first.leave({"w": jnp.full(500, 2.0)})
    again = _join(tmp_path, folder=tmp_path / "disk", outer=rounds.Sgd(1.0, 0.0))
    params, outcome = again.exchange({"w": jnp.ones(500)}, 1)
    assert outcome.counted and float(params["w"][0]) == 3.0
    again.leave()


def test_after_an_exchange_that_was_cut_short_the_message_counts_once(tmp_path):
    class Stop(Exception):
        pass

    def pause(seconds):
        raise Stop

    how = {"folder": tmp_path / "disk", "outer": rounds.Sgd(1.0, 0.0), "quorum": 2}
    run = _join(tmp_path, pause=pause, **how)
    with pytest.raises(Stop):  # while it waits for a second node
        run.exchange({"w": jnp.full(500, 2.0)}, 1)
    run.leave({"w": jnp.full(500, 9.0)})
    assert list(tmp_path.glob("bucket/rounds/00000000/a.left"))

    # b has announced itself: a node that is alone would go on, and its message would wait
    other = _join(tmp_path, node="b", quorum=2, outer=how["outer"])
    with ThreadPoolExecutor(2) as pool:
        exchanged = pool.submit(other.exchange, PARAMS, 1)
        again = pool.submit(lambda: _join(tmp_path, **how)).result()
        assert exchanged.result()[1].members == ("a", "b")
    assert again.number == 1 and float(again.params["w"][0]) == 1.0  # (2 + 0) / 2
    assert not again.member.carry.any()
