"""Gradients of a loss, each node's own: what enters a compressor."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import jax

from jgc import comm
from jgc.misuse import check_loss, check_nodes
from jgc.node_axis import on_nodes, varying
from jgc.placement import BATCH, LOCAL, SHARED, Sharded, is_placement, locally
from jgc.types import Nodes, PyTree


def node_grads(
    loss: Callable, nodes: Nodes, has_aux: bool = False, unroll: bool = True, local: bool = False,
    placements: PyTree = SHARED, frozen: PyTree = None,
) -> Callable:  # fmt: skip
    """Make a function of node-local gradients, for your own training loop.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's examples, or with `has_aux` `-> (scalar, aux)`. It
        may contain any loop or branch.
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`; `aux` on nodes of several devices: see `jgc.Metrics`.
      unroll: see `on_nodes`; True is much faster for convolutions on CPU.
      local: whether `loss` takes a third, node-local argument, such as batch statistics.
      placements: of the parameters, from `jgc.placements_of(params)`. Give them if devices of a node divide the
        parameters (FSDP, tensor parallel): gradients are then divided alike, and XLA divides the node's work.
      frozen: placements of a last argument that all nodes share and that gets no gradient, such as the base weights
        under LoRA or a target network: SHARED, or `jgc.placements_of(frozen)`. None if `loss` has no such argument.

    Returns:
      `(params, batch) -> (value, grads)`, both with a leading node axis [K]; the leaves of `batch` have
      leading axes [K, b]. With `local`, `(params, batch, own) -> (value, grads)`, the leaves of `own` [K, ...]. With
      `frozen`, one more argument at the end.

    Raises:
      TypeError: something else in place of the loss or of the nodes.
      ValueError: when called, a loss that was averaged over the nodes, or a node's devices.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgc.nodes import make_nodes
      >>> nodes = make_nodes(2, devices=jax.devices()[:1])
      >>> loss = lambda w, x: jnp.mean(w * x)
      >>> node_grads(loss, nodes)(jnp.float32(3.0), jnp.array([[1.0], [2.0]]))[1]
      Array([1., 2.], dtype=float32)
    """
    check_loss(loss)
    check_nodes(nodes)
    gradient = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)
    ins = (placements, BATCH, *([LOCAL] if local else []), *([] if frozen is None else [frozen]))
    partitioned = any(isinstance(x, Sharded) for x in jax.tree.leaves(ins, is_leaf=is_placement))
    seen = nodes._replace(fast=()) if partitioned else nodes  # the axes that the loss is called on

    def one(*args):
        if not (seen.slow or seen.fast):
            with _named_faults():
                return gradient(*args)
        with _named_faults():
            traced = jax.make_jaxpr(loss)(*args)  # only to be looked at
            _check_not_averaged(traced, seen)
            value, grads = gradient(*args)
        axes = [tuple(axis for axis in seen.fast if axis in x) for x in varying(traced, ins, args, seen)]
        flat, structure = jax.tree.flatten(value)
        flat = [comm.mean_inside(x, over, seen) for x, over in zip(flat, axes, strict=True)]
        return jax.tree.unflatten(structure, flat), jax.tree.map(lambda g: comm.mean_inside(g, seen.fast, seen), grads)

    outs = (LOCAL, locally(placements))
    return on_nodes(one, nodes, ins=ins, outs=outs, unroll=unroll, partitioned=partitioned, communicates=False)


@contextmanager
def _named_faults():
    """Errors of JAX whose message does not say what is wrong with a loss, in words that do."""
    try:
        yield
    except AssertionError as error:
        if str(error):
            raise
        raise ValueError(
            "the loss failed inside JAX with an assertion that says nothing; a collective over an axis that is not "
            "there, lax.pmean of pmap's say, does so. jgc takes the mean over nodes itself: leave it out"
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            f"the loss averages over an axis that is not there ({str(error).split('.')[0]}). jgc takes the mean "
            "over nodes itself: leave it out"
        ) from None
    except (NotImplementedError, ValueError) as error:
        if not any(part in str(error) for part in ("Closing over inputs to shard_map", "Context mesh ")):
            raise
        raise ValueError(
            "the loss's closure holds an array that lies on a mesh, which JAX does not take: give it to the step, "
            "step(state, batch, frozen), and the loss gets it as its last argument; or keep it on the host "
            "(jax.device_get)"
        ) from None


def _check_not_averaged(traced: Any, nodes: Nodes) -> None:
    """Raise ValueError if a loss was averaged over devices: each node would have the same."""
    all_axes = frozenset((*nodes.slow, *nodes.fast))
    axes = comm.varying_axes(traced, [all_axes] * len(traced.jaxpr.invars))[0]
    missing = [axis for axis in (*nodes.slow, *nodes.fast) if axis not in axes]
    if missing:
        raise ValueError(
            f"the loss is the same on all devices along the mesh axis {missing[0]!r}: it does not depend on the "
            "parameters, or it was averaged. A loss sees one node's examples, and jgc takes the mean itself: leave "
            "pmean (psum) out of it"
        )
