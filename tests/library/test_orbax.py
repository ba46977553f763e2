"""States of every registered method through Orbax: each array comes back bit for bit, and where it lay."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from contract import LAYOUTS, PARAMS, STATE, first_state, nodes_of, same_bits, settings_of, some_by_default
from jax.sharding import NamedSharding, PartitionSpec as P

import jgc
from jgc.compress import METHODS, build, dense, per_layer, topk
from jgc.loops.fragments import take

FLOATS = {name: x for name, x in PARAMS.items() if name != "steps"}  # parameters of a loop
SPECS = {"in": P(None, "fsdp"), "bias": P(), "out": P("fsdp"), "none": P("fsdp")}
SHAPES = {"in": (32, 40), "bias": (40,), "out": (40, 8), "none": (0, 3)}
LONG_TO_MAKE = ["lgc_ps", "lgc_ring"]  # autoencoders
SHORT = [name for name in METHODS if name not in LONG_TO_MAKE]
FEW = ["topk", "powersgd", "qsgd"]  # vectors, factors, nothing

some_methods = pytest.mark.parametrize(
    "names", some_by_default([SHORT, FEW, LONG_TO_MAKE], [FEW]), ids=["most", "few", "autoencoders"]
)


def compressors(names, first_layer):
    """The methods by name, without momentum; with all but the autoencoders a group of layers that keeps nothing."""
    off = {"momentum_correction": False, "factor_masking": False, "momentum_at_once": False}
    for name in names:
        fields = METHODS[name].settings.__dataclass_fields__
        yield name, build(settings_of(name, **{key: x for key, x in off.items() if key in fields}))
    if names is not LONG_TO_MAKE:
        yield "per_layer", per_layer([(first_layer, dense())], default=topk())


def loop_state(params, nodes, states):
    """A loop's state with the states of several compressors."""
    params, key = jgc.place((params, jax.random.key(3)), (jgc.placements_of(params), jgc.SHARED), nodes)
    return jgc.LoopState(5, jgc.Phase("top-k", 3, "top-k"), params, optax.adam(0.1).init(params), states, key)


def back_from_orbax(state, folder, by_manager=False):
    """Save a state, and restore it into shapes and shardings; its arrays must be the same. The state again."""
    arrays = jgc.as_arrays(state)
    blank = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), arrays
    )
    if by_manager:
        with ocp.CheckpointManager(folder) as manager:
            manager.save(5, args=ocp.args.StandardSave(arrays))
            manager.wait_until_finished()
            restored = manager.restore(5, args=ocp.args.StandardRestore(blank))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "5", arrays)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(folder / "5", blank)
    again = jgc.from_arrays(restored)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert same_bits(jgc.as_arrays(again), arrays)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert not isinstance(x, jax.Array) or (x.shape, x.sharding) == (y.shape, y.sharding)
    return again


@some_methods
def test_states_of_all_layouts(names, tmp_path):
    """One tree for all methods and layouts: Orbax takes most of the time, by the number of arrays."""
    states = {
        layout: {name: jgc.place(first_state(name), STATE, nodes_of(layout)) for name in names} for layout in LAYOUTS
    }
    assert names is not SHORT or any(x.size == 0 for x in jax.tree.leaves(states))
    back_from_orbax(loop_state(FLOATS, nodes_of("4 devices"), states), tmp_path)


@some_methods
def test_states_of_divided_parameters(names, tmp_path):
    """2 nodes of 4 devices divide the parameters, one without elements too."""
    nodes = jgc.from_mesh(jax.make_mesh((2, 4), ("dcn", "fsdp")), slow="dcn", fast="fsdp")
    params = {name: jax.device_put(np.ones(SHAPES[name]), NamedSharding(nodes.mesh, SPECS[name])) for name in SPECS}
    states = {}
    for name, method in compressors(names, "^in"):
        if name != "gradiveq":  # it refuses them
            states[name] = method.init(jax.random.key(0), params, nodes)
            states[name] = jgc.place(states[name], jgc.placements_of(states[name]), nodes)
    back_from_orbax(loop_state(params, nodes, states), tmp_path, by_manager=True)


@some_methods
@pytest.mark.filterwarnings("ignore:gradiveq compresses kernels of convolutions")  # the other fragment has them
def test_states_of_local_steps_in_fragments(names, tmp_path):
    def local_steps(method):
        inner, outer = optax.adam(0.1), optax.sgd(0.7, momentum=0.9)
        return jgc.local_steps(inner, outer, method, 4, nodes_of("4 devices"), fragments=2, overlap=1)

    state, states = local_steps(topk()).make_step(lambda p, x: 0.0)[0](jax.random.key(0), FLOATS), {}
    for name, method in compressors(names, "^Conv_0/"):
        if not method.owns_momentum:
            parts = local_steps(method).parts
            init, key = parts.method().init, jax.random.key(0)
            own = [init(key, take(FLOATS, leaves), parts.nodes) for leaves in parts.leaves(FLOATS)]
            states[name] = jgc.place(tuple(own), jgc.placements_of(tuple(own)), parts.nodes)
    back_from_orbax(state._replace(compressor=states), tmp_path)
