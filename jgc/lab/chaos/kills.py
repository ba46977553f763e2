"""SIGKILL at random moments, resuming, and descriptors that can no longer be written to."""

from random import Random

from jgc.lab.chaos.lab import EVERY, STEPS, Lab
from jgc.lab.chaos.verdict import SURVIVED, CannotTest, Outcome


def kill(lab: Lab, dice: Random) -> Outcome:
    """SIGKILL of one process, once or twice; the resumed run must be bit-equal."""
    outcome = Outcome(SURVIVED, "")
    for _ in range(dice.choice((1, 1, 2))):
        victim = dice.randrange(lab.processes)
        group = lab.start()
        moment = lab.wait(group, dice)
        group.running[victim].process.kill()
        outcome = lab.verdict(group, killed={victim})
        if outcome.kind == SURVIVED:
            return Outcome(SURVIVED, f"process {victim} was to be killed {moment}: it had ended")
        outcome = outcome._replace(what=f"process {victim} killed {moment}: {outcome.what}")
        if outcome.kind not in ("said",):
            return outcome
    return lab.resumed(group, outcome, SURVIVED)


def power_cut(lab: Lab, dice: Random) -> Outcome:
    """SIGKILL of all processes together; the resumed run must be bit-equal."""
    group = lab.start()
    moment = lab.wait(group, dice)
    for running in group.running:
        running.process.kill()
    killed = {i for i, end in enumerate(lab.ends(group)) if end.code == -9}
    outcome = lab.verdict(group, killed)
    return lab.resumed(group, outcome._replace(what=f"all killed {moment}"), SURVIVED) if killed else outcome


def terminate(lab: Lab, dice: Random) -> Outcome:
    """SIGTERM to one process: all stop after the same step, with a checkpoint; the resumed run must be bit-equal."""
    group, victim = lab.start(), dice.randrange(lab.processes)
    lab.at_step(group, dice.randrange(1, STEPS))
    group.running[victim].process.terminate()
    codes = [end.code for end in lab.ends(group)]
    if codes == [0] * lab.processes:
        return lab.verdict(group)
    outcome = lab.verdict(lab.start(group.run_dir))
    what = f"process {victim} terminated; codes {codes}; resumed: {outcome.what}"
    return Outcome(outcome.kind if set(codes) == {143} else "silent", what)


def resume(lab: Lab, dice: Random) -> Outcome:
    """A resume from each checkpoint of a run in turn: it must be bit-equal."""
    run_dir = lab.half(keep=True)
    steps = sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    chosen = steps[lab.number % len(steps)]
    for step in steps:
        if step > chosen:
            lab.remove(run_dir / "checkpoints" / f"{step}")
    outcome = lab.verdict(lab.start(run_dir))
    return outcome._replace(what=f"from step {chosen} of {steps[0]} to {steps[-1]}: {outcome.what}")


def closed_pipe(lab: Lab, dice: Random) -> Outcome:
    """A process whose standard error is a closed pipe, while a second one is killed: it ends all the same."""
    if lab.processes == 1:
        raise CannotTest("needs several processes")
    mute, victim = dice.sample(range(lab.processes), 2)
    group = lab.start(own={mute: {"JGC_CHAOS_MUTE": "1"}})
    lab.at_step(group, dice.randrange(1, STEPS - EVERY))
    group.running[victim].process.kill()
    outcome = lab.verdict(group, killed={victim}, mute={mute}, seconds=lab.limit)
    return outcome._replace(what=f"process {mute} mute, process {victim} killed: {outcome.what}")
