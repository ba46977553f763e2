"""What the contract tests run: the variants of every method, one tree of gradients, and each compiled step once.

A method of `jgc.compress.METHODS` is tested by being registered. `VARIANTS` adds settings that deserve the same.
`LAW_EXEMPT`, `ZERO_EXEMPT`, `LARGE_EXEMPT`, `OVERFLOWS`, `LAYOUT_EXEMPT`, `PROCESSES_EXEMPT` and `ROUNDS_STATE` are all
the excuses from a property that there are, with the reasons.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick

import jgc
from jgc.comm.jaxprs import all_sent
from jgc.compress import METHODS, PAPER_RECIPE, TopK, step_on_nodes
from jgc.method.compressor import logical
from jgc.nodes.placement import LOCAL, SHARED
from jgc.types import Compressor, Info, Nodes, PyTree, Sent, State, Wire

K = 8
STEPS = 3  # of every phase
STATE = State(SHARED, LOCAL)

# Momentum 1/2 and gradients that are multiples of 2^-10 keep every sum exact in f32. Applied where a method has them.
COMMON: dict[str, Any] = {"alpha": 0.1, "momentum": 0.5, "threshold": 0.0625, "capacity": 0.75,
                          "sampling_steps": 4}  # fmt: skip
POLICY = {"layers.dense": "^Conv_0/", "layers.top_k": "^head/"}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense/ring": ("dense", {"algorithm": "ring"}),
    "dense/server": ("dense", {"algorithm": "server"}),
    "topk/warm-up": ("topk", {"warmup_steps": 5, "layers.dense": "^Conv_0/"}),
    "topk/corrected": ("topk", {"momentum_correction": True, "warmup_steps": 5, "layers.dense": "^Conv_0/"}),
    "topk/at once": (
        "topk",
        {"momentum_correction": True, "momentum_at_once": True, "warmup_steps": 5, "layers.dense": "^Conv_0/"},
    ),
    "topk/masked": (
        "topk", {"momentum_correction": True, "factor_masking": True, "warmup_steps": 5, "track_age": True}
    ),
    "topk/bf16 residual": ("topk", {"residual_dtype": "bfloat16"}),
    "topk/mxfp4": ("topk", {"value_code": "mxfp4"}),
    "topk/chunks": ("topk", {"selection": "chunks", "chunk": 16, "warmup_steps": 5, "layers.dense": "^Conv_0/"}),
    "topk/chunks coded": (
        "topk", {"selection": "chunks", "chunk": 64, "min_values": 7, "value_code": "2bit", "momentum_correction": True}
    ),
    "learned_topk/coded": (
        "learned_topk",
        {"candidates": 2, "value_code": "1bit", "warmup_steps": 5, "layers.dense": "^Conv_0/"},
    ),
    "dgc/ramp": ("dgc", {"warmup_steps": 5, "layers.dense": "^Conv_0/"}),
    "dgc/chunks": ("dgc", {"selection": "chunks", "chunk": 16, "warmup_steps": 5, "layers.dense": "^Conv_0/"}),
    "learned_topk/corrected": (
        "learned_topk",
        {"candidates": 3, "momentum_correction": True, "factor_masking": True, "strategy": "exponential",
         "warmup_steps": 5},
    ),
    "scalecom/chunks": ("scalecom", {"selection": "chunks", "chunk": 16}),
    "scalecom/low-pass": (
        "scalecom",
        {"beta": 0.5, "algorithm": "ring", "momentum_correction": True, "warmup_steps": 5, "layers.dense": "^Conv_0/",
         "track_age": True},
    ),
    "egc/chunks": ("egc", {"selection": "chunks", "chunk": 32, "ratio": 10.0, "momentum_correction": False}),
    "egc/old thresholds": ("egc", {"measure_every": 2, "ratio": 10.0, "warmup_steps": 5, "momentum_correction": False}),
    "egc/literal": ("egc", {"literal": True, "ratio": 10.0, "bins": 4, "factor_masking": True}),
    "klt/at once": ("klt", {"momentum_at_once": True, "share": 0.2, "code_dtype": "int16", "layers.dense": "^Conv_0/"}),
    "gradiveq/ring feedback": (
        "gradiveq",
        {
            "algorithm": "ring",
            "reuse": 1,
            "sampling_bits": 0,
            "centred": False,
            "error_feedback": True,
        },
    ),
    "qsgd/l2": ("qsgd", {"norm": "l2", "bits": 3, "bucket": 0}),
    "qsgd/feedback": ("qsgd", {"bits": 2, "error_feedback": True}),
    "qsgd/rotated": ("qsgd", {"bits": 4, "bucket": 16, "hadamard": 32, "error_feedback": True}),
    "qsgd/ring": ("qsgd", {"exchange": "ring", "bits": 8, "bucket": 16}),
    "qsgd/ring feedback": ("qsgd", {"exchange": "ring", "bits": 8, "bucket": 16, "error_feedback": True}),
    "qsgd/two-shot": ("qsgd", {"exchange": "two_shot", "bits": 4, "bucket": 16}),
    "qsgd/two-shot feedback": ("qsgd", {"exchange": "two_shot", "bits": 2, "error_feedback": True}),
    "natural/two-shot": ("natural", {"exchange": "two_shot"}),
    "terngrad/two-shot": ("terngrad", {"exchange": "two_shot", "scaler_sharing": False}),
    "terngrad/two-shot feedback": (
        "terngrad", {"exchange": "two_shot", "scaler_sharing": False, "error_feedback": True}
    ),
    "onebit/two-shot": ("onebit", {"exchange": "two_shot"}),
    "cast/two-shot": ("cast", {"exchange": "two_shot"}),
    "cast/mxfp4 two-shot": (
        "cast", {"exchange": "two_shot", "format": "mxfp4", "hadamard": 16, "error_feedback": True}
    ),
    "cast/nvfp4 two-shot": ("cast", {"exchange": "two_shot", "format": "nvfp4", "error_feedback": True}),
    "cast/fp8 two-shot": ("cast", {"exchange": "two_shot", "format": "float8_e5m2", "error_feedback": True}),
    "terngrad/feedback": ("terngrad", {"error_feedback": True, "scaler_sharing": False}),
    "signsgd/feedback": ("signsgd", {"combine": "feedback"}),
    "powersgd/rank 2": ("powersgd", {"rank": 2, "warm_start": False, "warmup_steps": 5, "algorithm": "ring"}),
    "powersgd/alternate": ("powersgd", {"rank": 2, "alternate": True, "warmup_steps": 5}),
    "cast/fp8": ("cast", {"format": "float8_e4m3", "error_feedback": True}),
    "cast/mxfp8": ("cast", {"format": "mxfp8_e5m2", "rounding": "stochastic", "error_feedback": True}),
    "cast/mxfp4": ("cast", {"format": "mxfp4", "hadamard": 16, "error_feedback": True}),
    "cast/nvfp4": ("cast", {"format": "nvfp4", "error_feedback": True}),
    "silent/policy": ("silent", {**POLICY, "momentum_correction": False}),
    "lgc_ps/leader": (
        "lgc_ps",
        {**POLICY, "positions": "leader", "leader": "rotating", "momentum_correction": False, "code_dtype": "8bit",
         "layers.value_code": "4bit"},
    ),
    "lgc_ps/no code": ("lgc_ps", {**POLICY, "code_dtype": "none"}),
    "lgc_ring/chunks": ("lgc_ring", {**POLICY, "selection": "chunks", "chunk": 16}),
    "lgc_ps/paper recipe": ("lgc_ps", {**PAPER_RECIPE, **POLICY, "leader": "rotating", "factor_masking": True}),
}

# Run by default: one variant for each mechanism that no method has as it is built by default. CI runs all variants.
MECHANISMS = (
    "dense/ring",  # a ring of plain sums
    "topk/masked",  # momentum correction, factor masking, ages, warm-up
    "topk/chunks coded",  # selection in chunks, coded values
    "learned_topk/coded",  # values of one bit, a layer sent dense
    "scalecom/low-pass",  # a low-pass memory, layers by rules
    "cast/mxfp4",  # scales of a byte, a rotation before coding
    "klt/at once",  # momentum at once, codes in integers
    "qsgd/ring feedback",  # a ring of codes, a residual of a quantiser
    "qsgd/two-shot feedback",  # codes of shares and of their means
)
# Variants with other collectives than their methods: several processes, GPUs' and TPUs' compilers take them, too.
COLLECTIVES = (
    "dense/ring",
    "gradiveq/ring feedback",
    "powersgd/alternate",
    "qsgd/ring",
    *(name for name in VARIANTS if "two-shot" in name),
)
# One method for each kind of exchange: properties that need a different program, or a different layout, by default.
KINDS = ("dense", "topk", "scalecom", "powersgd", "qsgd")

# Mean over nodes of (kept before + came in) = aggregated + mean over nodes of kept after, where what came in is the
# gradient, or with momentum correction u = m u + g. A low-pass memory keeps a different law, see `laws.remembered`.
# Excused, by variant and phase, beside what the registry says of methods (`exempt_by_registry`):
LAW_EXEMPT: dict[tuple[str, str], str] = {
    ("qsgd/l2", "qsgd, 3 bits"): "unbiased, and what is lost is not kept",
    ("qsgd/ring", "qsgd, 8 bits"): "unbiased, and what is lost is not kept",
    ("qsgd/two-shot", "qsgd, 4 bits"): "unbiased, and what is lost is not kept",
    ("natural/two-shot", "natural"): "unbiased, and what is lost is not kept",
    ("terngrad/two-shot", "ternary"): "unbiased but for the clipping, and what is lost is not kept",
    ("cast/two-shot", "bfloat16"): "what rounding loses is not kept",
    ("klt/at once", "compressed"): "the common part is spread over the steps that follow, as momentum has it",
    ("lgc_ps/paper recipe", "compressed"): 'feedback="paper": what decoding loses is lost, as Algorithm 1 has it',
}
# How finely residuals are kept; the law then holds to that precision only.
ROUNDS_STATE: dict[str, jnp.dtype] = {"topk/bf16 residual": jnp.dtype("bfloat16")}
# Zero gradients and nothing kept must aggregate to zeros. Excused, by variant and phase:
ZERO_EXEMPT: dict[tuple[str, str], str] = {
    ("klt/at once", "compressed"): "the velocity of what was sent before goes on",
    ("egc/literal", "entropy"): "a layer of zeros has an entropy of 0 / 0, and no number for its threshold",
    ("lgc_ps/paper recipe", "compressed"): 'scale="none": the decoders\' biases come out as values, as in the paper',
}
# Gradients as large as the guard lets pass leave all finite. Excused, by variant and phase:
LARGE_EXEMPT: dict[tuple[str, str], str] = {
    ("lgc_ps/paper recipe", "top-k"): 'scale="none": the autoencoder trains on values as they are, as in the paper',
}
# Nothing overflows. Excused, by variant:
OVERFLOWS: dict[str, str] = {
    "egc/old thresholds": "residuals grow past a threshold that stays",
}
# The three layouts must agree bit for bit. Excused, by variant and phase: the reason, and how far apart values may be.
#
# A ring of codes with several nodes a device is one between devices. Gradients are at most G = 2^-4, so the sum of h
# nodes is at most h G and one place loses at most h G / 127 of it (8 bits; half of that when it rounds to the nearest,
# which the residual of the step before makes up for). So the mean is wrong by at most G / 127 (1 + ... + K) / K =
# 4.5 G / 127, a node's residual is at most K G / 254, and two layouts are at most twice that apart: 0.0045; residuals
# that come in again make the gradients 4 % larger, and the leaf in bfloat16 adds 2^-8 G.
_RING = "several nodes of a device are summed before the ring between devices, and less is quantised"
_ORDER = "codes in f32 are added up in a different order in each layout"
LAYOUT_EXEMPT: dict[tuple[str, str], tuple[str, float]] = {
    ("gradiveq", "compressed"): (_ORDER, 1e-6),
    ("gradiveq/ring feedback", "compressed"): (_ORDER, 1e-6),
    ("powersgd", "low rank"): (_ORDER, 1e-6),
    ("powersgd/rank 2", "low rank"): (_ORDER, 1e-6),
    ("powersgd/alternate", "low rank, even steps"): (_ORDER, 1e-6),
    ("powersgd/alternate", "low rank, odd steps"): (f"{_ORDER}; a factor of small gradients has length 1", 1e-5),
    ("qsgd/ring", "qsgd, 8 bits"): (_RING, 0.005),
    ("qsgd/ring feedback", "qsgd, 8 bits"): (_RING, 0.005),
}

# Where layouts agree bit for bit, several processes do with one. Excused, by method: the reason, and how far apart.
_THREADS = (
    "XLA on CPU divides a convolution among as many threads as a process has devices, and adds up in other orders: "
    "one process with four devices and one with eight are as far apart"
)
PROCESSES_EXEMPT: dict[str, tuple[str, float]] = {"lgc_ps": (_THREADS, 1e-4), "lgc_ring": (_THREADS, 1e-4)}

PARAMS: PyTree = {
    "Conv_0": {"kernel": jnp.zeros((3, 3, 1, 4)), "bias": jnp.zeros(4)},
    "Dense_0": {"kernel": jnp.zeros((16, 12)), "half": jnp.zeros((2, 5), jnp.bfloat16)},
    "Norm_0": {"scale": jnp.zeros(4), "unused": None, "none of these": {}},
    "single": jnp.zeros((1, 1)),
    "scalar": jnp.zeros(()),
    "empty": jnp.zeros((0, 3)),
    "steps": jnp.zeros((), jnp.int32),
    "head": {"kernel": jnp.zeros((12, 5)), "bias": jnp.zeros(5)},
}

LAYOUTS: dict[str, Callable[[], Nodes]] = {
    "8 devices": lambda: jgc.make_nodes(K),
    "1 device": lambda: jgc.make_nodes(K, jax.devices()[:1]),
    "4 devices": lambda: jgc.make_nodes(K, jax.devices()[:4]),
}


LAYOUT = "4 devices"  # the one that tests run in by default: several nodes a device, and collectives between devices


class Case(NamedTuple):
    """A variant of a method in one phase, by index, and one layout."""

    variant: str
    phase: int
    layout: str


class Step(NamedTuple):
    """One step as it was: arrays on the host, but `aggregated` and `after` as the devices hold them."""

    grads: PyTree  # [K, ...]
    before: State
    aggregated: PyTree
    after: State
    info: Info  # [K]


def some_by_default(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All values of a parameter; those that are not chosen are exhaustive, and run in CI alone."""
    values, rest = list(values), pytest.mark.exhaustive
    assert all(v in values for v in chosen), f"nothing is called {[v for v in chosen if v not in values]}"
    # A NamedTuple, as an optimiser is, is one value; a plain tuple has one for each name.
    return [v if v in chosen else pytest.param(*(v if type(v) is tuple else (v,)), marks=rest) for v in values]


