"""`python -m jgc chaos`: faults against a real run of several processes, counted."""

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jgc.compress import METHODS
from jgc.lab.chaos import campaign
from jgc.lab.chaos.campaign import Found, Plan
from jgc.lab.chaos.flips import flips
from jgc.lab.chaos.table import FAULTS, FLIPS
from jgc.lab.chaos.verdict import KINDS
from jgc.lab.shared.choices import refuse_given, words
from jgc.lab.shared.page import publish
from jgc.lab.shared.progress import clock
from jgc.lab.shared.stopping import stoppable
from jgc.lab.shared.tables import table
from jgc.training.errors import FAILED, UserError, did_you_mean

DEFAULT_MINUTES = 10.0


@dataclass(frozen=True)
class Chaos:
    """Kill, stop and corrupt real runs of several processes, and count how each try ends.

    Each try starts train.py with a tiny network in processes of this machine, injects one fault, and compares how the
    run ends, or how it ends once resumed, with an undisturbed run, bit for bit. Exit code 1 if one went on with wrong
    values and no message (silent), did not end (hang), or ended in a traceback. Ctrl-C ends it with the table so far.

        python -m jgc chaos --minutes 60 --seed 1 --output chaos.md
        python -m jgc chaos --faults kill,resume --count 20 --methods lgc_ps,dgc --processes 1
        python -m jgc chaos --faults flips --count 200
        python -m jgc chaos --rounds --seconds 3600 --seed 1

    With --rounds there is one long run of nodes that meet in a bucket (`jgc.rounds`), with a fault every 15 s on
    average; the table also has the share of an undisturbed run's tokens that nodes without a fault counted.

    It prints a line on each try, then how many there were, and how many of each kind:

        [8, 8:15, 51:44 left]  rename (topk): survived: checkpoint 11 renamed 5: bit-equal
        | fault | tried | survived | said | silent | hang | traceback | what |
        | rename | 1 | 1 | 0 | 0 | 0 | 0 | The newest checkpoint's folder has the name of a different step |
    """

    minutes: float | None = None
    """how long new faults are begun; 10 if neither this nor --count is given"""
    count: int | None = None
    """how often each fault is tried with each method, instead of --minutes"""
    seed: int = 0
    """the same seed gives the same faults in the same order; with --rounds the same order of those for which
    nodes are free"""
    processes: int = 4
    """of each run: 1, 2 or 4; with --rounds from 3 to 8"""
    faults: tuple[str, ...] = ()
    """names, by commas or spaces; all but flips if not given"""
    methods: tuple[str, ...] = ("topk",)
    """methods that the runs train with, by commas or spaces"""
    limit: float = 120.0
    """seconds after which a process that should have ended counts as hanging; more on a busy machine"""
    timeout: float = 20.0
    """--distributed.timeout of the runs, in seconds: stops last from 5 to 150"""
    rounds: bool = False
    """a run of `jgc.rounds` instead; --faults are then names from `jgc.lab.chaos.rounds.faults`"""
    seconds: float | None = None
    """with --rounds, instead of --minutes"""
    between: float = 15.0
    """with --rounds: seconds from one fault to the next, on average"""
    server: str = "folder"
    """with --rounds: the bucket, folder or seaweedfs (extra rounds-test)"""
    overlap: int = 1
    """with --rounds: 1 to exchange while the next round's steps run, or 0"""
    run_dir: Path | None = None
    """folder for the runs; tries that went badly stay there. A new temporary folder if not given"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Run the campaign, and print the table."""
        if self.rounds:
            return self.run_rounds(line)
        refuse_given(self, ("seconds", "between", "server", "overlap"), "needs --rounds")
        plan, findings = self.plan(), Found()
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="jgc-chaos-", dir=self.run_dir))
        try:
            with stoppable():
                campaign.run(plan, folder, findings, lambda text: print(text, flush=True))
        except UserError as error:  # a run that nobody disturbed failed: its logs are needed
            raise UserError(f"{error}; its folder is in {folder}", FAILED) from error
        except BaseException:
            _remove(folder, findings)
            raise
        else:
            _remove(folder, findings)
        finally:  # after Ctrl-C, too
            publish("Faults, and what became of them", markdown(plan, findings), self.output, line)
        if findings.bad:
            raise UserError(f"{len(findings.bad)} of {findings.tried} tries were silent, hung or ended in a traceback; "
                            f"their folders are in {folder}", FAILED)  # fmt: skip

    def run_rounds(self, line: str) -> None:
        """The same with a run of `jgc.rounds`."""
        from jgc.lab.chaos.rounds import command as rounds

        refuse_given(self, ("count", "methods", "timeout"), "does not go with --rounds")
        if self.minutes is not None and self.seconds is not None:
            raise UserError("--minutes and --seconds both say how long: give one of them")
        seconds = self.seconds
        if seconds is None:
            seconds = 60 * (DEFAULT_MINUTES if self.minutes is None else self.minutes)
        plan = rounds.plan_of(
            words(self.faults), seconds, self.between, self.processes, self.seed, self.limit, self.overlap
        )
        rounds.campaign(plan, self.server, self.run_dir, self.output, line)

    def plan(self) -> Plan:
        """The plan, checked.

        Raises:
          UserError: a value out of range, or an unknown name.
        """
        faults = _names("--faults", self.faults, [*FAULTS, FLIPS]) or list(FAULTS)
        methods = _names("--methods", self.methods, list(METHODS))
        if not methods:
            raise UserError(f"--methods names none; there are {', '.join(METHODS)}")
        if self.processes not in (1, 2, 4):
            raise UserError(f"--processes must be 1, 2 or 4, for 4 nodes, got {self.processes}")
        if self.minutes is not None and self.count is not None:
            raise UserError("--minutes says how long and --count how often: give one of them")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UserError(f"--minutes must be above 0, got {self.minutes}")
        if self.count is not None and self.count < 1:
            raise UserError(f"--count must be at least 1, got {self.count}")
        if FLIPS in faults and (self.count is None or len(faults) > 1):
            raise UserError("--faults flips goes with no other fault, and with --count N")
        if not all(10 <= seconds < math.inf for seconds in (self.limit, self.timeout)):
            raise UserError(f"--limit and --timeout must be at least 10, got {self.limit:g} and {self.timeout:g}")
        minutes = (self.minutes or DEFAULT_MINUTES) if self.count is None else None
        return Plan(faults, methods, self.processes, self.seed, minutes, self.count, self.limit, self.timeout)


