"""Milliseconds, kernels and memory of each method's last phase on one GPU: the CSV lines of h100.csv.

    python docs/results/gpu/profile_methods.py gpt25m dense topk topk:selection=chunks powersgd:rank=4

Each kernel's time goes to standard error.
"""

import gzip
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax

from jgc import compress
from jgc.lab.bench.against_pmean import (
    method_program,
    nodes_on,
    pmean_program,
    random_gradients,
    shapes_of,
    with_phases,
)
from jgc.lab.bench.network.methods import settings

CALLS, ROUNDS, PROFILED = 20, 5, 5


def milliseconds(call: Callable) -> float:
    """Median over rounds of back-to-back calls, each waited for at its end."""
    for _ in range(3):
        jax.block_until_ready(call())
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            out = call()
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - started) / CALLS * 1e3)
    return statistics.median(rounds)


def kernels(call: Callable) -> tuple[Counter, Counter]:
    """Milliseconds and launches of each kernel in one call, by name, from JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(PROFILED):
                out = call()
            jax.block_until_ready(out)
        trace = json.loads(gzip.decompress(next(Path(folder).rglob("perfetto_trace.json.gz")).read_bytes()))
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    process = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    ms, launches = Counter[str](), Counter[str]()
    for e in events:
        if e.get("ph") == "X" and "GPU" in process[e["pid"]] and "Stream" in thread.get((e["pid"], e["tid"]), ""):
            ms[e["name"]] += e["dur"] / 1e3 / PROFILED
            launches[e["name"]] += 1 / PROFILED
    return ms, launches


def main(model: str, methods: list[str]) -> None:
    """Print a line for plain pmean and one for each method."""
    nodes, shapes = nodes_on(1), shapes_of(model)
    grads = random_gradients(shapes, nodes)
    print("model,method,phase,ms,kernels,kernel_ms,temporary_mb,compile_s")
    print(f"{model},plain pmean,,{milliseconds(pmean_program(nodes, grads).call):.3f},,,,")
    for name in methods:
        compressor = compress.build(with_phases(settings(name)))
        phase = compressor.schedule[-1]
        program = method_program(compressor, phase.value, nodes, shapes, grads)
        ms, (kernel_ms, launches) = milliseconds(program.call), kernels(program.call)
        figures = f"{ms:.3f},{sum(launches.values()):.0f},{sum(kernel_ms.values()):.3f}"
        memory = f"{program.temporary / 1e6:.0f},{program.compile_seconds:.1f}"
        print(f'{model},{name},"{phase.name}",{figures},{memory}', flush=True)
        for kernel, time_of_kernel in kernel_ms.most_common(25):
            print(f"  {time_of_kernel:.4f} ms in {launches[kernel]:.0f} x {kernel}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 3 or "--help" in sys.argv:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