every_layout = pytest.mark.parametrize("layout", some_by_default(LAYOUTS, [LAYOUT]))


@functools.cache
def nodes_of(layout: str) -> Nodes:
    return LAYOUTS[layout]()


def settings_of(variant: str, **overrides: Any) -> Any:
    """The settings of a variant, or of a registered method by its name."""
    name, own = VARIANTS.get(variant, (variant, {}))
    return settings_with(METHODS[name].settings, {k: x for k, x in own.items() if "." not in k} | overrides)


def settings_with(kind: type, own: dict[str, Any]) -> Any:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    settings = kind(**{**{key: value for key, value in COMMON.items() if key in defaults}, **own})
    if getattr(settings, "momentum_correction", True) or "momentum" in own:
        return settings
    return dataclasses.replace(settings, momentum=defaults["momentum"])  # or it would do nothing, which is an error


def rules_of(variant: str) -> list[tuple[str, Compressor]]:
    """The layers of a variant that a different method sends, with that method: dense ones first, then top-k ones."""
    own = VARIANTS.get(variant, (variant, {}))[1]
    layers = {k.removeprefix("layers."): x for k, x in own.items() if k.startswith("layers.")}
    settings = settings_of(variant)
    rules = []
    if "dense" in layers:
        own_momentum = {k: getattr(settings, k) for k in ("momentum_correction", "momentum") if hasattr(settings, k)}
        rules.append((layers["dense"], jgc.compress.dense(**own_momentum)))
    if "top_k" in layers:
        shared = {f.name: getattr(settings, f.name, f.default) for f in dataclasses.fields(TopK)}
        shared |= {"value_code": layers.get("value_code", "float32"), "strategy": "warmup"}
        shared |= {} if hasattr(settings, "alpha") else {"alpha": COMMON["alpha"]}
        rules.append((layers["top_k"], jgc.compress.topk(TopK(**shared))))
    return rules


