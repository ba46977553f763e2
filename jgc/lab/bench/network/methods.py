"""The rows of the benchmark: jgc's methods, and the alternatives of a user of JAX or PyTorch.

`every=H` after a method stands for local steps: the nodes exchange pseudo-gradients after every H of them. `phase=NAME`
stands for the steps of an earlier phase; without it the last phase is measured.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optax

from jgc import compress
from jgc.lab.bench.network.models import LEARNING_RATE, MOMENTUM
from jgc.lab.shared.choices import settings_from
from jgc.loops.local_steps import LocalSteps, local_steps
from jgc.training.errors import UserError, values_of_the_user
from jgc.types import Compressor, Nodes, Phase

JAX, TORCH = "jax", "torch"
SHARE = 0.001  # of each layer's values, for all rows that select
PLAIN_JAX = ("psum_f32", "psum_f16", "twenty_lines")
PLAIN_TORCH = ("ddp_f32", "ddp_fp16", "ddp_powersgd_1", "ddp_powersgd_2", "ddp_powersgd_4", "ddp_topk")
SHORT = ("topk", "twenty_lines", "ddp_f32")
ALL_AT = 4  # with this number of hosts every method is measured
# as cifar10_resnet20 trains to within a point of the baseline (docs/results/cifar10.md)
TRAINED = "topk:alpha=0.002:min_values=16:momentum_correction=true:momentum_at_once=true:value_code=bfloat16"
SET = {"topk:value_code=bfloat16": "jgc topk, 16-bit values", TRAINED: "jgc topk 0.2 %, 16-bit values, as trained"}
NAMED = ("dense", "topk", TRAINED, "scalecom", "lgc_ps", "powersgd")  # at other numbers of hosts than four
LABELS = {
    "psum_f32": "JAX psum f32, one vector",
    "psum_f16": "JAX psum f16, one vector",
    "twenty_lines": "twenty lines of JAX: top-k 0.1 %, fused, int32",
    "ddp_f32": "PyTorch DDP f32",
    "ddp_fp16": "PyTorch DDP, fp16 hook",
    "ddp_powersgd_1": "PyTorch DDP, PowerSGD rank 1",
    "ddp_powersgd_2": "PyTorch DDP, PowerSGD rank 2",
    "ddp_powersgd_4": "PyTorch DDP, PowerSGD rank 4",
    "ddp_topk": "PyTorch DDP, top-k 0.1 %, fused, int32",
}


# methods with local steps by their names (configs/diloco.py, configs/sparseloco.py), and steps that send nothing
NO_EXCHANGE = "no_exchange"
LOCAL = {
    "diloco": "dense",
    "sparseloco": "topk:alpha=0.015625:selection=chunks:value_code=2bit-codebook:residual_decay=0.95",
    NO_EXCHANGE: "dense",
}
OUTER = {"sparseloco": (1.0, 0.0)}  # outer learning rate and Nesterov momentum; of the others DiLoCo's
DILOCO = (0.7, 0.9)
NEVER = 10**9  # steps between two exchanges
PHASE = "phase="
OF_GPTS = (f"{NO_EXCHANGE}:every=30", "diloco:every=30", "sparseloco:every=30", "topk", "dense", "ddp_f32",
           "ddp_powersgd_1")  # fmt: skip


class Row(NamedTuple):
    """A row of the benchmark.

    Attributes:
      name: as the command line has it: a method of jgc, with settings after colons, or one of `LABELS`.
      framework: "jax" or "torch".
    """

    name: str
    framework: str

    @property
    def label(self) -> str:
        """For people."""
        return label_of(self.name)

    @property
    def every(self) -> int | None:
        """H, local steps in a round; None for an exchange in every step."""
        return split(self.name)[1]

    @property
    def steps(self) -> int:
        """Steps that are measured together: a round of local steps, or a single step."""
        return self.every or 1


def label_of(name: str) -> str:
    """A row's name for people.

    Example:
      >>> label_of("topk"), label_of("ddp_f32")
      ('jgc topk', 'PyTorch DDP f32')
    """
    method, every = split(name)
    if every is None:
        return {**LABELS, **SET}.get(name, f"jgc {name}")
    return f"no exchange, {every} steps" if method == NO_EXCHANGE else f"jgc {method}, H = {every}"


def split(name: str) -> tuple[str, int | None]:
    """A row's name without `every=H`, and H; None without it.

    Raises:
      UserError: H is not a number above 0.

    Example:
      >>> split("topk:every=30:alpha=0.01"), split("ddp_f32")
      (('topk:alpha=0.01', 30), ('ddp_f32', None))
    """
    words, every = name.split(":"), None
    for word in words[1:]:
        if word.startswith("every="):
            value = word.removeprefix("every=")
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"every must be at least 1 step, got {value!r} in {name}")
            every = int(value)
    return ":".join(word for word in words if not word.startswith("every=")), every


def rows(names: Sequence[str], hosts: int, torch: bool, short: bool = False, text: bool = False) -> list[Row]:
    """The rows of those names; without names the default rows of this number of hosts.

    Args:
      names: from the command line.
      hosts: K.
      torch: whether PyTorch is installed; if not, its rows are left out.
      short: without names, the few rows of a quick look.
      text: without names, a GPT's: local steps, and exchanges in every step.

    Raises:
      UserError: an unknown name.

    Example:
      >>> [row.framework for row in rows(["topk:alpha=0.01", "ddp_f32"], 2, torch=True)]
      ['jax', 'torch']
    """
    all_names = (*compress.METHODS, *SET) if hosts == ALL_AT else NAMED
    chosen = names or (SHORT if short else OF_GPTS if text else (*all_names, *PLAIN_JAX, *PLAIN_TORCH))
    table = [Row(name, TORCH if name in PLAIN_TORCH else JAX) for name in dict.fromkeys(chosen)]
    for row in table:
        if row.name not in LABELS:
            with values_of_the_user():
                if row.every:
                    local_of(row.name, Nodes(hosts, hosts))
                else:
                    phase_of(row.name, compress.build(settings(row.name)))
    return [row for row in table if torch or row.framework == JAX]


def local_of(name: str, nodes: Nodes) -> LocalSteps:
    """The local steps of a row: SGD with momentum inside, Nesterov's outside.

    Raises:
      UserError: an unknown method or setting, or a value that does not fit.
      ValueError: likewise.
    """
    method, every = split(name)
    assert every is not None, "only rows with `every`"
    first, *changes = method.split(":")
    if any(change.startswith(PHASE) for change in changes):
        raise UserError(f"phase must not be given with every, got {name}: local steps are measured in the last phase")
    compressor = compress.build(settings(":".join([LOCAL.get(first, first), *changes])))
    rate, momentum = OUTER.get(first, DILOCO)
    inner, outer = optax.sgd(LEARNING_RATE, MOMENTUM), optax.sgd(rate, momentum or None, nesterov=bool(momentum))
    return local_steps(inner, outer, compressor, NEVER if first == NO_EXCHANGE else every, nodes)


def settings(name: str) -> Any:
    """The settings of a method of jgc from its name, with changes after colons.

    All layers are sent by the method.

    Raises:
      UserError: an unknown method or setting, or a value that does not fit.

    Example:
      >>> settings("topk:alpha=0.01:momentum_correction=true").alpha
      0.01
    """
    method, *changes = name.split(":")
    changes = [change for change in changes if not change.startswith(PHASE)]
    if method in LABELS:
        raise UserError(f"{method} is a row of only `bench network`, with no settings and no local steps, got {name}")
    if method in LOCAL:
        raise UserError(f"{method} has local steps, which `bench network` measures as {method}:every=30, got {name}")
    return settings_from(":".join([method, *changes]), [*LOCAL, *LABELS])


def phase_of(name: str, compressor: Compressor) -> Phase:
    """The phase of a row: the last one, or the first whose name begins with what stands after `phase=`.

    Raises:
      UserError: there is no such phase.

    Example:
      >>> phase_of("gradiveq:phase=sampling", compress.build(settings("gradiveq"))).name
      'sampling'
    """
    asked = [word.removeprefix(PHASE) for word in name.split(":") if word.startswith(PHASE)]
    if not asked:
        return compressor.schedule[-1]
    phases = [phase for phase in compressor.schedule if asked[-1] and phase.name.startswith(asked[-1])]
    if not phases:
        known = ", ".join(phase.name for phase in compressor.schedule)
        raise UserError(f"phase must be one of {known}, got {asked[-1]!r} in {name}")
    return phases[0]
