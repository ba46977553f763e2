"""`python -m jgc sweep`: one setting at several values."""

import json
from pathlib import Path

import pytest
from tiny import tiny_model

from jgc.compress import Dense, Egc, TopK
from jgc.lab.report.runs import Run, read_run
from jgc.lab.report.sweep import PAGE, PICTURE, Point, Sweep, draw, markdown, plan, sweep
from jgc.training.errors import NonFinite, UserError

CHANGES = {"steps": 6, "warmup_steps": 2, "batch_size": 16, "evaluate_every": 3, "diagnose_every": 2, "nodes": 2,
           "schedule_steps": 6, "learning_rate_warmup": 2}  # fmt: skip
OTHER = ("batch_size", "diagnose_every")  # options of train.py alone


def asked(folder, values, methods=("egc",), field="compressor.ratio", settings=()) -> Sweep:
    """`sweep` with `CHANGES`, and the ages of EGC's residuals."""
    options = {name: value for name, value in CHANGES.items() if name not in OTHER}
    given = (*(f"{name}={CHANGES[name]}" for name in OTHER), "egc.track_age=true", *settings)
    return Sweep(run_dir=folder, field=field, values=(values,), methods=methods, seeds=("0",), set=given, **options)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jgc.training.run.setup.make_model", tiny_model)
        sweep(asked(folder, "20,200", ("egc,baseline",)), "the command")
    return folder


@pytest.mark.slow
def test_one_run_for_each_value(swept):
    runs = {path.parent.name for path in swept.glob("*/summary.json")}
    assert runs == {f"{name}-seed0" for name in ("egc-ratio=20", "egc-ratio=200", "baseline")}
    ratios = {json.loads((swept / f"egc-ratio={k}-seed0" / "config.json").read_text())["compressor"]["ratio"]
              for k in (20, 200)}  # fmt: skip
    assert ratios == {20.0, 200.0}


@pytest.mark.slow
def test_page_has_row_for_each_value(swept):
    page = (swept / PAGE).read_text()
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in page.splitlines() if line.startswith("| ")}
    assert rows == {("method", "ratio"), ("egc", "20"), ("egc", "200"), ("baseline", "-")}
    assert "the command" in page and "one seed" in page and "entropy of a layer, bits" in page
    assert "oldest residual" in page and "ratio in elements" in page
    assert (swept / PICTURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sweep_skips_finished_runs(swept, monkeypatch, capsys):
    monkeypatch.setattr("jgc.lab.launch.run", lambda *_, **__: pytest.fail("trained again"))
    sweep(asked(swept, "20"))
    assert "finished before" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("flat, title, scale", [(0.1, "Compression ratio in elements", "log"),
                                                (-1.0, "Entropy of a layer's histogram", "linear")])  # fmt: skip
def test_picture_shows_varying_entropy(swept, monkeypatch, flat, title, scale):
    drawn = []
    monkeypatch.setattr("jgc.lab.report.sweep.save_figure", lambda figure, path: drawn.append(figure))
    monkeypatch.setattr("jgc.lab.report.sweep.FLAT", flat)
    runs = {k: (read_run(swept / f"egc-ratio={k}-seed0"),) for k in ("20", "200")}
    draw([Point("egc", k, run) for k, run in runs.items()], "compressor.ratio", swept / PICTURE)
    right = drawn[0].axes[1]
    assert (right.get_title(), right.get_yscale()) == (title, scale)


def test_wrong_value_stops_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("jgc.lab.launch.run", lambda *_, **__: pytest.fail("trained"))
    held_out = ["schedule=validation", "data.validation=0.1"]
    for field, values, message in [
        ("correction.decay", "0.1,-1", "egc-correction.decay=-1: decay must be positive, got -1"),
        ("data.validation", "0.1,0", "egc-data.validation=0: --schedule validation needs images held out"),
        ("model.name", "convnet5,lstm", "egc-model.name=lstm: `norm` must be one of"),
    ]:
        with pytest.raises(UserError, match=message):
            sweep(asked(tmp_path, values, field=field, settings=held_out))


def test_page_names_different_steps():
    page = markdown([Point("egc", str(n), (fake_run(n),)) for n in (2, 3)], "steps", "digits_convnet5", [0], "")
    assert "2 or 3 steps, one seed" in page


def fake_run(steps):
    summary = {"steps": steps, "score": "test_accuracy", "test_accuracy": 0.5, "element_ratio": 2.0,
               "compression_ratio": {"worker": 2.0}}  # fmt: skip
    return Run(Path("run"), {}, summary, [])


def test_plan_run_setting():
    assert list(plan("nodes", ["2", "8"], {"baseline": Dense(), "topk": TopK()})) == [
        "baseline-nodes=2", "baseline-nodes=8", "topk-nodes=2", "topk-nodes=8"]  # fmt: skip


def test_plan_group_setting():
    assert list(plan("correction.patience", ["1", "3"], {"egc": Egc()})) == [
        "egc-correction.patience=1", "egc-correction.patience=3"]  # fmt: skip


@pytest.mark.slow
def test_page_after_diverging_run(swept, monkeypatch):
    def diverges(*_, **__):
        raise NonFinite(3, "the loss is not finite", "nothing kept")

    monkeypatch.setattr("jgc.lab.launch.run", diverges)
    with pytest.raises(UserError, match=r"1 of 2 runs did not finish; .*sweep.md is on the others"):
        sweep(asked(swept, "20,30"))
    page = (swept / PAGE).read_text()
    assert "| egc | 20 |" in page
    assert "Did not finish: `egc-ratio=30-seed0`, stopped at step 3: the loss is not finite; nothing kept." in page
    with pytest.raises(UserError, match="no run finished: stopped at step 3"):
        sweep(asked(swept, "40"))


@pytest.mark.parametrize("field, values, message", [
    ("data", ["a"], "--field must be a setting"),
    ("compressor.ration", ["1"], "--field must be .*got 'compressor.ration'; did you mean compressor.ratio"),
    ("ratio", ["1"], "got 'ratio'; did you mean compressor.ratio"),
    ("compressor.rank", ["1"], "--field compressor.rank: none of --methods "),
    ("seed", ["1"], "--field must be a setting"),
    ("nodes", [], "--values names none"),
    ("layers.dense", ["^a/"], "--values must be such that a folder can be named by them, got '.a/'"),
])  # fmt: skip
def test_wrong_field_or_value_is_one_line(field, values, message):
    with pytest.raises(UserError, match=message):
        plan(field, values, {"egc": Egc()})