@functools.cache
def compressor_of(variant: str) -> Compressor:
    """The compressor of a variant; "NAME, lossless" is the method with the settings it declares lossless."""
    name, _, lossless = variant.partition(", ")
    method = jgc.compress.build(settings_of(name, **(METHODS[name].lossless or {} if lossless else {})))
    rules = rules_of(name)
    return jgc.compress.per_layer(rules, default=method) if rules else method


def gradients(seed: int, nodes: Nodes, largest: int = 64) -> PyTree:
    """Each node's own gradients, multiples of 2^-10 and at most `largest` of them; integers have none."""
    random = np.random.default_rng(seed)

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return np.zeros((K, *x.shape), x.dtype)
        return (random.integers(-largest, largest + 1, (K, *x.shape)) / 1024).astype(x.dtype)

    return jgc.place(jax.tree.map(leaf, PARAMS), LOCAL, nodes)


def step_key(seed: int, nodes: Nodes) -> jax.Array:
    return jgc.place(jax.random.key(seed), SHARED, nodes)


def on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


@functools.cache
def first_state(variant: str) -> State:
    """The state before the first step, on the host. Made once for all layouts: it depends on K alone."""
    nodes = nodes_of("1 device")
    init = jax.jit(
        lambda key: compressor_of(variant).init(key, PARAMS, nodes),
        compiler_options={"xla_backend_optimization_level": 0},  # half the compile time, and it runs once
    )
    return on_host(init(jax.random.key(0)))


