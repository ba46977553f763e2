"""The skeleton of methods that work on every layer's own array: as `from_step`, without a vector of all values.

A layer is a parameter in its own shape; biases and norms are one vector (see `jgc.layout.pack`). Residuals are arrays
of the same shapes, so a step neither joins the gradients nor cuts them out of a vector. Each of the two costs as much
as reading all values several times.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jgc.layout.launches import stacked
from jgc.layout.pack import Layers, Packing, floats_by_path, make_packing, pieces, unpack
from jgc.layout.squares import squares_of_new
from jgc.method.compensate import unless
from jgc.method.diagnose import compare
from jgc.method.from_step import InitFn, Local, MessagesFn
from jgc.method.guard import Core, guarded
from jgc.method.memory import Memory, accumulated, has_residual
from jgc.method.messages import own_or_dense
from jgc.method.phases import DENSE
from jgc.method.signature import check_signature, signature_of
from jgc.nodes.placement import per_node
from jgc.types import Array, Compressor, Info, Key, Message, Nodes, Phase, PyTree, State

Values = Sequence[Array]  # f32, one array for each layer, in its shape


class LayerStep(NamedTuple):
    """The result of a method's step on one node.

    Attributes:
      mean: the aggregate of each layer, equal on all nodes.
      sent: the part of each layer that counts as sent; the residual becomes v - sent.
      shared: the method's shared state after the step.
      elements: how many values this node's message encodes.
    """

    mean: Values
    sent: Values
    shared: PyTree = ()
    elements: int | Array = 0


class LayerStepFn(Protocol):
    """`step(phase, key, v, shared, layers, nodes)`: as `StepFn`, with v as one array for each layer."""

    def __call__(
        self, phase: Any, key: Key, v: Values, shared: PyTree, layers: Layers, nodes: Nodes, /
    ) -> LayerStep: ...


def by_layer(
    step: LayerStepFn, *, memory: Memory, schedule: tuple[Phase, ...], messages: MessagesFn, init: InitFn
) -> Compressor:
    """Make a compressor of a step on every layer's own array.

    Args:
      step: one step on one node. In the phase with value "dense" it must send all of v.
      memory: the memory of each node; its functions run on every layer by itself.
      schedule: the phases.
      messages: logical messages of a step, for every phase except "dense".
      init: the method's shared state before the first step; per-node state beside the memory there is none.
    """
    method = _Method(step, memory, messages, init)
    return guarded(
        Core(
            init=method.first_state,
            aggregate=method.aggregate,
            transition=lambda old, new, state, nodes: state,
            messages=method.all_messages,
            schedule=schedule,
            owns_momentum=memory.owns_momentum,
            next_phase=None,
            diagnose=method.diagnose,
            residual=method.residual,
            has_residual=lambda: has_residual(memory),
        )
    )


class _Method(NamedTuple):
    """A step with the arguments of `by_layer` that its functions, those of a `Core`, need."""

    step: LayerStepFn
    memory: Memory
    messages: MessagesFn
    init: InitFn

    def first_state(self, key: Key, params: PyTree, nodes: Nodes) -> State:
        layers = make_packing(params).layers
        shared, _ = self.init(key, layers, nodes)
        kept = tuple(
            jax.tree.map(lambda x, of=layer.shape: x.reshape(of), self.memory.init(layer.size)) for layer in layers
        )
        return State(shared, jax.tree.map(lambda x: per_node(x, nodes), Local(kept, (), signature_of(params))))

    def aggregate(
        self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes, skip: Array | bool
    ) -> tuple[PyTree, State, Info]:
        check_signature(grads, state.local.signature)
        packing, complete = make_packing(grads), phase == DENSE
        v, kept = self.compensated(layer_values(grads, packing), state, complete, skip)
        if not complete:
            v, factors = stacked(v), jax.tree.structure(state.shared)
            state = state._replace(shared=jax.tree.unflatten(factors, stacked(jax.tree.leaves(state.shared))))
        result = self.step(phase, key, v, state.shared, packing.layers, nodes)
        mean = [jnp.where(skip, 0, x) for x in result.mean]
        sent = [jnp.where(skip, 0, x) for x in result.sent]
        after = tuple(self.memory.update(*of_layer, complete) for of_layer in zip(kept, v, sent, strict=True))
        shared = unless(skip, state.shared, result.shared)
        info = Info(self.residual_norm(after), jnp.float32(result.elements), jnp.int32(0), jnp.bool_(True))
        return from_layers(mean, packing, skip), State(shared, Local(after, (), state.local.signature)), info

    def compensated(
        self, g: Values, state: State, complete: bool, skip: Array | bool
    ) -> tuple[list[Array], list[PyTree]]:
        """Each layer's v and the memory's state; if `skip`, v is the residual and the state does not change."""
        v, after = [], []
        for x, before in zip(g, state.local.memory, strict=True):
            local = unless(skip, before, accumulated(self.memory, before, x, complete))
            sum_, local = self.memory.compensate(local, x, complete)
            v.append(sum_)
            after.append(unless(skip, before, local) if local is not sum_ else local)
        return v, after

    def residual_norm(self, kept: Sequence[PyTree]) -> Array:
        residuals = [self.memory.residual(local) for local in kept]
        return jnp.sqrt(squares_of_new([x.astype(jnp.float32) for x in residuals if x is not None]))

    def all_messages(
        self, phase: Hashable, shapes: PyTree, nodes: Nodes
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        layers = make_packing(shapes).layers
        return own_or_dense(self.messages, phase, layers, nodes), ()

    def diagnose(self, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes) -> dict[str, Array]:
        packing = make_packing(grads)
        g = layer_values(grads, packing)
        v, _ = self.compensated(g, state, phase == DENSE, skip=False)
        step = self.step(phase, key, v, state.shared, packing.layers, nodes)
        return compare(joined(step.mean), joined(v), joined(g), nodes, everything=True)

    def residual(self, local: Local, shapes: PyTree) -> dict[str, Array]:
        kept = [self.memory.residual(of_layer) for of_layer in local.memory]
        found = [x for x in kept if x is not None]
        if len(found) < len(kept):
            return {}
        return floats_by_path(from_layers(found, make_packing(shapes)))


def layer_values(tree: PyTree, packing: Packing) -> list[Array]:
    """A tree's layers in their order, f32 in the layers' shapes."""
    flat = {at.start: x for at, x in pieces(tree, packing)}
    out = []
    for layer in packing.layers:
        parts = [flat[start] for start in sorted(flat) if layer.start <= start < layer.start + layer.size]
        out.append((parts[0] if len(parts) == 1 else jnp.concatenate(parts)).reshape(layer.shape))
    return out


def from_layers(values: Values, packing: Packing, nothing: Array | bool | None = None) -> PyTree:
    """The inverse of `layer_values`: a tree with the original shapes and dtypes; `nothing` as in `unpack`."""
    return unpack(joined(values), packing, nothing)  # XLA cuts nothing out: a part of a concatenation is its operand


def joined(values: Values) -> Array:
    """All layers as one vector f32[n]."""
    return jnp.concatenate([x.reshape(-1) for x in values]) if values else jnp.zeros((0,), jnp.float32)
