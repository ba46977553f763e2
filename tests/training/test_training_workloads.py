"""The papers' workloads: each reads its data format from disk, trains, resumes bit for bit, and evaluates."""

import json
from math import ceil
from pathlib import Path

import jax
import pytest
from camvid_helpers import write_camvid
from image_helpers import (
    WNIDS,
    write_cifar100,
    write_food101,
    write_imagenet,
    write_prepared_imagenet,
    write_tiny_imagenet,
)

from jgc.compress import Dense
from jgc.lab.plan.needs import shapes_of
from jgc.nodes.layouts import make_nodes
from jgc.training.output.metrics import read
from jgc.training.run import checkpoint, setup as building
from jgc.training.settings import cli
from jgc.training.settings.config import Config, check, resolve
from jgc.training.steps.optimizer import make_schedule
from jgc.types import Nodes

# a failed read or write of Orbax leaves callbacks for an event loop that is gone
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

STEPS = "--nodes 2 --batch-size 6 --learning-rate 0.1 --schedule constant --learning-rate-warmup 0 --weight-decay 1e-4"
STEPS += " --checkpoint-every 2 --evaluate-every 0 --diagnose-every 0"
PHASES = "--compressor.warmup-steps 1 --compressor.autoencoder-steps 1 --compressor.alpha 0.05"
REAL = building.make_model
CROP = "--data.crop 32 --data.threads 2"
SHALLOW = "--model.name resnet18"  # compiles in a third of the time

WORKLOADS = {  # where the data comes from, and what that workload alone is told
    "imagenet_resnet50": (write_imagenet, f"{CROP} {SHALLOW}"),
    "imagenet_resnet50, prepared": (write_prepared_imagenet, f"{CROP} {SHALLOW}"),
    "food101_vgg11": (write_food101, CROP),
    "tinyimagenet_convnet5": (write_tiny_imagenet, ""),
    "tinyimagenet_vgg16": (write_tiny_imagenet, ""),
    "cifar100_resnet50": (write_cifar100, SHALLOW),
    # with half the layers
    "camvid_pspnet": (lambda data: write_camvid(data).parent, "--model.name pspnet18 --data.crop 33"),
}


def narrow(name: str, num_classes: int, **settings):
    """The workload's model with 4 channels in the first layer: all layers, few parameters."""
    widths = {"widths": (4, 8, 8, 8, 8)} if name == "convnet5" else {"width": 4}
    return REAL(name, num_classes, **widths, **settings)


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """Narrow models, all nodes on one device, in the repository's root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", narrow)
        patch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
        patch.chdir(Path(__file__).parents[2])
        yield


def train(workload: str, data: Path, run_dir: Path, *words: str) -> int:
    name, _, _ = workload.partition(",")
    words = (*STEPS.split(), *PHASES.split(), *WORKLOADS[workload][1].split(), *words)
    return cli.main(["--method", "lgc_ps", "--workload", name, "--data-dir", str(data),
                     "--run-dir", str(run_dir), *words])  # fmt: skip


def arrays(run_dir: Path) -> dict:
    return checkpoint.restore(checkpoint.open_manager(run_dir)).arrays


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workload_trains_and_resumes(workload, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = WORKLOADS[workload][0](tmp_path / "data")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(workload, data, whole, "--steps", "4") == 0
    assert train(workload, data, stopped, "--steps", "2") == 0
    assert train(workload, data, stopped, "--steps", "4", "--resume") == 0
    got, want = arrays(stopped), arrays(whole)
    assert got.keys() == want.keys() and all(got[name].tobytes() == want[name].tobytes() for name in want)
    summary = json.loads((whole / "summary.json").read_text())
    assert [phase["name"] for phase in summary["phases"]] == ["dense", "top-k", "compressed"]
    if workload != "camvid_pspnet":
        assert round(9 * summary["test_accuracy"], 4) in range(10)  # of nine images
    assert 0 <= summary[summary["score"]] <= 1 and len(summary["phases"][2]["wire"]) > 0


def test_broken_image_ends_run(tmp_path, capsys):
    data = write_imagenet(tmp_path / "data")
    first = ["--data.validation", "0.4", "--steps", "2"]
    assert train("imagenet_resnet50", data, tmp_path / "run", *first) == 0
    for i in range(6):
        (data / "train" / WNIDS[1] / f"{WNIDS[1]}_{i}.JPEG").write_bytes(b"<html>")
    capsys.readouterr()
    words = ["--data.validation", "0.4", "--steps", "9", "--resume"]
    assert train("imagenet_resnet50", data, tmp_path / "run", *words) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: cannot decode {data}/train/{WNIDS[1]}/") and said.count("\n") == 1
    assert "checkpoint is that of step 2" in said and "Traceback" not in said
    assert checkpoint.restore(checkpoint.open_manager(tmp_path / "run")).step == 2
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")][:2] == [1, 2]


# The real ones, from shapes alone.


@pytest.mark.parametrize(
    ("workload", "nodes", "batch", "values"),
    [
        ("imagenet_resnet50", 8, 256, 25_557_032),  # torchvision's
        ("food101_vgg11", 16, 128, 14_714_688 - 2 * 2_359_808 + 101 * 513),  # torchvision's VGG-16 without two, a head
        ("tinyimagenet_convnet5", 22, 132, 414_696),
        ("tinyimagenet_vgg16", 32, 256, 14_728_266 - 4_224 + 190 * 513),  # pytorch-cifar's, fewer biases
        ("cifar100_resnet50", 24, 120, 25_557_032 - 900 * 2049),
    ],
)
def test_paper_settings(workload, nodes, batch, values):
    config = resolve(Config(Dense(), workload=workload))
    check(config)
    assert (config.nodes, config.batch_size) == (nodes, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", REAL)
        _, state, (images, labels), _ = shapes_of(config, Nodes(nodes, nodes))
    assert sum(x.size for x in jax.tree.leaves(state.params)) == values
    assert images.shape[:2] == labels.shape == (nodes, batch // nodes)


def test_imagenet_schedule():
    config = resolve(Config(Dense(), workload="imagenet_resnet50"))
    rate, epoch = make_schedule(config), 1_281_167 / 256
    ends = [float(rate(round(30 * i * epoch) + by)) for i in (1, 2) for by in (-2, 2)]
    assert ends == pytest.approx([0.1, 0.01, 0.01, 0.001])
    assert config.steps == ceil(90 * epoch)
