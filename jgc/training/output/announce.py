"""The lines that a run prints at its start and at the start of each phase."""

import os
from pathlib import Path

import jax

from jgc.loops.outer import Parts as LocalParts
from jgc.training.output.table import size
from jgc.training.run.setup import Setup
from jgc.training.settings.config import Config, DistributedConfig, method_name
from jgc.training.settings.workloads import workload_named
from jgc.training.steps.costs import PhaseCost
from jgc.training.steps.deterministic import note


def heading(setup: Setup, folder: Path, start: int) -> str:
    """The two lines that a run prints first."""
    config, nodes = setup.parts.config, setup.parts.nodes
    where = "emulated on one device" if nodes.mesh is None else f"{nodes.layout}, {nodes.mesh.size} devices"
    if nodes.fast:
        parameters = "sharded over a node's devices" if config.layers.shard else "whole on each device"
        where = f"{config.devices_per_node} devices each, parameters {parameters}"
    if jax.process_count() > 1:
        where += f" of {jax.process_count()} processes"
    who = f"{config.nodes} nodes ({where})"
    if config.rounds.bucket:
        who = f"node {config.rounds.node} of {config.rounds.bucket} ({where})"
    begin = f", from step {start}" if start else ""
    epochs = config.steps / setup.source.epoch_steps(config.batch_size)
    return (
        f"{method_name(config.compressor)} on {config.workload}: {setup.values:,} parameters, {who}, "
        f"batch {config.batch_size}, {config.steps} steps ({epochs:.3g} epochs){begin}\n"
        f"run folder {folder}"
    )


def notes(setup: Setup) -> list[str]:
    """Notes on phases and exchanges that the run is too short to reach, on unused options, and on reproducibility."""
    config, schedule = setup.parts.config, setup.parts.compressor.schedule
    every, last, lines = config.local.every, schedule[-1], []
    total, unit = (config.steps, "steps") if every is None else (config.steps // every, "exchanges")
    if last.start >= total:
        lines.append(
            f"note: this run of {total} {unit} ends before phase {last.name}, which begins after {last.start}: "
            "train longer, or shorten the phases before (--compressor.warmup-steps, where the method has it)"
        )
    ends = max(config.schedule_steps, config.learning_rate_warmup + 1)
    if config.schedule == "poly" and config.steps > ends:
        lines.append(
            f"note: the learning rate is 0 from step {ends + 1} on, where --schedule poly ends; "
            f"give --schedule-steps {config.steps}"
        )
    if config.learning_rate_warmup >= config.schedule_steps and config.schedule not in ("constant", "validation"):
        lines.append(
            f"note: the learning rate rises for {config.learning_rate_warmup} steps, and its schedule ends after "
            f"{config.schedule_steps}; give a shorter --learning-rate-warmup"
        )
    lines += unused(config)
    if bits := note(config.deterministic, config.resume, jax.default_backend(), os.environ.get("XLA_FLAGS", "")):
        lines.append(bits)
    if setup.parts.local is not None:
        lines += _notes_on_exchanges(setup.parts.local, config.steps)
    return lines


def unused(config: Config) -> list[str]:
    """A line for each option that differs from the workload's default and does nothing in this run."""
    workload, lines = workload_named(config.workload), []
    if config.schedule in ("constant", "validation") and config.schedule_steps != workload.schedule_steps:
        lines.append(f"note: --schedule-steps {config.schedule_steps} does nothing with --schedule {config.schedule}")
    if config.local.fragments > 1 and config.diagnose_every not in (0, workload.diagnose_every):
        lines.append(
            f"note: --diagnose-every {config.diagnose_every} does nothing with --local.fragments: an exchange of a "
            "fragment is not diagnosed"
        )
    team, defaults = config.distributed, DistributedConfig()
    for name in ("timeout", "connect_timeout"):
        if getattr(team, name) != getattr(defaults, name) and not (team.coordinator or team.auto):
            lines.append(f"note: --distributed.{name.replace('_', '-')} does nothing in a run of one process")
    return lines


def _notes_on_exchanges(local: LocalParts, steps: int) -> list[str]:
    """Steps after the last exchange, and an exchange whose outer step would come after the last step."""
    last = next(done for done in range(steps, 0, -1) if local.due(done).exchange is not None)
    lines = []
    if last < steps:
        lines.append(
            f"note: the last {steps - last} of {steps} steps have no exchange after them and do not count: the "
            f"parameters of the last exchange are evaluated (--steps {last} ends there)"
        )
    if last + local.overlap > steps:
        lines.append(
            f"note: with --local.overlap {local.overlap} the outer step of the exchange after step {last} comes after "
            f"step {last + local.overlap}, beyond the end of this run: give --steps {last + local.overlap}"
        )
    return lines


def describe(cost: PhaseCost, seconds: float, every: int | None = None) -> str:
    """The line that a run prints when a phase begins. `every`: with local steps, of a round."""
    leader = f"{size(cost.leader)} from the leader, " if cost.leader != cost.worker else ""
    begin, what = ("step", "a step") if every is None else ("exchange", f"a round of {every} steps")
    return (
        f"phase {cost.phase.name} from {begin} {cost.phase.start + 1}: {leader}{size(cost.worker)} from each "
        f"{'other ' if leader else ''}node in {what} (uncompressed {size(cost.dense * (every or 1))}); "
        f"compiled in {seconds:.0f} s"
    )
