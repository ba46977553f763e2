"""Steps of every method as they were recorded: whoever rebuilds the library sees that it still computes the same.

    python tests/recorded_steps.py write            # all methods and variants, into tests/recorded_steps.npz
    python tests/recorded_steps.py check            # compare with it; names of variants check these alone
    python tests/recorded_steps.py check topk dgc/ramp

A line says for each variant and phase "equal" or how far apart values are. Exit code 1 if any are further apart than
`MOST` or not finite. Bits differ between machines and versions of XLA: record and check on one.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import conftest  # noqa: F401  # flags, before JAX starts
import contract
import jax
import numpy as np

FILE = Path(__file__).with_suffix(".npz")
MOST = 1e-6
# variants by the name that they were recorded under
RENAMED = {"learned_topk/coded": "topk/learned", "learned_topk/corrected": "dgc/learned"}


def values(case: contract.Case) -> np.ndarray:
    """The last aggregate of a phase, all leaves in the order of their paths, f32[n]."""
    aggregated = contract.on_host(contract.history(case)[-1].aggregated)
    return np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(aggregated)])


def main(command: str, *names: str) -> int:
    recorded = dict(np.load(FILE)) if FILE.exists() else {}
    wrong = 0
    for variant in names or (*contract.METHODS, *contract.VARIANTS):
        for i, phase in enumerate(contract.compressor_of(variant).schedule):
            after = values(contract.Case(variant, i, "1 device"))
            place = f"{RENAMED.get(variant, variant)}, {phase.name}"
            before = recorded.get(place)
            if command == "write" or before is None:
                recorded[place] = after
                print(f"{place}: recorded", flush=True)
                continue
            apart = float(np.max(np.abs(after - before), initial=0))
            print(f"{place}: {'equal' if apart == 0 else f'{apart:.2g} apart'}", flush=True)
            wrong += not apart <= MOST
    if command == "write":
        np.savez_compressed(FILE, **recorded)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