@functools.cache
def _program_and_sent(case: Case) -> tuple[jax.stages.Compiled, tuple[Sent, ...]]:
    """A case's compiled step, and the collectives that its one trace recorded."""
    compressor, nodes = compressor_of(case.variant), nodes_of(case.layout)
    step = step_on_nodes(compressor.aggregate, compressor.schedule[case.phase].value, nodes)
    arguments = step_key(0, nodes), gradients(0, nodes), jgc.place(first_state(case.variant), STATE, nodes)
    # XLA's older code generator, see quick.py, adds up in an autoencoder in a different order in each layout.
    newer = quick.HAS_OLDER_GENERATOR and case.variant.startswith("lgc_")
    options = {"xla_cpu_use_fusion_emitters": True} if newer else None
    with jgc.comm.ledger() as recorded:
        traced = jax.jit(step).trace(*arguments)
    return traced.lower().compile(options), all_sent(recorded, traced.jaxpr, nodes)


def program(case: Case) -> jax.stages.Compiled:
    """The compiled step `(key, grads [K, ...], state) -> (aggregated, state, info [K])`, one for each case.

    Compiled ahead of time: a call with other shapes, dtypes or placements raises instead of compiling again.
    """
    return _program_and_sent(case)[0]


def run(case: Case, state: State, seeds: range) -> list[Step]:
    """Steps with the gradients and keys of these seeds, from a state on the host."""
    nodes, step = nodes_of(case.layout), program(case)
    state, steps = jgc.place(state, STATE, nodes), []
    for seed in seeds:
        grads = gradients(seed, nodes)
        aggregated, after, info = step(step_key(seed, nodes), grads, state)
        steps.append(Step(on_host(grads), on_host(state), aggregated, after, on_host(info)))
        state = after
    return steps


