"""The properties that every method keeps in every phase: laws in one node layout, agreement and costs in all three."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
    COMMON,
    KINDS,
    LARGE_EXEMPT,
    LAW_EXEMPT,
    LAYOUT,
    LAYOUT_EXEMPT,
    LAYOUTS,
    MECHANISMS,
    OVERFLOWS,
    PARAMS,
    STATE,
    STEPS,
    VARIANTS,
    ZERO_EXEMPT,
    Case,
    K,
    compressor_of,
    entry,
    every_layout,
    first_state,
    gradients,
    history,
    messages_of,
    nodes_of,
    on_host,
    program,
    run,
    same_bits,
    seeds_of,
    some_by_default,
    step_key,
    wire_of,
    within,
)
from laws import balances

import jgc
import jgc.backend
from jgc.comm.jaxprs import called
from jgc.compress import METHODS, step_on_nodes
from jgc.lab.shared.hlo import collectives, table
from jgc.layout.devices import LARGEST_NORM
from jgc.layout.pack import leaf_paths, make_packing
from jgc.selection import entries

NAMES = (*METHODS, *VARIANTS)
assert set(MECHANISMS) <= set(VARIANTS) and set(KINDS) <= set(METHODS)
LOSSLESS = [name for name, method in METHODS.items() if method.lossless is not None]
SCATTERED = ("topk", "scalecom", "egc")  # positions per node, shared, by a threshold
CASES = [
    Case(name, i, layout) for name in NAMES for i in range(len(compressor_of(name).schedule)) for layout in LAYOUTS
]


def phase_of(case: Case) -> jgc.Phase:
    return compressor_of(case.variant).schedule[case.phase]


def _cases(*shown: str, of: Callable[[Case], bool] = lambda case: True, default: Callable[[Case], bool]):
    """Those of the cases, named by the fields that are shown; what is not in the default runs in CI alone."""
    params = []
    for case in filter(of, CASES):
        words = {**case._asdict(), "phase": phase_of(case).name}
        marks = [] if default(case) else [pytest.mark.exhaustive]
        params.append(pytest.param(case, id=", ".join(words[field] for field in shown), marks=marks))
    return pytest.mark.parametrize("case", params)


def _in_layout(case: Case) -> bool:
    return case.layout == LAYOUT


def _by_default(case: Case) -> bool:
    """In the layout of all tests: every method as it is built by default, and a variant for each mechanism."""
    return _in_layout(case) and (case.variant in METHODS or case.variant in MECHANISMS)


def _not_implied(case: Case) -> bool:
    """Values of a step: what other layouts compute is the same, bit for bit, but for the excused."""
    return _in_layout(case) or (case.variant, phase_of(case).name) in LAYOUT_EXEMPT


def _elsewhere(case: Case) -> bool:
    """The last phase of one method for each kind of exchange, with as many devices as nodes."""
    last = case.phase == len(compressor_of(case.variant).schedule) - 1
    return case.variant in KINDS and last and case.layout == "8 devices"


def _of_kind(case: Case) -> bool:
    return case.variant in KINDS


every_case = _cases("variant", "phase", "layout", default=lambda case: _by_default(case) or _elsewhere(case))
every_case_of_a_law = _cases("variant", "phase", "layout", default=_by_default)
every_case_of_its_values = _cases("variant", "phase", "layout", of=_not_implied, default=_by_default)
every_case_elsewhere = _cases("variant", "phase", "layout", of=lambda case: not _in_layout(case), default=_elsewhere)
every_phase = _cases("variant", "phase", of=_in_layout, default=_by_default)
every_phase_traced_again = _cases("variant", "phase", of=_in_layout, default=_of_kind)
every_variant = _cases("variant", of=lambda case: _in_layout(case) and case.phase == 0, default=_by_default)


# --- what comes out -----------------------------------------------------------------------------------------------


@every_case
def test_aggregate_has_structure_shapes_and_dtypes_of_gradients(case):
    for step in history(case):
        assert jax.tree.structure(step.aggregated) == jax.tree.structure(PARAMS)
        leaves = zip(leaf_paths(PARAMS), jax.tree.leaves(step.aggregated), jax.tree.leaves(PARAMS), strict=True)
        for path, got, param in leaves:
            assert (got.shape, got.dtype) == (param.shape, param.dtype), path
            assert np.all(np.isfinite(np.asarray(got, np.float32))), path
        assert step.info.finite.all()
        assert case.variant in OVERFLOWS or not step.info.overflow.any()


@every_case
def test_all_nodes_hold_bit_equal_results(case):
    mesh, last = nodes_of(case.layout).mesh, history(case)[-1]
    for x in jax.tree.leaves((last.aggregated, last.after.shared)):
        held = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(held) == (1 if mesh is None else mesh.size)
        assert all(same_bits(held[0], other) for other in held)


@pytest.mark.parametrize("name", some_by_default(NAMES, SCATTERED))
def test_positions_ascend_and_are_distinct_where_a_scatter_relies_on_it(name, monkeypatch):
    """No CPU shows a broken promise: XLA there does not use it, those for TPU and GPU do."""
    held, promises, case = [], entries._promises, Case(name, len(compressor_of(name).schedule) - 1, "1 device")

    def watched(sparse, n):
        asked.append(sparse)
        ascend = not isinstance(sparse, entries.Unordered)

        def look(at):  # those past the end are dropped
            held.append(np.unique(at[at < n]).size == (at < n).sum() and (not ascend or bool((np.diff(at) >= 0).all())))

        jax.debug.callback(look, sparse.positions)
        return promises(sparse, n)

    asked: list[entries.Sparse] = []
    monkeypatch.setattr(entries, "_promises", watched)
    monkeypatch.setattr(entries, "backend", lambda: "tpu")  # or the nodes' entries are added up in one scatter
    nodes = nodes_of(case.layout)
    step = jax.jit(step_on_nodes(compressor_of(name).aggregate, phase_of(case).value, nodes))
    lowered = step.lower(step_key(0, nodes), gradients(0, nodes), first_state(name))
    if asked:
        compiled = lowered.compile({"xla_backend_optimization_level": 0})
        jax.block_until_ready(compiled(step_key(0, nodes), gradients(0, nodes), first_state(name)))
        jax.effects_barrier()
        assert held and all(held)


@every_phase_traced_again
def test_no_value_of_a_gpu_depends_on_an_order(case, monkeypatch):
    """Traced for GPUs, no floats are added up at positions that may repeat: atomics would add in any order."""
    monkeypatch.setattr(jgc.backend, "backend_of", lambda nodes: "gpu")
    nodes = nodes_of(case.layout)
    step = step_on_nodes(compressor_of(case.variant).aggregate, phase_of(case).value, nodes)
    arguments = step_key(0, nodes), gradients(0, nodes), jgc.place(first_state(case.variant), STATE, nodes)
    scatters = list(unordered_scatters(jax.make_jaxpr(step)(*arguments)))
    assert not scatters, f"floats scattered: use jgc.wire.sums.range_sums or jgc.selection.entries.scatter: {scatters}"


def unordered_scatters(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name.startswith("scatter") and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
            yield from [] if eqn.params["unique_indices"] else [eqn]
        for inner in called(eqn.params):
            yield from unordered_scatters(inner)


@every_case_elsewhere
def test_layouts_agree_bit_for_bit(case):
    runs = history(case._replace(layout=LAYOUT)), history(case)
    _, tolerance = LAYOUT_EXEMPT.get((case.variant, phase_of(case).name), ("", 0.0))
    same = partial(within, tolerance) if tolerance else same_bits
    norms = tolerance * np.sqrt(make_packing(PARAMS).size)  # of what differs by that much everywhere
    for one, other in zip(*runs, strict=True):
        assert same_bits(one.grads, other.grads)
        assert same(one.aggregated, other.aggregated)
        assert same(one.after, other.after)
        assert same_bits(one.info._replace(residual_norm=()), other.info._replace(residual_norm=()))
        np.testing.assert_allclose(one.info.residual_norm, other.info.residual_norm, rtol=1e-6, atol=norms)


@every_layout
@pytest.mark.parametrize("name", some_by_default(LOSSLESS, [x for x in KINDS if x in LOSSLESS]))
def test_lossless_settings_give_dense_mean(name, layout):
    compressor = compressor_of(f"{name}, lossless")
    case = Case(f"{name}, lossless", len(compressor.schedule) - 1, layout)
    momentum = COMMON["momentum"] if compressor.owns_momentum else 0.0
    velocity = jax.tree.map(lambda x: np.zeros((K, *x.shape)), PARAMS)
    for step in run(case, first_state(case.variant), seeds_of(case)):
        velocity = jax.tree.map(lambda u, g: momentum * u + np.asarray(g, float), velocity, step.grads)
        for got, u, param in zip(*map(jax.tree.leaves, (step.aggregated, velocity, PARAMS)), strict=True):
            assert same_bits(got, u.mean(0).astype(param.dtype)), (
                f"METHOD.lossless of {name}: with these settings the mean is not exact")


# --- what is kept -------------------------------------------------------------------------------------------------


@every_case_of_its_values
def test_error_feedback_conserves_gradients(case):
    if (case.variant, phase_of(case).name) in LAW_EXEMPT:
        pytest.skip(LAW_EXEMPT[case.variant, phase_of(case).name])
    for step in history(case):
        for had, aggregated, kept, tolerance in balances(case, step):
            lost = np.abs(had - aggregated - kept)
            assert np.all(lost <= tolerance), (
                f"{case.variant} loses up to {lost.max():.1e} of a gradient: `sent` is not the decoded message, "
                'or the memory fades, which is exempt={"conservation": why} in METHOD')


@every_case_of_a_law
def test_restored_run_equals_uninterrupted_run(case):
    first, *rest = history(case)
    leaves, structure = jax.tree.flatten(first.after)
    saved = [(x.tobytes(), x.dtype, x.shape) for x in map(np.asarray, leaves)]
    restored = [np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in saved]
    again = run(case, jax.tree.unflatten(structure, restored), seeds_of(case)[1:])
    for one, other in zip(rest, again, strict=True):
        assert same_bits(one.aggregated, other.aggregated)
        assert same_bits(one.after, other.after)
        assert same_bits(one.info, other.info)


@every_variant
def test_transitions_keep_state_structure(case):
    compressor = compressor_of(case.variant)
    shapes = jax.tree.map(jax.typeof, first_state(case.variant))
    for i in range(len(compressor.schedule)):
        assert jax.tree.map(jax.typeof, entry(case._replace(phase=i))) == shapes
        assert jax.tree.map(jax.typeof, on_host(history(case._replace(phase=i))[-1].after)) == shapes


# --- bad and empty input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
@every_case_of_a_law
def test_non_finite_gradient_on_one_node_skips_step_on_all(case, bad):
    nodes, state = nodes_of(case.layout), history(case)[-1].after
    for node, path in ((3, "scalar"), (K - 1, "Conv_0/kernel"), (0, "Dense_0/half")):
        grads = on_host(gradients(7, nodes))
        leaf = dict(zip(leaf_paths(grads), jax.tree.leaves(grads), strict=True))[path]
        poisoned = jax.tree.map(lambda x, leaf=leaf: x.copy() if x is leaf else x, grads)
        jax.tree.leaves(poisoned)[leaf_paths(grads).index(path)].reshape(K, -1)[node, -1] = bad
        aggregated, after, info = program(case)(step_key(7, nodes), jgc.place(poisoned, jgc.LOCAL, nodes), state)
        assert not np.asarray(info.finite).any() and np.isfinite(info.residual_norm).all()
        assert same_bits(aggregated, jax.tree.map(jnp.zeros_like, PARAMS))
        assert same_bits(after, state)


def enlarged(grads, nodes, factor, leaf):
    """Gradients times a factor as `leaf(x, factor)` has them, on all nodes that it does not leave alone."""
    return jgc.place(jax.tree.map(lambda x: leaf(np.asarray(x), factor), grads), jgc.LOCAL, nodes)


def times(x, factor):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    largest = float(jnp.finfo(x.dtype).max)
    return np.clip(np.asarray(x, np.float64) * factor, -largest, largest).astype(x.dtype)


def infinite(tree):
    """How many values are NaN or infinite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(int(np.sum(~np.isfinite(np.asarray(x, np.float64)))) for x in floats)


