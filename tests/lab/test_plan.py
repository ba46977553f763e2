"""`jgc plan`: bytes as real runs write them down, memory as the compiler of a real step has it."""

import json
import re

import jax
import numpy as np
import pytest
from contract import some_by_default
from tiny import tiny_model
from training_helpers import tiny_config

from jgc.compress import METHODS, Dense, LgcPs, PowerSgd, Qsgd, TopK
from jgc.lab.commands import main
from jgc.lab.plan import bucket, needs, tables
from jgc.lab.plan.memory import ESTIMATED, FROM_ONE, MEASURED, most_alive
from jgc.lab.plan.whole_run import whole_run
from jgc.lab.shared.choices import variants_of
from jgc.lab.shared.programs import arrays_of, compile_gradients, compile_update
from jgc.lab.shared.tables import ratio
from jgc.nodes.layouts import make_nodes
from jgc.training.errors import UserError
from jgc.training.models import make_model
from jgc.training.run import loop, setup as building
from jgc.training.run.setup import build

VARIANTS = {
    "dense": Dense(),
    "topk": TopK(alpha=0.1, warmup_steps=1),
    "qsgd": Qsgd(),
    "powersgd": PowerSgd(warmup_steps=1),
    "lgc_ps": LgcPs(alpha=0.05, warmup_steps=1, autoencoder_steps=1),
}
NODES, BATCH = 2, 16


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """The tiny model, and all nodes on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", tiny_model)
        for module in (building, needs):
            patch.setattr(module, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
        yield


def planned(name, measure="nothing", nodes=NODES, devices=None) -> needs.Plan:
    options = {name: [f"--batch-size={BATCH}"]}
    return needs.plans_of({name: VARIANTS[name]}, "digits_convnet5", nodes, devices, measure, options)[0]


@pytest.mark.parametrize("name", some_by_default(["topk", "qsgd", "powersgd", "lgc_ps"], ["qsgd"]))
def test_bytes_match_run_summary(name, tmp_path):
    config = tiny_config(tmp_path, VARIANTS[name], nodes=NODES, batch_size=BATCH, steps=3, diagnose_every=0)
    assert loop.run(config) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    ours = planned(name)
    assert [phase.name for phase in ours.phases] == [phase["name"] for phase in summary["phases"]]
    for phase, ran in zip(ours.phases, summary["phases"], strict=True):
        assert (phase.logical, phase.once) == (ran["wire"]["logical"], ran["wire"]["once"])
    assert (ours.values, ours.dense) == (summary["parameters"], 4 * summary["parameters"])
    *phases, whole = whole_run([ours._replace(config=config)], lambda count: count)[1] * (1 + (name == "qsgd"))
    assert [int(row[2]) for row in phases] == [phase["steps"] for phase in summary["phases"]]
    assert whole[7] + whole[9] == summary["total_bytes"]
    assert whole[10] == ratio(summary["dense_total_bytes"] / summary["total_bytes"])


@pytest.mark.slow
def test_whole_imagenet_run_is_as_long_as_the_papers():
    """Table IV of the LGC paper: 0.4 TB, all nodes, the whole training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", make_model)
        options = {"lgc_ps": ["--compressor.positions=leader"]}
        plans = needs.plans_of(variants_of(["lgc_ps", "gradiveq"]), "imagenet_resnet50", None, 8, "nothing", options)
    rows = whole_run(plans, lambda count: count)[1]  # gradiveq has none: it chooses its phases
    assert [(row[1], row[2]) for row in rows] == [
        ("dense", "200"), ("top-k", "300"), ("compressed", "449,911"), ("whole run", "450,411")]  # fmt: skip
    assert rows[0][7] == 200 * 8 * 4 * 25_557_032
    assert rows[-1][7] == pytest.approx(0.408e12, rel=2e-3)