def seeds_of(case: Case) -> range:
    return range(100 * case.phase, 100 * case.phase + STEPS)


@functools.cache
def history(case: Case) -> list[Step]:
    """The steps of one phase in a run that has gone through all phases before it."""
    return run(case, entry(case), seeds_of(case))


@functools.cache
def entry(case: Case) -> State:
    """The state with which a run enters a phase, on the host."""
    if case.phase == 0:
        return first_state(case.variant)
    compressor, previous = compressor_of(case.variant), case._replace(phase=case.phase - 1)
    old, new = (compressor.schedule[i].value for i in (previous.phase, case.phase))
    return on_host(compressor.transition(old, new, history(previous)[-1].after, nodes_of(case.layout)))


def messages_of(case: Case) -> Wire:
    """`Compressor.wire` without the physical bytes, for which it traces the step again."""
    compressor = compressor_of(case.variant)
    return logical(compressor, compressor.schedule[case.phase].value, PARAMS, nodes_of(case.layout))


def wire_of(case: Case) -> Wire:
    """What `Compressor.wire` returns, by the trace of the program that the other tests run."""
    return messages_of(case)._replace(physical=_program_and_sent(case)[1])


def same_bits(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have the same structure, shapes, dtypes and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(on_host(a)), jax.tree.leaves(on_host(b)), strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def within(tolerance: float, a: PyTree, b: PyTree) -> bool:
    """Whether two trees have the same structure, shapes and dtypes, floats that close and all else equal."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    for x, y in zip(jax.tree.leaves(on_host(a)), jax.tree.leaves(on_host(b)), strict=True):
        assert x.dtype == y.dtype
        atol = tolerance if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=0, atol=atol, strict=True)
    return True


def exempt_by_registry(law: str) -> dict[tuple[str, str], str]:
    """The phases after the warm-up of every method that says it does not keep a law, with its reason."""
    excused = {name: method.exempt[law] for name, method in METHODS.items() if law in method.exempt}
    schedules = {name: compressor_of(name).schedule for name in excused}
    return {(name, p.name): excused[name] for name in excused for p in schedules[name] if p.name != "dense"}


LAW_EXEMPT |= exempt_by_registry("conservation")
ZERO_EXEMPT |= exempt_by_registry("zeros")
