"""`python -m jgc bench methods`: time by part, memory and bytes of every method in every phase.

All pieces run in turn in one process, round after round, each compiled by itself. After the gradients, which are the
same for all methods, a step is the compressor's aggregate and the optimiser's update. The aggregate of a composed
method has two parts: memory and encoder before the exchange, and the rest. Gradients are of random images, and
every phase starts from the state before a run's first step. All layers are compressed alike.

With `--model`, see against_pmean.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import jax

from jgc import compress
from jgc.compress import Entry, method_of
from jgc.lab.bench import against_pmean
from jgc.lab.bench.costs import AGGREGATE, BEFORE, DENSE, GRADIENTS, OPTIMIZER, UPDATE, Costs, Row, markdown
from jgc.lab.bench.network.methods import PHASE
from jgc.lab.bench.pieces import aggregated, encoded, updated, updater
from jgc.lab.shared.choices import check_method, refuse_given, words
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import check_repeats, publish
from jgc.lab.shared.programs import Gradients, compile_gradients
from jgc.lab.shared.progress import count
from jgc.lab.shared.random_data import parts_of, variables_of
from jgc.lab.shared.timing import Work, rounds_shown
from jgc.layout.pack import make_packing
from jgc.method.compressor import logical
from jgc.training.errors import UserError, say, values_of_the_user
from jgc.training.settings.config import Config, LayersConfig, check, resolve
from jgc.training.settings.workloads import DEFAULT
from jgc.training.steps.step import Parts, TrainState
from jgc.types import Compressor, Nodes, PyTree
from jgc.wire.account import sent_by


@dataclass(frozen=True)
class Methods:
    """Time of every method and phase compared with the dense step; bytes of its state and its messages.

    No data set is needed.

        python -m jgc bench methods --workload digits_convnet5 --methods topk,qsgd,onebit

        | method | phase | after the gradients, ms | whole step, ms | of the dense step |
        | dense | dense | 12.21 ± 0.42 | 174.37 ± 3.32 | 1.000 ± 0.000 |
        | topk | top-k | 14.62 ± 1.49 | 178.12 ± 3.05 | 1.011 ± 0.004 |

    With `--model`, only the compression is timed, compiled and weighed, next to a plain `pmean`:

        python -m jgc bench methods --model gpt25m --methods dense,topk,powersgd:rank=4
    """

    methods: tuple[str, ...] = ()
    """names separated by commas or spaces; all if not given; dense is always measured, with --model a plain pmean"""
    workload: str | None = None
    """model, batch and settings; digits_convnet5 if not given"""
    nodes: int | None = None
    """data-parallel nodes; 8 if not given"""
    repeats: int = 15
    """rounds; medians and their spread are shown"""
    alpha: float | None = None
    """share of each layer that is selected; the workload's if not given"""
    model: str = ""
    """a model of jgc.training.models, such as gpt25m: only the compression, on random gradients of its shapes"""
    devices: int | None = None
    """with --model: nodes, one on each device, virtual on CPU; 2 if not given"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Measure, and print the page."""
        check_repeats(self.repeats)
        if self.model:
            refuse_given(self, ("workload", "nodes", "alpha"), "does not go with --model")
        else:
            refuse_given(self, ("devices",), "needs --model")
        if self.model and (phased := [name for name in words(self.methods) if PHASE in name]):
            raise UserError(f"phase= is for `bench network`: here all phases are measured, got {phased[0]}")
        names, devices = words(self.methods), 2 if self.devices is None else self.devices
        with values_of_the_user():
            if self.model:
                measured = against_pmean.measure(self.model, devices, self.repeats, names)
                title, page = "Every method next to a plain pmean", against_pmean.markdown(measured, describe())
            else:
                nodes = 8 if self.nodes is None else self.nodes
                costs = measure(self.workload or DEFAULT, nodes, self.repeats, names, self.alpha)
                title, page = "Cost of every method", markdown(costs, describe())
        publish(title, page, self.output, line)