def test_memory_matches_compiled_step():
    """Arguments to the byte, temporaries as the compiler has them, and the estimates within a factor."""
    config = tiny_config(None, VARIANTS["topk"], nodes=NODES, batch_size=BATCH)
    setup = build(config)
    parts, state = setup.parts, setup.state
    batch = jax.tree.map(np.asarray, setup.source.batch(0, 0, NODES, BATCH))
    compute = compile_gradients(parts, state, batch)
    gradients = compute(state.params, state.model_state, batch)
    updates = [compile_update(parts, phase.value, arrays_of(state), gradients) for phase in parts.compressor.schedule]
    by_hand = [program.memory_analysis() for program in (compute, *updates)]

    measured, quick, guess = (planned("topk", measure) for measure in ("step", "node", "nothing"))
    own = measured.held["statistics and carry"]
    in_all, batches = sum(measured.held.values()), measured.held["batches, two of them ahead"]
    assert by_hand[0].argument_size_in_bytes == measured.held["parameters"] + own + batches // 3
    beside = own + 2 * 4 * NODES  # collections after the batch, losses and accuracies
    for analysis in by_hand[1:]:  # XLA drops the step's number, i32, where nothing is drawn at random
        assert analysis.argument_size_in_bytes - in_all + batches - beside in (0, 4)
    assert [t.how for t in measured.temporary] == [*[MEASURED] * 3, ESTIMATED]
    assert [t.bytes for t in measured.temporary[1:3]] == [analysis.temp_size_in_bytes for analysis in by_hand[1:]]
    assert measured.temporary[0].bytes == by_hand[0].temp_size_in_bytes + own
    assert [t.how for p in (quick, guess) for t in p.temporary] == [FROM_ONE, *[ESTIMATED] * 5]
    assert 0.7 < quick.peak / measured.peak < 1.5 and 0.7 < guess.peak / measured.peak < 1.5


def test_evaluation_scales_with_batch():
    """500 test images of the digits, 8x8 of 1 channel, and the first layer's result, half of which is not needed."""
    one, four = (planned("dense", nodes=8, devices=devices).temporary[-1] for devices in (1, 4))
    assert (one.name, one.how) == ("evaluation", ESTIMATED)
    assert one.bytes == pytest.approx(4 * four.bytes, rel=0.01) and one.bytes > 500 * 64 * 4


def test_most_alive_keeps_later_operands():
    x = jax.ShapeDtypeStruct((100,), np.float32)

    def chain(x):  # 400 bytes each: y stays till the end
        y = x + 1
        for _ in range(3):
            x = x * 2
        return y + x

    assert most_alive(jax.make_jaxpr(chain)(x).jaxpr) == 3 * 400
    assert most_alive(jax.make_jaxpr(jax.jit(chain))(x).jaxpr) == 3 * 400
    assert most_alive(jax.make_jaxpr(lambda x: x.sum())(x).jaxpr) == 4


def test_local_state_is_divided_among_devices():
    one, four = (planned("powersgd", nodes=8, devices=devices) for devices in (1, 4))
    assert one.held.keys() == four.held.keys()
    for name, size in one.held.items():
        shared = name in ("parameters", "optimiser") or "shared" in name
        assert four.held[name] == size // (1 if shared else 4), name
    assert four.phases == one.phases


@pytest.mark.parametrize(
    ("devices", "measure", "message"),
    [
        (3, "node", "--devices must divide the 8 nodes evenly (one of 1, 2, 4, 8), got 3"),
        (0, "node", "got 0"),
        (4, "step", "--measure step compiles for the devices that are here, on which 8 of 8 nodes share one"),
    ],
)
def test_wrong_devices_is_one_line(devices, measure, message):
    with pytest.raises(UserError) as raised:
        planned("dense", measure, nodes=8, devices=devices)
    assert message in str(raised.value)


def test_text_is_planned_with_its_whole_batch():
    (plan,) = needs.plans_of(variants_of(["topk"]), "ptb_lstm", None, 1, "nothing")
    assert plan.phases[-1].logical and plan.dense == 4.0 * plan.values


@pytest.mark.parametrize("fragments", [1, 3])
def test_local_steps_are_planned_by_the_round(capsys, fragments):
    """Every node has parameters and a state of its own; the ratio is beside a gradient in every step."""
    words = "plan --workload ptb_gpt --methods baseline --measure nothing --set local.every=30 --devices 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", make_model)
        assert main([*words.split(), "--set", f"local.fragments={fragments}"]) == 0
        said = capsys.readouterr().out
        assert main([*words.split(), "--set", "local.every=30", "--measure", "step"]) == 2
    assert "Bytes of one round of 30 steps; ratios compared with a gradient in every step" in said and "30x" in said
    assert re.search(r"method +phase +rounds", said)
    rows = {row.split("  ")[0].strip(): row.split("  ")[-1].strip() for row in said.splitlines() if "  " in row.strip()}
    assert rows["parameters"] == "3.24 MB" and rows["each node's parameters"] == "6.48 MB"  # two nodes a device
    assert rows["each node's optimiser"] == "13 MB" and "3.24 MB" in rows["optimiser, outer"]
    assert "--measure step compiles ordinary steps" in capsys.readouterr().err


