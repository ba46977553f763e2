"""plan.json and the CSV file of a plan for targets. What plan.json holds is not compiled again by a later call."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jgc.lab.plan.cycles import Cycles
from jgc.lab.plan.kernels import Kernels
from jgc.lab.plan.programs import READ, Program, Refusal, Row
from jgc.lab.plan.target_page import TargetPlan, reads, slow_ms
from jgc.lab.plan.targets import versions
from jgc.training.errors import UserError
from jgc.training.run.folder import write_whole

Known = dict[str, Program]  # by key


def known_of(path: Path) -> Known:
    """The programs in a plan.json, also in that of a call that did not end; none if there is no such file.

    Raises:
      UserError: the file is none of a plan.
    """
    if not path.exists():
        return {}
    try:
        whole = json.loads(path.read_text())
        rows = [row for target in whole["targets"] for row in target["programs"]] + whole.get("kept", [])
        programs = [_program(row) for row in rows if row.get("key")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no plan of an earlier call: name a new file by --json, or delete it") from error
    return {program.key: program for program in programs}


def _program(row: dict[str, Any]) -> Program:
    fields = {name: row[name] for name in Program._fields if name != "kernels"}
    cycles, kernels = fields["cycles"], row.get("kernels")  # older files have none
    return Program(**fields | {"cycles": cycles and Cycles(**cycles), "kernels": kernels and Kernels(**kernels)})


def write_json(path: Path, plans: Sequence[TargetPlan], line: str, known: Known | None = None) -> None:
    """Write all figures.

    Args:
      path: the file.
      plans: of the targets.
      line: the command line.
      known: programs of earlier calls; those that `plans` does not have yet are written as well.

    Raises:
      UserError: the file cannot be written.
    """
    whole = {
        "command": line,
        "versions": versions([plan.target for plan in plans]),
        "targets": [as_json(plan) for plan in plans],
    }
    here = {row.key for plan in plans for row in plan.rows if isinstance(row, Program)}
    if older := [_row(program) for key, program in (known or {}).items() if key not in here]:
        whole["kept"] = older
    write_whole(path, (json.dumps(whole, indent=1) + "\n").encode())


def as_json(plan: TargetPlan) -> dict[str, Any]:
    """The figures of one target."""
    rows = [_row(row) | ({} if isinstance(row, Refusal) else {"slow_link_ms": slow_ms(row, plan)}) for row in plan.rows]
    return {
        "target": plan.target.name,
        "devices": len(plan.target.devices),
        "groups": plan.target.groups,
        "nodes": plan.target.nodes().count,
        "model": plan.model,
        "parameters": plan.values,
        "leaves": plan.leaves,
        "shard": plan.shard,
        "gbits": plan.gbits or None,
        "programs": rows,
    }


def _row(row: Row) -> dict[str, Any]:
    if isinstance(row, Refusal):
        return row._asdict()
    nested = {"cycles": row.cycles and row.cycles._asdict(), "kernels": row.kernels and row.kernels._asdict()}
    return row._asdict() | nested


def write_csv(path: Path, plans: Sequence[TargetPlan]) -> None:
    """Write every program's figures as a line.

    Raises:
      UserError: the file cannot be written.
    """
    head = ["target", "model", "parameters", "shard", "method", "phase", "inside_bytes", "across_bytes", "slow_link_ms",
            "temporary_bytes", "argument_bytes", "seconds", "cpu_seconds", "cycles", "reads", "left_out", "collectives",
            "kernels", "host_copies", "refused"]  # fmt: skip
    text = io.StringIO()
    lines = csv.DictWriter(text, head, lineterminator="\n")
    lines.writeheader()
    for plan in plans:
        of_plan = {"target": plan.target.name, "model": plan.model, "parameters": plan.values, "shard": plan.shard}
        lines.writerows(of_plan | _line(row, plan) for row in plan.rows)
    write_whole(path, text.getvalue().encode())


def _line(row: Row, plan: TargetPlan) -> dict[str, Any]:
    if isinstance(row, Refusal):
        return {"method": row.method, "refused": row.reason}
    cells = {
        "method": row.method,
        "phase": row.phase,
        "temporary_bytes": row.temporary,
        "argument_bytes": row.arguments,
        "seconds": round(row.seconds or 0, 1) or None,
        "cpu_seconds": round(row.cpu_seconds or 0, 1) or None,
        "cycles": row.cycles and row.cycles.total,
        "reads": reads(row, plan),
        "kernels": row.kernels and row.kernels.launches,
        "host_copies": row.kernels and row.kernels.host_copies,
        "left_out": "; ".join(f"{count} {kind}" for kind, count in (row.cycles.left_out if row.cycles else {}).items()),
    }
    if row.method == READ:
        return cells
    ms = slow_ms(row, plan)
    return cells | {
        "inside_bytes": round(sum(row.inside.values())),
        "across_bytes": round(sum(row.across.values())),
        "slow_link_ms": None if ms is None else f"{ms:.4g}",
        "collectives": "; ".join(f"{count} {op}" for op, count in row.collectives.items()),
    }
