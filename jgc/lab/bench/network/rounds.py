"""Steps of all methods in turn, on every number of hosts and at every rate. With local steps one is a whole round.

One set of processes, a JAX and a PyTorch one on each host, serves all methods and rates; only one framework computes at
a time. Methods take a few steps each in turn, so that a drifting machine changes all alike.
"""

import importlib.util
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jgc.lab.bench.network import framing, results
from jgc.lab.bench.network.methods import Row, rows
from jgc.lab.bench.network.models import task_named
from jgc.lab.bench.network.namespaces import HEADERS, UNLIMITED, network, remove_leftovers, set_rate, why_not
from jgc.lab.bench.network.plan import Plan
from jgc.lab.bench.network.results import BLOCK, COMPUTATION, Results
from jgc.lab.bench.network.workers import Workers, ask, ask_in_turn, scratch, step, workers
from jgc.lab.shared.progress import count
from jgc.lab.shared.rate import bytes_per_second
from jgc.lab.shared.stopping import stoppable
from jgc.training.errors import FAILED, UserError, say

ALONE_BLOCK = 2  # consecutive steps alone, as `BLOCK` over the network
WARM_UP = 4  # uncounted steps: PyTorch's PowerSGD begins with its third
SLOW = 1.0  # seconds; a method whose bytes take longer on the link takes few steps
SETTLE = 0.05  # seconds until the last acknowledgements are counted


def measure(plan: Plan, folder: Path) -> Results:
    """Measure the part of a plan that a folder lacks.

    Args:
      plan: all that the folder will hold.
      folder: its results.json is extended.

    Raises:
      UserError: not root, no iproute2 or no right to make namespaces; an unknown method; a process that failed.
    """
    with stoppable():
        reason = why_not()
    if reason:
        raise UserError(reason, FAILED)
    torch = importlib.util.find_spec("torch") is not None
    if not torch:
        print("PyTorch is not installed: its rows are left out (pip install 'jgc[bench]')", file=sys.stderr)
    text = bool(task_named(plan.model).window)
    wanted = {hosts: rows(plan.methods, hosts, torch, plan.short, text) for hosts in plan.hosts}
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model": plan.model, "batch": plan.batch, "machine": machine(), "delay_ms": plan.delay_ms or None,
                "congestion": plan.congestion}  # fmt: skip
    measured = results.load(folder, settings)
    remove_leftovers()
    with stoppable():
        for hosts, rows_at in wanted.items():
            _measure_hosts(plan, hosts, rows_at, folder, measured)
    return measured


