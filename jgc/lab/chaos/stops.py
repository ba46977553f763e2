"""SIGSTOP: a process that stands still, for less or for longer than the timeout."""

import os
import signal
import time
from random import Random

from jgc.lab.chaos.lab import EVERY, STEPS, Lab
from jgc.lab.chaos.verdict import HANG, SAID, SILENT, CannotTest, Outcome

SHORTEST, LONGEST = 5.0, 150.0  # seconds
FIRST = (5.0, 75.0, 150.0)  # seconds of the first stops: the default timeout is 60
MARGIN = 0.75  # of the timeout, that a stop may last without ending the run


def stop_process_0(lab: Lab, dice: Random) -> Outcome:
    """Process 0, the coordinator, stands still for 5 to 150 s."""
    return _stand_still(lab, dice, 0)


def stop_another(lab: Lab, dice: Random) -> Outcome:
    """A process other than 0 stands still for 5 to 150 s."""
    if lab.processes == 1:
        raise CannotTest("needs several processes")
    return _stand_still(lab, dice, lab.another(dice))


def seconds_of(dice: Random, timeout: float, number: int) -> float:
    """Seconds of the stop: first the entries of `FIRST`, then as often below the timeout as above it."""
    if number < len(FIRST):
        return FIRST[number]
    if dice.random() < 0.5:
        return dice.uniform(SHORTEST, max(SHORTEST, MARGIN * timeout))
    return dice.uniform(min(timeout + SHORTEST, LONGEST), LONGEST)


def _stand_still(lab: Lab, dice: Random, victim: int) -> Outcome:
    seconds, step = seconds_of(dice, lab.timeout, lab.number), dice.randrange(1, STEPS - 2 * EVERY)
    seconds = min(seconds, max(SHORTEST, lab.deadline - time.monotonic()))
    group = lab.start()
    lab.at_step(group, step)
    what = f"process {victim} stopped for {seconds:.0f} s after step {step}"
    running = group.running[victim]
    if not running.alive:
        return lab.verdict(group)
    os.kill(running.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    late = [i for i, other in enumerate(group.running) if i != victim and other.alive]
    os.kill(running.process.pid, signal.SIGCONT)
    outcome = lab.verdict(group)
    if late and seconds > lab.timeout + lab.limit / 4:
        return Outcome(HANG, f"{what}: process {late[0]} was still there")
    if outcome.kind == SAID and seconds < MARGIN * lab.timeout - 1 and "silent" in outcome.what:
        return Outcome(SILENT, f"{what}, less than the timeout of {lab.timeout:g} s: {outcome.what}")
    return lab.resumed(group, outcome._replace(what=f"{what}: {outcome.what}"))