@pytest.mark.parametrize("size", some_by_default([1e17, 1e20, 1e30, 3e38], [1e17, 3e38]), ids=str)
@every_case_of_a_law
def test_absurd_gradient_on_one_node_skips_step_on_all(case, size):
    """Finite, but squares and sums of it are not."""
    nodes, state = nodes_of(case.layout), history(case)[-1].after

    def of_one_node(x, factor):
        return np.concatenate([x[:3], times(x[3:4], factor), x[4:]])

    grads = enlarged(gradients(7, nodes), nodes, 16 * size, of_one_node)  # the largest is 1/16
    aggregated, after, info = program(case)(step_key(7, nodes), grads, state)
    assert not np.asarray(info.finite).any() and np.isfinite(info.residual_norm).all()
    assert same_bits(aggregated, jax.tree.map(jnp.zeros_like, PARAMS))
    assert same_bits(after, state)


@every_case_of_its_values
def test_largest_gradients_that_pass_do_no_harm(case):
    """Three steps of norms just below the guard's limit leave aggregate and state as finite as they were."""
    if (case.variant, phase_of(case).name) in LARGE_EXEMPT:
        pytest.skip(LARGE_EXEMPT[case.variant, phase_of(case).name])
    nodes, state = nodes_of(case.layout), history(case)[-1].after
    before = infinite(state)
    grads = on_host(gradients(7, nodes))
    norm = max(
        np.sqrt(sum(np.sum(np.square(np.asarray(x[k], np.float64))) for x in jax.tree.leaves(grads))) for k in range(K)
    )
    grads = enlarged(grads, nodes, 0.99 * LARGEST_NORM / norm, times)
    for step in range(3):
        aggregated, state, info = program(case)(step_key(7 + step, nodes), grads, state)
        assert np.asarray(info.finite).all() and np.isfinite(info.residual_norm).all()
        assert infinite(aggregated) == 0 and infinite(state) <= before


