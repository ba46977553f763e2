"""`python -m jgc bench network`."""

from dataclasses import dataclass
from pathlib import Path

from jgc.lab.bench.network import plot, results, tables
from jgc.lab.bench.network.namespaces import CUBIC
from jgc.lab.bench.network.plan import Plan, plan_of, short
from jgc.lab.bench.network.rounds import measure
from jgc.lab.shared.choices import refuse_given
from jgc.training.errors import FAILED, UserError

PAGE = "network.md"


@dataclass(frozen=True)
class Network:
    """Time and bytes of every method between real processes, next to PyTorch's; needs root and iproute2.

    Hosts are network namespaces of this machine. What the folder already holds is not measured again.

        python -m jgc bench network --hosts 4 --rates 100mbit,1gbit,unlimited --run-dir runs/network

        | method | steps | step, s | added, s |
        | jgc topk | 20 | 0.619 [0.595, 0.632] | 0.188 [0.151, 0.207] |
        | PyTorch DDP f32 | 4 | 6.091 [6.055, 6.292] | 5.725 [5.673, 5.916] |
    """

    run_dir: Path
    """folder of the measurements, the page and the pictures"""
    hosts: tuple[str, ...] = ("4",)
    """numbers of hosts, separated by commas or spaces"""
    rates: tuple[str, ...] = ("100mbit", "1gbit", "unlimited")
    """of each host's link in both directions, such as 100mbit, or unlimited"""
    methods: tuple[str, ...] = ()
    """separated by commas or spaces; settings after colons (topk:alpha=0.01), an earlier phase than the last
    (gradiveq:phase=sampling), local steps as every=H (diloco:every=30, sparseloco:every=30, topk:every=10;
    no_exchange:every=30 sends nothing); if not given, all with 4 hosts and a few with other numbers, or with a GPT"""
    steps: int = 20
    """of each method, or rounds of local steps; at most 4 if sending its bytes takes more than a second"""
    model: str = "resnet18"
    """resnet18 (11.2 million parameters), resnet20 or convnet5"""
    workload: str | None = None
    """ptb_gpt or ptb_gpt_3m in the model's place: a GPT on windows of 128 characters"""
    batch: int | None = None
    """examples of a host in a step; if not given 2 images, or as many windows as the workload has"""
    delay_ms: float = 0.0
    """milliseconds that the switch keeps every packet: distant hosts. A process forwards them, which keeps up with
    rates of about 100mbit"""
    congestion: str = CUBIC
    """TCP's congestion control in the hosts, whatever this machine's is: cubic, Linux's default, or bbr"""
    short: bool = False
    """a quick look instead: two hosts, two rates, three methods, a small model"""

    def run(self, line: str) -> None:
        """Measure, and print the page."""
        plan = plan_of(self.hosts, self.rates, self.methods, self.steps, self.workload or self.model,
                       self.batch, self.delay_ms, self.congestion)  # fmt: skip
        if self.short:
            unused = ("hosts", "rates", "steps", "model", "workload", "batch")
            refuse_given(self, unused, "does not go with --short, which sets it")
        print(write(short(plan) if self.short else plan, self.run_dir, line))


def write(plan: Plan, folder: Path, line: str) -> str:
    """Measure the part of a plan that a folder lacks, write its page and pictures, and return the page.

    Args:
      plan: see `plan_of`.
      folder: gets results.json, network.md and pictures.
      line: the command line, for the page.

    Raises:
      UserError: no root, no iproute2, an unknown method, or a process that failed.
    """
    measured = measure(plan, folder)
    measured["each"] = tables.summary(measured)
    results.save(folder, measured)
    page = f"# Methods on a network\n\n    {line}\n\n{tables.page(measured, plot.draw(folder, measured))}"
    (folder / PAGE).write_text(page)
    if not tables.cells_of(measured):
        raise UserError(f"nothing was measured, see {folder / PAGE}", FAILED)
    return page
