"""One of several real processes that take every method's steps of the contract suite, as a user's own loop would.

    python tests/contract_process.py FOLDER PORT PROCESSES PROCESS METHOD ...

What this process holds after each step goes into FOLDER/METHOD-PROCESS.npz, under PHASE/STEP/PART/LEAF.
METHOD may be a variant, `qsgd/ring`.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

LAYOUT = "4 devices"  # of all processes together


def file_of(folder: Path, method: str, process: int) -> Path:
    """The file of what a process held."""
    return folder / f"{method.replace('/', ', ')}-{process}.npz"


def named(phase: int, step: int, aggregated: Any, state: Any, info: Any) -> dict[str, Any]:
    """The arrays of a step by name; without the residuals' norm, which is summed in a different order."""
    parts = {"aggregated": aggregated, "shared": state.shared, "local": state.local,
             "info": info._replace(residual_norm=())}  # fmt: skip
    leaves = [(part, i, x) for part, tree in parts.items() for i, x in enumerate(jax.tree.leaves(tree))]
    return {f"{phase}/{step}/{part}/{i}": x for part, i, x in leaves}


def held(x: jax.Array) -> np.ndarray:
    """All of an array that is replicated, bit-equal on this process's devices; else its rows of this process."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0 if shard.index else 0)
    parts = [np.asarray(shard.data) for shard in shards]
    if not x.is_fully_replicated:
        return np.concatenate(parts)
    assert len({part.tobytes() for part in parts}) == 1
    return parts[0]


def arrays(method: str) -> dict[str, np.ndarray]:
    """The steps of all phases in turn, from the first state on."""
    import contract as contract  # makes arrays: not before jax.distributed has started

    nodes, compressor = contract.nodes_of(LAYOUT), contract.compressor_of(method)
    state, found = contract.first_state(method), {}
    for phase, own in enumerate(compressor.schedule):
        case = contract.Case(method, phase, LAYOUT)
        if phase:
            state = compressor.transition(compressor.schedule[phase - 1].value, own.value, state, nodes)
        state = contract.jgc.place(state, contract.STATE, nodes)
        for step, seed in enumerate(contract.seeds_of(case)):
            grads = contract.gradients(seed, nodes)
            aggregated, state, info = contract.program(case)(contract.step_key(seed, nodes), grads, state)
            found |= {name: held(x) for name, x in named(phase, step, aggregated, state, info).items()}
    return found


def check_first_process(process: int) -> None:
    """All processes get the array of the first, whatever they computed themselves."""
    import contract as contract

    from jgc.nodes import placing

    agreed = placing.of_first_process(np.float32([[process, 7 - process]]), contract.nodes_of(LAYOUT))
    np.testing.assert_array_equal(agreed, np.float32([[0, 7]]), strict=True)


def main(folder: str, port: str, processes: str, process: str, *methods: str) -> None:
    """What the module says."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))
    check_first_process(int(process))
    for method in methods:
        np.savez(file_of(Path(folder), method, int(process)), **arrays(method))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