def machine() -> str:
    """The machine, in words."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"


def _measure_hosts(plan: Plan, hosts: int, chosen: Sequence[Row], folder: Path, measured: Results) -> None:
    """All rates with one number of hosts."""
    if not any(_lacking(measured, hosts, rate, row, plan) for rate in plan.rates for row in chosen):
        return
    with ExitStack() as stack:
        folder_of_hosts = stack.enter_context(scratch())
        net = stack.enter_context(network(hosts, folder_of_hosts, plan.delay_ms / 1000, plan.congestion))
        measured["settings"]["offloads"] = net.offloads
        options = {"model": plan.model, "batch": plan.batch}
        teams = {name: stack.enter_context(workers(name, net, options))
                 for name in dict.fromkeys(row.framework for row in chosen)}  # fmt: skip
        _check_alike(teams, measured)
        ready = [row for row in chosen if _build(teams[row.framework], hosts, row, folder, measured)]
        bytes_of = _warm_up(teams, ready)
        for rate in plan.rates:
            set_rate(net, rate)
            _measure_rate(plan, hosts, rate, ready, teams, bytes_of, folder, measured)


def _check_alike(teams: dict[str, Workers], measured: Results) -> None:
    """Both frameworks must hold the same model."""
    told = {name: ask_in_turn(team, "begin")[0] for name, team in teams.items()}
    sizes = {(answer["tensors"], answer["parameters"]) for answer in told.values()}
    if len(sizes) != 1:
        raise UserError(f"the models differ between frameworks (tensors, parameters): {sorted(sizes)}", FAILED)
    measured["settings"]["tensors"], measured["settings"]["parameters"] = sizes.pop()
    for name, answer in told.items():
        before = measured["versions"].setdefault(name, answer["version"])
        if before != answer["version"]:
            raise UserError(f"--run-dir was begun with {before}, not {answer['version']}: give a new one")


def _build(team: Workers, hosts: int, row: Row, folder: Path, measured: Results) -> bool:
    """Compile a method on all hosts. A failure is recorded, and the other methods go on."""
    say(f"{hosts} hosts: compiling {row.label}")
    try:
        told: dict[str, Any] = ask_in_turn(team, "build", method=row.name)[0]
    except UserError as error:
        if "cannot build" not in str(error):
            raise
        told = {"error": str(error)}
        say(str(error))
    measured["methods"][f"{hosts}/{row.name}"] = told
    known = measured.setdefault("framing", {}).setdefault(str(hosts), {})
    for name in told.get("collectives", {}):
        if name not in known:
            known[name] = _framing(team, name)
    results.save(folder, measured)
    return "error" not in told


def _framing(team: Workers, name: str) -> float:
    """Bytes of framing that a host sends in one collective of this kind and size."""
    payload = ask_in_turn(team, "ready", name=name)[0]
    ask(team, "bare", name=name)  # the first call makes the connections
    before, cell = _counted(team), dict[str, Any]()
    ask(team, "bare", name=name)
    results.add_counts(cell, framing.CALLS, before, _counted(team))
    return max(0.0, (cell["tx_bytes"] - HEADERS * cell["tx_packets"]) / framing.CALLS - payload)


def _warm_up(teams: dict[str, Workers], ready: Sequence[Row]) -> dict[str, float]:
    """Take the first steps of each method without a rate limit; return the bytes of a step, or of a round."""
    sent = {}
    for row in ready:
        team = teams[row.framework]
        for part in ("full",) if row.every else (COMPUTATION, "alone", "full"):
            _steps(team, row.name, part, 1 if row.every else WARM_UP - 1)
            before = _counted(team)
            _steps(team, row.name, part, 1)
            sent[row.name] = float(_counted(team)[0]["tx_bytes"] - before[0]["tx_bytes"])
        say(f"{row.label}: about {sent[row.name] / 1e6:.3g} MB {'a round' if row.every else 'a step'}")
    return sent


def _measure_rate(plan: Plan, hosts: int, rate: str, ready: Sequence[Row], teams: dict[str, Workers],
                  bytes_of: dict[str, float], folder: Path, measured: Results) -> None:  # fmt: skip
    """Take rounds over all methods until none lacks a step."""

    def target(row: Row) -> int:
        slow = rate != UNLIMITED and bytes_of[row.name] / bytes_per_second(rate) > SLOW
        return plan.slow_steps if slow else plan.steps

    def missing() -> int:
        return sum(results.missing(measured, hosts, rate, row.name, target(row)) for row in ready)

    lacking, begun, total = True, time.monotonic(), missing()
    while lacking:
        lacking = False
        for framework, team in teams.items():
            rows = [row for row in ready if row.framework == framework]
            rows = [row for row in rows if results.missing(measured, hosts, rate, row.name, target(row))]
            if not rows:
                continue
            cell = results.cell(measured, hosts, rate, f"{COMPUTATION}_{framework}")
            for step_seconds in _steps(team, "", COMPUTATION, BLOCK):
                results.add_step(cell, COMPUTATION, step_seconds, measured["session"])
            for row in rows:
                lacking = True
                done = count(total - missing(), total, time.monotonic() - begun)
                say(f"{hosts} hosts, {rate}: {done} {row.label}")
                _block(measured, team, hosts, rate, row, target(row))
                results.save(folder, measured)
    for name, team in teams.items():
        if len(set(ask(team, "digest"))) != 1:
            raise UserError(f"a method gave hosts different results: their parameters differ in {name}", FAILED)


def _block(measured: Results, team: Workers, hosts: int, rate: str, row: Row, target: int) -> None:
    """Take a few steps of a method: alone, then over the network. Of local steps, whole rounds over the network."""
    cell = results.cell(measured, hosts, rate, row.name)
    if not row.every:
        for step_seconds in _steps(team, row.name, "alone", ALONE_BLOCK):
            results.add_step(cell, "alone", step_seconds, measured["session"])
    lacking = results.missing(measured, hosts, rate, row.name, target)
    count = min(lacking, BLOCK if target > BLOCK else 1)
    before = _counted(team)
    for step_seconds in _steps(team, row.name, "full", count):
        results.add_step(cell, "full", {part: x / row.steps for part, x in step_seconds.items()}, measured["session"])
    results.add_counts(cell, count * row.steps, before, _counted(team))


def _steps(team: Workers, method: str, part: str, count: int) -> list[dict[str, float]]:
    ask(team, "prepare", method=method, part=part)
    step_seconds = [step(team, method, part) for _ in range(count)]
    ask(team, "finish", method=method)
    return step_seconds


def _counted(team: Workers) -> list[dict[str, int]]:
    time.sleep(SETTLE + 4 * team.delay)
    return ask(team, "counters")


def _lacking(measured: Results, hosts: int, rate: str, row: Row, plan: Plan) -> bool:
    """Whether a cell may lack steps: only running a method shows whether it is slow."""
    have = plan.steps - results.missing(measured, hosts, rate, row.name, plan.steps)
    cell = measured["cells"].get(results.key(hosts, rate, row.name), {})
    counted = cell.get("tx_bytes", 0.0) / max(1, cell.get("steps_counted", 0))
    slow = rate != UNLIMITED and row.steps * counted / bytes_per_second(rate) > SLOW
    return have < (plan.slow_steps if slow else plan.steps)
