"""Plans agree with what real runs write down and with what the compiler says of a real step; the loader's benchmark."""

import json

import jax
import numpy as np
import pytest
from image_helpers import write_imagenet
from training_helpers import tiny_config, tiny_model

from jgc.__main__ import main
from jgc.compress import Dense, LgcPs, PowerSgd, Qsgd, TopK
from jgc.lab.plan import plan
from jgc.lab.plan.memory import ESTIMATED, FROM_ONE, MEASURED, most_alive
from jgc.nodes import make_nodes
from jgc.training import loop, setup as building
from jgc.training.errors import UserError
from jgc.training.program import compile_gradients, compile_update
from jgc.training.setup import build

pytestmark = pytest.mark.slow

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
        for module in (building, plan):
            patch.setattr(module, "make_nodes", lambda count: make_nodes(count, jax.devices()[:1]))
        yield


def planned(name, measure="nothing", nodes=NODES, devices=None) -> plan.Plan:
    options = {name: [f"--batch-size={BATCH}"]}
    return plan.plans_of({name: VARIANTS[name]}, "digits_convnet5", nodes, devices, measure, options)[0]


@pytest.mark.parametrize("name", ["topk", "qsgd", "powersgd", "lgc_ps"])
def test_the_bytes_are_those_that_a_run_writes_into_its_summary(name, tmp_path):
    config = tiny_config(tmp_path, VARIANTS[name], nodes=NODES, batch_size=BATCH, steps=3, diagnose_every=0)
    assert loop.run(config) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    ours = planned(name)
    assert [phase.name for phase in ours.phases] == [phase["name"] for phase in summary["phases"]]
    for phase, ran in zip(ours.phases, summary["phases"], strict=True):
        assert (phase.logical, phase.once) == (ran["wire"]["logical"], ran["wire"]["once"])
    assert (ours.values, ours.dense) == (summary["parameters"], 4 * summary["parameters"])


def test_the_memory_is_that_of_the_compiled_step():
    """Arguments to the byte, temporaries as the compiler has them, and the estimates within a factor."""
    config = tiny_config(None, VARIANTS["topk"], nodes=NODES, batch_size=BATCH)
    setup = build(config)
    parts, state = setup.parts, setup.state
    batch = jax.tree.map(np.asarray, setup.source.batch(0, 0, NODES, BATCH))
    compute = compile_gradients(parts, state, batch)
    gradients = compute(state.params, state.own, batch)
    updates = [compile_update(parts, phase.value, state, gradients).run for phase in parts.compressor.schedule]
    by_hand = [program.memory_analysis() for program in (compute, *updates)]

    measured, quick, guess = (planned("topk", measure) for measure in ("step", "node", "nothing"))
    own = measured.held["statistics and carry"]
    in_all, batches = sum(measured.held.values()), measured.held["batches, two of them ahead"]
    assert by_hand[0].argument_size_in_bytes == measured.held["parameters"] + own + batches // 3
    beside = own + 2 * 4 * NODES + 4  # collections after the batch, losses and accuracies, and the step's number
    for analysis in by_hand[1:]:
        assert analysis.argument_size_in_bytes == in_all - batches + beside
    assert [t.how for t in measured.temporary] == [*[MEASURED] * 3, ESTIMATED]
    assert [t.bytes for t in measured.temporary[1:3]] == [analysis.temp_size_in_bytes for analysis in by_hand[1:]]
    assert measured.temporary[0].bytes == by_hand[0].temp_size_in_bytes + own
    assert [t.how for p in (quick, guess) for t in p.temporary] == [FROM_ONE, *[ESTIMATED] * 5]
    assert 0.7 < quick.peak / measured.peak < 1.5 and 0.7 < guess.peak / measured.peak < 1.5


def test_evaluation_takes_what_its_largest_layer_does():
    """500 test images of the digits, 8x8 of 1 channel, and the first layer's result, half of which is not needed."""
    one, four = (planned("dense", nodes=8, devices=devices).temporary[-1] for devices in (1, 4))
    assert (one.name, one.how) == ("evaluation", ESTIMATED)
    assert one.bytes == pytest.approx(4 * four.bytes, rel=0.01) and one.bytes > 500 * 64 * 4


def test_results_that_are_needed_later_stay_alive():
    x = jax.ShapeDtypeStruct((100,), np.float32)

    def chain(x):  # 400 bytes each: y stays till the end
        y = x + 1
        for _ in range(3):
            x = x * 2
        return y + x

    assert most_alive(jax.make_jaxpr(chain)(x).jaxpr) == 3 * 400
    assert most_alive(jax.make_jaxpr(jax.jit(chain))(x).jaxpr) == 3 * 400
    assert most_alive(jax.make_jaxpr(lambda x: x.sum())(x).jaxpr) == 4


def test_what_each_node_has_is_divided_among_the_devices():
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
def test_devices_that_cannot_be_planned_for_are_one_line(devices, measure, message):
    with pytest.raises(UserError) as raised:
        planned("dense", measure, nodes=8, devices=devices)
    assert message in str(raised.value)


def test_the_command_needs_no_data_and_takes_the_methods_settings(capsys):
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


def test_the_loaders_rate_is_shown_by_the_number_of_threads(tmp_path, capsys):
    data = write_imagenet(tmp_path / "data")
    assert main(["bench", "loader", "--data-dir", str(data), "--threads", "1", "2", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "`imagenet_resnet50`, batch 256; imagenet, to train on 18 images" in said
    assert [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("|")][2:] == ["1", "2"]
    assert main(["bench", "loader", "--workload", "cifar10_resnet20"]) == 2
    assert "is decoded once, not while training" in capsys.readouterr().err
    assert main(["bench", "loader", "--data-dir", str(tmp_path)]) == 2
    assert "imagenet2012 is missing" in capsys.readouterr().err
