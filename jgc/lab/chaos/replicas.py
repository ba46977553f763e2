"""A bit that flips in one copy of the parameters or the residuals, in the middle of a run."""

from random import Random

from jgc.lab.chaos.lab import STEPS, Lab
from jgc.lab.chaos.verdict import Outcome
from jgc.training.run import checkpoint


def flipped_replica(lab: Lab, dice: Random) -> Outcome:
    """One bit of one device's copy flips: found at the next check; all end with a line that names the array."""
    lab.whole = lab.of(lab.whole.recipe._replace(copies=2))
    restored = checkpoint.restore(checkpoint.open_manager(lab.whole.run_dir))
    assert restored is not None, "the undisturbed run has checkpoints"
    wanted = dice.choice(("params.", "compressor.local."))
    names = sorted(name for name in restored.arrays if name.startswith(wanted) and restored.arrays[name].size)
    name = dice.choice(names or sorted(name for name in restored.arrays if name.startswith("params.")))
    process, device = dice.randrange(lab.processes), dice.randrange(lab.whole.recipe.devices)
    step, bit = dice.randrange(2, STEPS), dice.randrange(2**20)
    group = lab.start(own={process: {"JGC_CHAOS_FLIP": f"{step} {device} {bit} {name}"}})
    outcome = lab.verdict(group)
    what = f"{name} of process {process}, device {device} before step {step}: {outcome.what}"
    return lab.resumed(group, outcome._replace(what=what))