def test_command_needs_no_data(capsys):
    words = "plan --workload imagenet_resnet50 --nodes 4 --methods baseline,dgc,lgc_ps --measure nothing"
    words += " --set data.crop=32 --set batch_size=8 --set dgc.alpha=0.01 --set lgc_ps.innovation=0.2"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    assert "imagenet_resnet50: resnet50 with" in said and "4 nodes on 1 device, batch 8" in said
    for row in ("parameters", "each node's: residual", "shared: autoencoder", "gradients (estimate)", "top-k 25 %",
                "compressed", "positions"):  # fmt: skip
        assert row in said
    for bad, message in (("nodes=3", "3 nodes do not divide a batch of 8"), ("adam.x=1", "adam is none of --methods")):
        assert main([*words.split(), "--set", bad]) == 2
        assert message in capsys.readouterr().err


def test_default_methods_go_with_the_optimiser(capsys):
    assert main("plan --workload ptb_gpt --measure nothing".split()) == 0
    assert "powersgd" in capsys.readouterr().out
    assert main("plan --workload ptb_gpt --measure nothing --methods dgc".split()) == 2
    assert "after --set: optimizer=sgd or dgc.momentum_correction=false" in " ".join(capsys.readouterr().err.split())


# --- bytes of a model of the papers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet50():
    """Three methods on the ResNet-50 with 1,000 classes, the size of which the LGC paper's Table VI states."""
    names = ("baseline", "topk", "lgc_ps")
    options = {name: ["--model.stem=imagenet", "--model.classes=1000"] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", make_model)
        plans = needs.plans_of(variants_of(names), "cifar10_resnet50", None, 1, "nothing", options, 0.001)
    return dict(zip(names, plans, strict=True))


@pytest.mark.slow
def test_all_plans_every_method():
    variants = variants_of(["all"])
    options = {name: [f"--batch-size={BATCH}"] for name in variants}
    plans = needs.plans_of(variants, "digits_convnet5", NODES, None, "nothing", options, 0.02)
    assert [plan.method for plan in plans] == list(METHODS)
    assert all(getattr(plan.config.compressor, "alpha", 0.02) == 0.02 for plan in plans)


def test_resnet50_has_the_papers_size(resnet50):
    assert {plan.dense for plan in resnet50.values()} == {4 * 25_557_032.0}  # Table VI: 102.2 MB


def test_bytes_count_values_positions_and_first_layer(resnet50):
    last = {name: plan.phases[-1].logical for name, plan in resnet50.items()}
    assert last["baseline"]["worker"]["up"] == {"dense": 4 * 25_557_032.0}
    topk, lgc = last["topk"]["worker"]["up"], {role: ways["up"] for role, ways in last["lgc_ps"].items()}
    assert topk["values"] == pytest.approx(4 * 0.001 * 25.5e6, rel=0.01)
    assert topk["dense"] == 4 * 7 * 7 * 3 * 64  # the first layer
    assert set(lgc["leader"]) - set(lgc["worker"]) == {"code"}
    assert lgc["worker"]["positions"] == lgc["leader"]["positions"] == pytest.approx(topk["positions"], rel=1e-3)
    assert 8 * topk["positions"] / (topk["values"] / 4) == pytest.approx(12.0, abs=0.1)  # bits each, at 0.1 %


def test_page_has_exact_bytes(resnet50):
    page = tables.markdown(list(resnet50.values()))
    assert "with 25,557,032 parameters, 2 nodes on 1 device" in page
    assert "| baseline | dense | - | - | 102,228,128 | 1x | 0 |" in page


def test_an_exchange_through_a_bucket(capsys):
    words = "--workload digits_convnet5 --methods topk,powersgd --nodes 4 --measure nothing --link bucket"
    assert main(["plan", *words.split(), "--bandwidth", "1mbit"]) == 0
    said = capsys.readouterr().out
    options = {name: ["--batch-size=16"] for name in ("topk", "powersgd")}
    topk, powersgd = needs.plans_of({name: VARIANTS[name] for name in options}, "digits_convnet5", 4, None, "nothing",
                                    options, bucket=True)  # fmt: skip
    head, rows = bucket.round_costs([topk, powersgd], 125e3, str)
    dense, sparse = topk.messages
    assert dense == topk.dense > sparse and [row[:4] for row in rows] == [
        ["topk", "dense", str(dense), str(3 * dense)], ["topk", "top-k", str(sparse), str(3 * sparse)]
    ]  # fmt: skip
    assert float(rows[0][-1]) == pytest.approx(5 * 0.05 + 4 * dense / (125e3 * 1448 / 1538), rel=0.01)
    assert float(rows[0][4]) == pytest.approx(0.01675 + 4 * 4e-4, abs=5e-4)  # two digits
    assert "An exchange through a bucket" in said and "not through a bucket: powersgd" in said and len(head) == 7
    assert "use topk, qsgd" in powersgd.messages
    assert main(["plan", "--bandwidth", "1mbit"]) == 2
    assert "--bandwidth goes with --target or --link bucket only" in capsys.readouterr().err
