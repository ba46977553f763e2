"""A method's aggregate as compiled programs on one host: over the network, and with local copies instead.

Every program is `(state, step, grads) -> (state, aggregated)` with the state's buffers donated: jgc's methods through
the contract, and the plain code that a reader would write.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jgc import comm, compress
from jgc.compress import step_on_nodes
from jgc.lab.bench.network import twenty_lines
from jgc.lab.bench.network.framing import counted
from jgc.lab.bench.network.methods import LABELS, SHARE, phase_of, settings
from jgc.lab.shared.hlo import UnknownCollectiveError, collectives
from jgc.nodes.layouts import NODE, from_mesh
from jgc.nodes.placement import LOCAL, placements_of
from jgc.types import Nodes, PyTree, State

Run = Callable[[PyTree, Any, PyTree], tuple[PyTree, PyTree]]


class Built(NamedTuple):
    """A method, compiled.

    Attributes:
      run: its program over the network.
      state: before the first step.
      alone: its program with local copies.
      physical: bytes that a host sends by `Wire.physical`; None for plain JAX.
      compiled: bytes that the compiled program's collectives send; None if they could not be read.
      collectives: their number by kind and size.
      audit: "" if both agree, else how they differ.
    """

    run: Run
    state: PyTree
    alone: Run
    physical: float | None
    compiled: float | None
    collectives: dict[str, int]
    audit: str


def alone_on(nodes: Nodes) -> Nodes:
    """The same number of nodes on a mesh of this process's device, for local copies."""
    mesh = Mesh(jax.local_devices()[:1], (NODE,))
    return from_mesh(mesh, (NODE,))._replace(count=nodes.count)


def build(name: str, nodes: Nodes, params: PyTree, grads: PyTree) -> Built:
    """Compile a method.

    Args:
      name: see `methods.Row`.
      nodes: one per host.
      params: the model's, replicated.
      grads: every node's gradients, [K, ...].
    """
    program, start, physical = _plain(name, nodes) if name in LABELS else _jgc(name, nodes, params)
    state = _started(start, params, nodes)
    step = np.int32(0)
    run = jax.jit(program(nodes), donate_argnums=0, out_shardings=(_shardings(state), None))
    compiled = run.lower(state, step, grads).compile()
    with comm.local_copies():
        single = jax.jit(program(alone_on(nodes)), donate_argnums=0).lower(local(state), step, local(grads)).compile()
    return Built(compiled, state, single, physical, *sent_by(compiled, physical))


def sent_by(compiled: Any, physical: float | None) -> tuple[float | None, dict[str, int], str]:
    """Bytes of a compiled program's collectives, their number by kind and size, and any difference from `Wire`."""
    try:
        operations = collectives(compiled)
    except UnknownCollectiveError as error:
        return None, {}, str(error)[:200]
    sent = float(sum(operation.sent_bytes for operation in operations))
    audit = "" if physical in (None, sent) else f"Wire.physical {physical:.0f} B, the compiled program {sent:.0f} B"
    return sent, counted(operations), audit


def local(tree: PyTree) -> PyTree:
    """This process's part of global arrays, not copied: [K, ...] becomes [1, ...], replicated arrays stay."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def copied(tree: PyTree) -> PyTree:
    """This process's part in new buffers, to be donated."""
    return jax.tree.map(jnp.copy, local(tree))


def _started(start: Callable[[PyTree], PyTree], params: PyTree, nodes: Nodes) -> PyTree:
    """The first state; each process makes its part."""
    assert nodes.mesh is not None, "every host has a device"
    mesh, shapes = nodes.mesh, jax.eval_shape(start, params)
    placements = placements_of(shapes)
    shardings = jax.tree.map(lambda placement: NamedSharding(mesh, P(NODE) if placement == LOCAL else P()), placements)
    return jax.jit(start, out_shardings=shardings)(params)


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, tree)


def _jgc(name: str, nodes: Nodes, params: PyTree) -> tuple[Callable[[Nodes], Run], Callable, float]:
    """A method of jgc in the phase of its row."""
    compressor = compress.build(settings(name))
    phase = phase_of(name, compressor).value

    def program(nodes: Nodes) -> Run:
        on_axis = step_on_nodes(compressor.aggregate, phase, nodes)

        def run(state, step, grads):
            aggregated, state, _ = on_axis(jax.random.fold_in(jax.random.key(0), step), grads, state)
            return state, aggregated

        return run

    wire = compressor.wire(phase, params, nodes)
    start = partial(compressor.init, jax.random.key(1), nodes=nodes)
    return program, start, float(sum(sent.bytes for sent in wire.physical))


def _plain(name: str, nodes: Nodes) -> tuple[Callable[[Nodes], Run], Callable, None]:
    """Plain JAX, on `State`s so that the benchmark can tell shared from local arrays."""
    hosts = nodes.count

    def program(nodes: Nodes) -> Run:
        total, gather = twenty_lines.over(NODE)
        if nodes.size((NODE,)) == 1:  # alone

            def gather(x):
                return jax.lax.optimization_barrier(jnp.broadcast_to(x, (hosts, *x.shape)))

        def aggregate(state, grads):
            node_grads = jax.tree.map(lambda g: g[0], grads)
            if name == "twenty_lines":
                residual = [r[0] for r in state.local]
                mean, residual = twenty_lines.topk(node_grads, residual, SHARE, hosts, gather)
                return State((), [r[None] for r in residual]), mean
            dtype = jnp.float16 if name == "psum_f16" else jnp.float32
            return state, twenty_lines.psum(node_grads, dtype, hosts, total)

        placements = State(P(), P(NODE))
        specs: dict[str, Any] = {"in_specs": (placements, P(NODE)), "out_specs": (placements, P())}
        on_hosts = jax.shard_map(aggregate, mesh=nodes.mesh, check_vma=False, **specs)
        return lambda state, step, grads: on_hosts(state, grads)

    def start(params: PyTree) -> State:
        if name != "twenty_lines":
            return State((), ())
        return State((), [jnp.zeros((hosts, p.size)) for p in jax.tree.leaves(params)])

    return program, start, None