def measure(workload: str, nodes: int, repeats: int, methods: Sequence[str] = (), alpha: float | None = None) -> Costs:
    """Time each phase of methods, and count bytes of their state and messages.

    Args:
      workload: a name in `jgc.training.settings.workloads`.
      nodes: K.
      repeats: rounds over all that is timed.
      methods: names; all that are registered if there are none. The dense step is always measured.
      alpha: share selected, for the methods that select; None for the workload's.

    Raises:
      UserError: an unknown method or workload, or a batch that the nodes do not divide.
    """
    configs = [configured(method, workload, nodes, alpha) for method in chosen(methods)]
    if alpha is not None and not any(hasattr(config.compressor, "alpha") for config in configs):
        raise UserError(f"--alpha {alpha}: none of {', '.join(names_of(methods))} has it")
    for config in configs:  # a bad value, before anything is compiled
        compress.build(config.compressor)
    variables = variables_of(configs[0])
    work: dict[str, Callable[[], Any]] = {}
    phases: list[tuple[str, str, dict[str, str], tuple[float, float]]] = []  # method, phase, names in `work`, bytes up
    held = {}
    started = monotonic()
    for i, config in enumerate(configs):
        say(f"{count(i, len(configs), monotonic() - started)} compiling {method_of(config.compressor).name}")
        parts, state, batch = parts_of(config, variables)
        compressor, name = parts.compressor, method_of(config.compressor).name
        if not work:  # the same for all methods
            gradients_of = compile_gradients(parts, state, batch)
            work[GRADIENTS] = partial(gradients_of, state.params, state.model_state, batch)
            gradients = work[GRADIENTS]()
        held[name] = bytes_held(compressor, state.params, parts.nodes)
        work[f"{name} {OPTIMIZER}"] = updated(parts, state, gradients.grads)
        for phase in compressor.schedule:
            names = {OPTIMIZER: f"{name} {OPTIMIZER}"}
            for piece, run in _pieces(parts, phase.value, state, gradients).items():
                names[piece] = f"{len(phases)} {piece}"
                work[names[piece]] = run
            wire = logical(compressor, phase.value, state.params, parts.nodes)
            phases.append((name, phase.name, names, (sent_by("worker", wire), sent_by("leader", wire))))
    seconds = rounds_shown(work, repeats)
    rows = tuple(
        Row(name, phase_name, {piece: seconds[key] for piece, key in names.items()}, up)
        for name, phase_name, names, up in phases
    )
    values = make_packing(variables["params"]).size
    return Costs(workload, nodes, len(seconds[GRADIENTS]), values, seconds[GRADIENTS], rows, held)


def names_of(wanted: Sequence[str]) -> list[str]:
    """Methods of those names, or all that are registered.

    Raises:
      UserError: a name is not registered.
    """
    known = list(compress.METHODS)
    for name in wanted:
        check_method(name, known)
    return list(wanted) or known


def chosen(names: Sequence[str]) -> list[Entry]:
    """The methods of those names, or all; always with the dense one, first.

    Raises:
      UserError: a name is not registered.
    """
    return [compress.METHODS[name] for name in dict.fromkeys((DENSE, *names_of(names)))]


def configured(method: Entry, workload: str, nodes: int, alpha: float | None) -> Config:
    """A run of a method with the workload's settings, but all layers compressed alike.

    Raises:
      UserError: an unknown workload, or a batch that the nodes do not divide.
    """
    config = resolve(Config(compressor=method.settings(), workload=workload, nodes=nodes))
    check(config)
    fields = {field.name for field in dataclasses.fields(config.compressor)}
    changes = {"alpha": alpha} if alpha is not None and "alpha" in fields else {}
    settings = dataclasses.replace(config.compressor, **changes)
    return dataclasses.replace(config, compressor=settings, layers=LayersConfig(dense="", top_k=""))


def bytes_held(compressor: Compressor, params: PyTree, nodes: Nodes) -> tuple[float, float]:
    """Bytes of a compressor's state per parameter of the model: shared and per node."""
    state = jax.eval_shape(partial(compressor.init, nodes=nodes), jax.random.key(0), params)
    shared, local = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in state)
    n = make_packing(params).size
    return shared / n, local / nodes.count / n


# --- what is timed --------------------------------------------------------------------------------------------------


def _pieces(parts: Parts, phase: Any, state: TrainState, gradients: Gradients) -> Work:
    """The pieces of one phase's step after the gradients, without the optimiser's."""
    work = {
        UPDATE: updater(parts, phase, state, gradients),
        AGGREGATE: aggregated(parts, phase, state.compressor, gradients.grads),
    }
    if getattr(parts.compressor.method, "stages", None) is not None:
        work[BEFORE] = encoded(parts, phase, state.compressor, gradients.grads)
    return work
