"""Node-local gradients of a loss, the input of a compressor.

A loss is traced separately, and its program runs on the node axis without JAX's check of replicated
values. So a loss may contain any loop, any branch, and arrays of the mesh in its closure.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jgc import comm
from jgc.backend import backend_of
from jgc.checks.misuse import check_loss, check_nodes
from jgc.comm.axis import without_collectives
from jgc.comm.jaxprs import evaluated
from jgc.nodes.axis import check_node_axes, on_nodes, varying
from jgc.nodes.placement import (
    BATCH,
    LOCAL,
    SHARED,
    any_divided,
    locally,
    map_placed,
    on_node_axis,
    sharding_of,
)  # fmt: skip
from jgc.nodes.slow_loops import warn_of_slow_loops
from jgc.types import Nodes, PyTree


def node_grads(
    loss: Callable, nodes: Nodes, has_aux: bool = False, unroll: bool | None = None,
    local: bool = False, placements: PyTree = SHARED, frozen: PyTree = None,
) -> Callable:  # fmt: skip
    """Make a function of node-local gradients, for your own training loop.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's examples, or with `has_aux`
        `-> (scalar, aux)`. It may contain any loop or branch.
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`; `aux` on nodes of several devices: see `jgc.Metrics`.
      unroll: whether the nodes of a device are computed one by one (True), or together under
        `vmap` (False). By default one by one on CPU, together on GPU and TPU.
      local: whether `loss` takes a third, node-local argument, such as batch statistics.
      placements: of the parameters, from `jgc.placements_of(params)`. Give them if
        parameters are sharded within a node (FSDP, tensor parallel): XLA then divides the work.
      frozen: placements of a last argument that all nodes share and that gets no gradient, such as
        base weights under LoRA: SHARED, or `jgc.placements_of(frozen)`; None without one.

    Returns:
      `(params, batch) -> (value, grads)`, both with a leading node axis [K]; the leaves of `batch`
      have leading axes [K, b]. With `local` a third argument, leaves [K, ...]; with `frozen` one
      more at the end.

    Raises:
      TypeError: an argument of the wrong type; when called, a loss that returns None.
      ValueError: when called, a loss that was averaged over the nodes, or a node's devices.

    Warns:
      jgc.SlowLoopWarning: when traced for CPU, if the gradient of a convolution lies in a loop.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgc.nodes.layouts import make_nodes
      >>> nodes = make_nodes(2, devices=jax.devices()[:1])
      >>> loss = lambda w, x: jnp.mean(w * x)
      >>> node_grads(loss, nodes)(jnp.float32(3.0), jnp.array([[1.0], [2.0]]))[1]
      Array([1., 2.], dtype=float32)
    """
    check_loss(loss)
    check_nodes(nodes)
    differentiated = partial(jax.value_and_grad, has_aux=has_aux, allow_int=True)
    ins = (placements, BATCH, *([LOCAL] if local else []), *([] if frozen is None else [frozen]))
    partitioned = any_divided(ins)
    on_cpu = backend_of(nodes) == "cpu"
    unroll = unrolled(unroll, nodes)
    run = partial(
        on_nodes, nodes=nodes, outs=(LOCAL, locally(placements)), unroll=unroll,
        partitioned=partitioned, communicates=False,
    )  # fmt: skip

    def divided(*args):  # XLA divides the work; the loss may name the mesh, so the trace is inside
        with _named_faults():
            program, result = jax.make_jaxpr(differentiated(loss), return_shape=True)(*args)
            if on_cpu:
                warn_of_slow_loops(jax.make_jaxpr(loss)(*args), program)
        _check_not_averaged(program, nodes._replace(fast=()))
        return evaluated(program, result, args)

    def whole(*args):
        shapes = _shapes_on_a_device(args, ins, nodes)
        traced, out = _traced_apart(loss, shapes, nodes)
        if not jax.tree.leaves(out[0] if has_aux and isinstance(out, tuple) else out):
            raise TypeError("the loss returned None instead of a scalar: is a `return` missing?")
        _check_not_averaged(traced, nodes)
        differing = varying(traced, ins, args, nodes)
        axes = [tuple(axis for axis in nodes.fast if axis in x) for x in differing]
        on_mesh = {i: x for i, x in enumerate(traced.consts) if _lies_on_mesh(x)}

        def of_closure(params, rest, closure):
            consts = [closure.get(i, x) for i, x in enumerate(traced.consts)]
            return evaluated(traced, out, (params, *rest), consts)

        closure = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), on_mesh)
        inputs = shapes[0], shapes[1:], closure
        program, result = _traced_apart(differentiated(of_closure), inputs, nodes)
        if on_cpu:
            warn_of_slow_loops(traced, program)

        def one(closure, params, *rest):
            flat, structure = jax.tree.flatten(evaluated(program, result, (params, rest, closure)))
            # loss and aux: where they differ; gradients: all
            over = [*axes, *[nodes.fast] * (len(flat) - len(axes))]
            means = [comm.mean_inside(x, of_x, nodes) for x, of_x in zip(flat, over, strict=True)]
            return jax.tree.unflatten(structure, means)

        with _named_faults():
            return run(one, ins=(SHARED, *ins))(on_mesh, *args)

    return run(divided, ins=ins) if partitioned else whole


def unrolled(unroll: bool | None, nodes: Nodes) -> bool:
    """Whether to compute gradients of a device's nodes one by one; None: as is faster.

    Convolutions on a CPU take 2.2 times as long under `vmap` as unrolled, and on an H100 2.8 times
    as long unrolled as under `vmap`, with 2.9 times the time to compile.

    Example:
      >>> from jgc.nodes.layouts import make_nodes
      >>> nodes = make_nodes(2, devices=jax.devices()[:1])
      >>> unrolled(None, nodes), unrolled(False, nodes)
      (True, False)
    """
    if not (unroll is None or isinstance(unroll, bool)):
        raise TypeError(f"unroll must be True, False or None (as is faster), got {unroll!r}")
    return backend_of(nodes) == "cpu" if unroll is None else unroll


def _shapes_on_a_device(args: tuple, ins: tuple, nodes: Nodes) -> tuple:
    """The shapes that a loss sees: one node's arguments, of its examples one device's."""
    for i, (placements, arg) in enumerate(zip(ins, args, strict=True)):
        check_node_axes(placements, arg, nodes, f"argument {i}")

    def shape(placement, x):
        dims = jnp.shape(x)[on_node_axis(placement) :]
        if placement == BATCH and dims:
            dims = (dims[0] // nodes.size(nodes.fast), *dims[1:])
        return jax.ShapeDtypeStruct(dims, jnp.result_type(x))

    return map_placed(shape, ins, args)


def _traced_apart(fn: Callable, shapes: tuple, nodes: Nodes) -> tuple[Any, PyTree]:
    """A function's jaxpr and its result's shapes, traced outside the mesh (for Equinox)."""
    axes = [(axis, nodes.size([axis])) for axis in (*nodes.slow, *nodes.fast)]
    inside = not jax.sharding.get_abstract_mesh().empty  # jax.set_mesh is in force
    outside = jax.sharding.use_abstract_mesh(AbstractMesh((), ())) if inside else nullcontext()
    with _named_faults(), without_collectives(), outside:
        return jax.make_jaxpr(fn, axis_env=axes, return_shape=True)(*shapes)


def _lies_on_mesh(x: Any) -> bool:
    """Whether a closure's array may lie on several devices. Raise ValueError on Explicit axes."""
    in_a_trace = isinstance(x, jax.core.Tracer)
    sharding = jax.typeof(x).sharding if in_a_trace else sharding_of(x)
    if not isinstance(sharding, NamedSharding):
        return in_a_trace
    if AxisType.Explicit in sharding.mesh.axis_types:
        raise ValueError(_IN_CLOSURE)
    return in_a_trace or sharding.num_devices > 1


_IN_CLOSURE = (
    "the loss's closure holds an array of a mesh, which JAX does not take on Explicit axes, nor "
    "where parameters are sharded within a node: give it to the step, step(state, batch, "
    "frozen), and the loss gets it as its last argument; or keep it on the host (jax.device_get). "
    "Or the loss calls jax.shard_map with an argument mesh (docs/meshes.md)"
)


_SHARD_MAP = (
    "the loss calls a function of a mesh, such as jax.shard_map. Whole parameters: each device "
    "computes the loss of its part of a node's examples, without a mesh, so leave shard_map out. "
    "Parameters sharded within a node: give shard_map no argument mesh (docs/meshes.md)"
)


@contextmanager
def _named_faults():
    """Replace errors of JAX whose messages do not name the fault in a loss."""
    try:
        yield
    except AssertionError as error:
        if str(error):
            raise
        raise ValueError(
            "the loss failed inside JAX with an assertion without a message. A collective over an "
            "unknown axis, e.g. lax.pmean over the axis of a pmap, ends like this. jgc takes the "
            "mean over nodes itself: leave it out"
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            f"the loss averages over an unknown axis ({str(error).split('.')[0]}). jgc takes the "
            "mean over nodes itself: leave it out"
        ) from None
    except (NotImplementedError, ValueError) as error:
        if str(error).startswith(("The context mesh ", "in_specs passed")):
            raise ValueError(_SHARD_MAP) from error
        known = ("Closing over inputs to shard_map", "Context mesh ", "Mesh for all inputs")
        if not str(error).startswith(known):
            raise
        raise ValueError(_IN_CLOSURE) from None


def _check_not_averaged(traced: Any, nodes: Nodes) -> None:
    """Raise ValueError if a loss was averaged over devices: all nodes' gradients would be equal."""
    all_axes = frozenset((*nodes.slow, *nodes.fast))
    axes = comm.varying_axes(traced, [all_axes] * len(traced.jaxpr.invars))[0]
    missing = [axis for axis in (*nodes.slow, *nodes.fast) if axis not in axes]
    if missing:
        raise ValueError(
            f"the loss is the same on all devices along the mesh axis {missing[0]!r}: it does not "
            "depend on the parameters, or it was averaged. A loss sees one node's examples, and "
            "jgc takes the mean itself: leave pmean (psum) out of it"
        )
