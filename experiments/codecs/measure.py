"""Bytes and error of methods and trivial codes on recorded gradients.

A method's row is one step of its last phase on held-out gradients, from an empty memory. A method that learns does so
on the steps recorded before, each phase from an empty memory as well. All layers are compressed alike. New methods get
their rows through `jgc.compress.METHODS`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.codecs import basis as bases, trivial
from experiments.codecs.trivial import Code
from experiments.record import Recording, flat
from jgc import compress
from jgc.compress import Entry, step_on_nodes
from jgc.lab.shared.choices import settings_from
from jgc.lab.shared.progress import each
from jgc.layout.pack import make_packing
from jgc.selection.chunks import CHUNK
from jgc.types import Compressor, Nodes, PyTree, State
from jgc.wire.account import step_total

SKIPPED = ("silent",)  # sends nothing: there is no cosine
OURS = {"momentum_correction": False}
# For methods whose main setting is neither `alpha` nor `threshold`, and for those with an autoencoder, which trains for
# minutes at the larger shares.
SETTINGS: dict[str, Sequence[dict[str, Any]]] = {
    "lgc_ps": [
        {"alpha": 0.001, "positions": "leader"},
        {"alpha": 0.01, "positions": "leader"},
        {"alpha": 0.01},
    ],
    "lgc_ring": [{"alpha": 0.001}, {"alpha": 0.01}],
    "klt": [
        {"share": 0.0005, "alpha": 0.00001},
        {"share": 0.002, "alpha": 0.0001},
        {"share": 0.01, "alpha": 0.0001},
        {"share": 0.01, "alpha": 0.001},
        {"share": 0.05, "alpha": 0.001},
        {"share": 0.2, "alpha": 0.01, "code_dtype": "int16"},
    ],
    "powersgd": [{"rank": rank} for rank in (1, 2, 4)],
    "qsgd": [{"bits": bits} for bits in (2, 3, 4, 8)],
    "cast": [{"format": "bfloat16"}, {"format": "float8_e4m3"}],
}
EXACT = 1e-5  # relative error below which a row is the mean up to rounding


class Row(NamedTuple):
    """One code at one setting.

    Attributes:
      family: "method", "trivial" or "learned basis".
      name: of the code.
      setting: its setting, in words.
      bits: sent up for each parameter, mean over the nodes.
      error: norm of decoded minus true mean over the norm of the true mean, mean over steps.
      cosine: of the aggregated mean with the true one, mean over steps.
    """

    family: str
    name: str
    setting: str
    bits: float
    error: float
    cosine: float


def measure_methods(recording: Recording, hold_out: int, methods: Sequence[str], passes: int) -> list[Row]:
    """The rows of methods with settings after colons, as "qsgd:bits=4:bucket=128".

    Args:
      recording, hold_out, passes: see `measure`.
      methods: their names.

    Raises:
      UserError: an unknown method or setting.
      ValueError: a setting outside its range.
    """
    wanted = [(settings_from(text), text) for text in dict.fromkeys(methods)]

    def row(choice: tuple[Any, str]) -> Row:
        name, _, setting = choice[1].partition(":")
        return _row(recording, hold_out, passes, choice[0], name, setting.replace(":", ", ").replace("=", " "))

    return each(wanted, row, lambda choice: choice[1])


def measure(recording: Recording, hold_out: int, alphas: Sequence[float], passes: int) -> list[Row]:
    """All rows.

    Args:
      recording: its last `hold_out` steps are compressed; methods learn from those before.
      hold_out: steps.
      alphas: shares selected.
      passes: how often a method that learns sees those steps.
    """
    rows = _methods(recording, hold_out, alphas, passes)
    learned, held = recording.flat[:-hold_out], [np.asarray(g) for g in recording.flat[-hold_out:]]
    packing = make_packing(recording.shapes)
    codes = trivial.codes(packing.layers, alphas)
    rows += [score("trivial", name, setting, code, held) for name, setting, code in codes]
    basis = bases.learn(learned, packing)
    coefficients = [np.stack([bases.forward(basis.parts, node) for node in g]) for g in held]
    rows += [
        score("learned basis", *bases.words(keep, bits), bases.code(basis, keep, bits), coefficients)
        for keep in bases.SHARES
        for bits in bases.BITS
    ]
    return rows


def score(family: str, name: str, setting: str, code: Code, held: Sequence[np.ndarray]) -> Row:
    """The row of a code, means over the held-out steps."""
    scores = []
    for g in held:
        got, bits = code(g)
        scores.append((bits / g.size, *against(got, g.mean(0))))
    return Row(family, name, setting, *(float(x) for x in np.mean(scores, axis=0)))


def against(got: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """Relative error and cosine; the cosine of zeros is 0.

    Example:
      >>> round(against(np.array([1.0, 0.0]), np.array([1.0, 1.0]))[0], 3)
      0.707
    """
    norms = np.linalg.norm(got) * np.linalg.norm(true)
    cosine = float(got @ true / norms) if norms else 0.0
    return float(np.linalg.norm(got - true) / np.linalg.norm(true)), cosine


def _methods(recording: Recording, hold_out: int, alphas: Sequence[float], passes: int) -> list[Row]:
    wanted = [(method, *variant) for method in compress.METHODS.values() if method.name not in SKIPPED
              for variant in variants(method, alphas, recording.flat[0])]  # fmt: skip

    def row(method: Entry, change: dict[str, Any], words: str) -> Row:
        name = f"{method.name}, chunks" if change.get("selection") == "chunks" else method.name
        return _row(recording, hold_out, passes, _settings(method, change), name, words)

    return each(wanted, lambda choice: row(*choice), lambda choice: f"{choice[0].name} {choice[2]}".rstrip())


def _row(recording: Recording, hold_out: int, passes: int, settings: Any, name: str, words: str) -> Row:
    nodes, steps = recording.nodes, len(recording.flat)
    compressor = compress.build(settings)
    step = _steps(compressor, nodes)
    state = compressor.init(jax.random.key(0), recording.params, nodes)
    if jax.tree.leaves(state.shared):
        state = _learn(compressor, step, state, recording, range(steps - hold_out), passes)
    last = compressor.schedule[-1].value
    bits = 8 * step_total(compressor.wire(last, recording.shapes, nodes).logical, nodes.count, "up")
    errors = []
    for i in range(steps - hold_out, steps):
        got = step(last, i, recording.tree(i), state)[0]
        decoded = flat(jax.tree.map(lambda x: np.asarray(x)[None], got))[0]
        errors.append(against(decoded, recording.flat[i].mean(0)))
    error, cosine = np.mean(errors, axis=0)
    return Row("method", name, words, bits / recording.flat[0].size, float(error), float(cosine))


def variants(method: Entry, alphas: Sequence[float], g: np.ndarray) -> list[tuple[dict[str, Any], str]]:
    """Settings of a method to measure, and their names. A threshold is one that a share of g f32[K, n] exceeds."""
    names = {field.name for field in dataclasses.fields(method.settings)}
    if method.name in SETTINGS:
        return [(change, ", ".join(f"{k} {v}" for k, v in change.items())) for change in SETTINGS[method.name]]
    if "alpha" in names:
        choices: list[tuple[dict[str, Any], str]] = [({"alpha": alpha}, f"alpha {alpha:g}") for alpha in alphas]
        if method.name == "topk":  # other methods select as it does
            long_enough = [alpha for alpha in alphas if alpha * CHUNK >= 1]
            choices += [({"alpha": a, "selection": "chunks"}, f"alpha {a:g}") for a in long_enough]
        return choices
    if "threshold" in names:
        levels = {alpha: float(np.quantile(np.abs(g), 1 - alpha)) for alpha in alphas}
        buffers = {alpha: {"capacity": alpha} if "capacity" in names else {} for alpha in alphas}
        return [({"threshold": levels[a], **buffers[a]}, f"threshold {levels[a]:.2g}, capacity {a:g}") for a in alphas]
    return [({}, "")]


def _settings(method: Entry, change: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(method.settings)}
    return method.settings(**{k: v for k, v in OURS.items() if k in names} | change)


def _steps(compressor: Compressor, nodes: Nodes) -> Callable[..., tuple[PyTree, State, PyTree]]:
    """`(phase, index, grads, state) -> (aggregated, state, info)`, compiled once a phase."""
    compiled: dict[Any, Any] = {}

    def step(phase, index, grads, state):
        if phase not in compiled:
            compiled[phase] = jax.jit(step_on_nodes(compressor.aggregate, phase, nodes))
        return compiled[phase](jax.random.fold_in(jax.random.key(1), index), grads, state)

    return step


def _learn(compressor: Compressor, step, state: State, recording: Recording, indices: range, passes: int) -> State:
    """Run the phases before the last on the recorded steps, with an empty memory before each step."""
    empty, nodes, schedule = state.local, recording.nodes, compressor.schedule
    for phase, following in itertools.pairwise(schedule):
        for i in [i for _ in range(passes) for i in indices]:
            state = step(phase.value, i, recording.tree(i), state._replace(local=empty))[1]
        state = compressor.transition(phase.value, following.value, state, nodes)
    return state._replace(local=empty)


def front(rows: Sequence[Row], by: str = "cosine") -> list[int]:
    """The Pareto front: rows for which no other has fewer bits and as good a figure, or as many bits and a better one.

    Args:
      rows: the table.
      by: "cosine", higher is better, or "error", lower is better.

    Returns:
      Indices, fewest bits first.
    """
    worth = [row.cosine if by == "cosine" else -row.error for row in rows]
    chosen: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: (rows[i].bits, -worth[i])):
        if not chosen or worth[i] > worth[chosen[-1]]:
            chosen.append(i)
    return chosen