def _remove(folder: Path, findings: Found) -> None:
    """Remove the folder of all runs, unless a try went badly."""
    if not findings.bad:
        shutil.rmtree(folder, ignore_errors=True)


def _names(option: str, chosen: Sequence[str], known: list[str]) -> list[str]:
    names = words(chosen)
    for name in names:
        if name not in known:
            raise UserError(f"{option}: unknown {name!r}{did_you_mean(name, known)} (there are {', '.join(known)})")
    return names


def markdown(plan: Plan, findings: Found) -> str:
    """The table, the bad outcomes, and the faults left out."""
    several = len(plan.methods) > 1
    head = ["fault", *(["method"] if several else []), "tried", *KINDS, "what"]
    rows, total = [], Counter[str]()
    for (fault, method), outcomes in sorted(findings.outcomes.items()):
        kinds = Counter(outcome.kind for outcome in outcomes)
        total += kinds
        what = _first_line(flips if fault == FLIPS else FAULTS[fault])
        rows.append([fault, *([method] if several else []), len(outcomes), *(kinds[kind] for kind in KINDS), what])
    rows.append(["all", *([""] if several else []), findings.tried, *(total[kind] for kind in KINDS), ""])
    what = f"{plan.processes} processes, {', '.join(plan.methods)}, seed {plan.seed}"
    lines = [f"{what}; {clock(findings.seconds)} minutes.", "", table(head, rows), ""]
    lines += [f"{remark}\n" for remark in findings.remarks if remark]
    lines += [f"Left out: {fault}, {why}.\n" for fault, why in findings.skipped.items()]
    lines += [f"- {fault}: {outcome.kind}: {outcome.what}" for fault, outcome in findings.bad]
    return "\n".join(lines)


def _first_line(function: object) -> str:
    return (function.__doc__ or "").splitlines()[0].rstrip(".")
