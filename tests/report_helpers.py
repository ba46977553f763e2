"""Runs with what reports read of one."""

from pathlib import Path

from jgc.lab.report.runs import Run


def made_up(folder: str, accuracy: float, method="dense", seed=0, total=100, extra=None, lines=(), **config) -> Run:
    """A run with what reports read of one."""
    every = config.get("local", {}).get("every", 1)
    wire = {"logical": {"worker": {"up": {"values": 4.0}}}, "physical": {}, "physical_one_node_per_device": {}}
    phase = {"name": "last", "start": 0, "steps": 10, "seconds_per_step": 0.5 + seed, "wire": wire}
    summary = {"method": method, "workload": "cifar10_resnet50", "seed": seed, "steps": 10, "layout": "emulated",
               "test_accuracy": accuracy, "phases": [phase], "total_bytes": total, "dense_total_bytes": 1000,
               "parameters": 2, "reconstruction_cosine": None,
               "compression_ratio": dict.fromkeys(("leader", "worker"), 2.0 * every)}  # fmt: skip
    settings = {"method": method, "compressor": extra or {}, "seed": seed, "steps": 10, "nodes": 2, "batch_size": 8,
                "run_dir": folder, "data": {"name": "cifar10"}, "model": {"name": "resnet50"}} | config  # fmt: skip
    return Run(Path(folder), settings, summary, list(lines))
