"""What each node of each method sends in a step of its last phase, from a model's shapes alone; nothing is trained.

    python -m jgc bench bytes --workload cifar10_resnet50 --stem imagenet --classes 1000

Beside it stands what the LGC paper prints for the same workload (Table VI).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax

from jgc import compress
from jgc.lab.bench.step_time import random_source, variables_of
from jgc.lab.report import paper
from jgc.lab.report.tables import paper_bytes, ratio, table
from jgc.layout.pack import make_packing
from jgc.method.guard import logical
from jgc.nodes import make_nodes
from jgc.training.config import Config, ModelConfig, resolve
from jgc.training.setup import make_compressor, model_of
from jgc.wire.account import logical_bytes


class Row(NamedTuple):
    """One method in its last phase.

    Attributes:
      method: its name.
      up: bytes by role and kind that a node of that role sends in a step.
      dense: bytes of the gradient in f32.
    """

    method: str
    up: dict[str, dict[str, float]]
    dense: float


def measure(workload: str, alpha: float, stem: str, classes: int) -> tuple[Config, list[Row]]:
    """All methods at their defaults, the values selected by the share alpha of each layer.

    Args:
      workload: a name in `jgc.training.workloads`.
      alpha: share selected, for the methods that select.
      stem: of a ResNet, as in `ModelConfig`.
      classes: outputs of the head; 0 for those of the data set.
    """
    rows = []
    for method in compress.METHODS.values():
        names = {field.name for field in dataclasses.fields(method.settings)}
        settings = method.settings(**({"alpha": alpha} if "alpha" in names else {}))
        model = ModelConfig(stem=stem, classes=classes)  # type: ignore[arg-type]
        config = resolve(Config(compressor=settings, workload=workload, model=model))
        config = dataclasses.replace(config, compressor=settings)  # the method's defaults, not the workload's
        params = jax.eval_shape(partial(variables_of, config))["params"]
        compressor = make_compressor(config, model_of(config, random_source(config)))
        nodes = make_nodes(config.nodes, jax.devices()[:1])
        wire = logical(compressor, compressor.schedule[-1].value, params, nodes)
        by_role = logical_bytes(wire.logical, nodes.count)
        up = {role: ways.get("up", {}) for role, ways in by_role.items() if role != "server"}
        rows.append(Row(method.name, up, 4.0 * make_packing(params).size))
    return config, rows


def markdown(config: Config, rows: Sequence[Row], alpha: float) -> str:
    """The rows as a page, with the paper's beside them where it has them."""
    head = ["method", "leader, bytes up", "ratio", "worker, bytes up", "ratio", "of a worker's: positions",
            "paper: MB", "paper: ratio"]  # fmt: skip
    lines = []
    for row in rows:
        worker = row.up.get("worker", {})
        leader = row.up.get("leader", worker)
        sums = [sum(kinds.values()) for kinds in (leader, worker)]
        cells = [cell for sent in sums for cell in (f"{sent:,.0f}", ratio(row.dense / sent if sent else None))]
        positions = sum(size for kind, size in worker.items() if "positions" in kind)
        theirs = paper.reported(config.workload, row.method)
        lines.append([row.method, *cells, f"{positions:,.0f}", *paper_bytes(*theirs)])
    n = rows[0].dense / 4
    return (
        f"`{config.workload}`, {n:,.0f} parameters ({rows[0].dense / 1e6:.1f} MB), {config.nodes} nodes, "
        f"alpha {alpha:g}; last phase of each method at its defaults, from shapes alone.\n\n{table(head, lines)}\n"
    )