@every_case_of_its_values
def test_zero_gradients_and_residuals_aggregate_to_zeros(case):
    if (case.variant, phase_of(case).name) in ZERO_EXEMPT:
        pytest.skip(ZERO_EXEMPT[case.variant, phase_of(case).name])
    nodes, shared = nodes_of(case.layout), history(case)[-1].after.shared
    state = jgc.State(shared, jax.tree.map(np.zeros_like, first_state(case.variant).local))
    aggregated, after, info = program(case)(
        step_key(7, nodes), gradients(7, nodes, largest=0), jgc.place(state, STATE, nodes)
    )
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves((aggregated, after.local)))
    assert info.finite.all() and not np.asarray(info.residual_norm).any()


# --- what it costs ------------------------------------------------------------------------------------------------


@every_case
def test_physical_bytes_equal_compiled_collectives(case):
    nodes = nodes_of(case.layout)
    found = {op: total.sent_bytes for op, total in table(collectives(program(case))).items()}
    claimed: Counter = Counter()
    for sent in wire_of(case).physical:
        claimed[sent.op] += sent.bytes
    assert claimed == found
    assert bool(found) == (nodes.mesh is not None)


@every_phase_traced_again
def test_wire_equals_the_trace_of_the_program(case):
    compressor = compressor_of(case.variant)
    assert compressor.wire(phase_of(case).value, PARAMS, nodes_of(case.layout)) == wire_of(case)


@every_phase
def test_logical_bytes_do_not_depend_on_layout(case):
    wires = [messages_of(case._replace(layout=layout)) for layout in LAYOUTS]
    assert all((w.logical, w.once) == (wires[0].logical, wires[0].once) for w in wires)
    for message in (*wires[0].logical, *wires[0].once):
        assert message.role in ("leader", "worker", "server") and message.direction in ("up", "down")
        assert message.bytes >= 0


@every_case
def test_second_step_takes_the_first_ones_program(case):
    """A program that is compiled ahead of time raises where the state after a step is not as the state before."""
    assert len(history(case)) == STEPS
