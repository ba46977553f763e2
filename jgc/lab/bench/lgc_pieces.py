"""The pieces of a step of `lgc_ps`, each compiled by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgc.compress.lgc import autoencoder as ae
from jgc.layout.pack import Packing
from jgc.method.memory import accumulated, make_memory
from jgc.selection.entries import Sparse, scatter
from jgc.selection.selector import Selector


def lgc_pieces(packing: Packing, nodes: int, alpha: float) -> dict[str, Callable[[], Any]]:
    """The pieces of `lgc_ps` on all K nodes of one device, each compiled by itself."""
    selector = Selector(alpha)
    mu, n = sum(selector.counts(packing.layers)), packing.size
    key = jax.random.key(0)
    v = jax.random.normal(key, (nodes, n))
    positions = jax.vmap(lambda v: selector.positions(v, packing.layers))(v)
    x = jax.random.normal(key, (nodes, mu))
    z = jnp.pad(x, ((0, 0), (0, ae.padded(mu) - mu)))
    weights = ae.init(key, mu, nodes)
    optimiser = optax.adam(1e-3)
    trained = ae.Trained(weights, optimiser.init(weights))
    code = ae.encode(weights.encoder, z[0])
    memory = make_memory(True, 0.9)
    local = jax.vmap(lambda v: memory.init(n))(v)

    def remember(local, g, positions):
        v, local = memory.compensate(accumulated(memory, local, g, False), g, False)
        return memory.update(local, v, Sparse(positions, v[positions]), False)

    pieces: dict[str, tuple[Callable, tuple]] = {
        "memory (accumulate, update), all nodes": (jax.vmap(remember), (local, v, positions)),
        "selection (top-k per layer), all nodes": (
            jax.vmap(lambda v: selector.positions(v, packing.layers)),
            (v,),
        ),
        "encoder, one node": (ae.encode, (weights.encoder, z[0])),
        "decoders, all nodes": (jax.vmap(ae.decode, in_axes=(0, None, 0)), (weights.decoders, code, z)),
        "scatter of the mean": (lambda p, x: scatter(Sparse(p, x), n), (positions, x)),
        "one training step of the autoencoder": (
            lambda trained, z: ae.train(trained, optimiser, z, z, jnp.int32(0), 1.0, 0.5),
            (trained, z),
        ),
    }
    return {name: partial(jax.jit(fn), *args) for name, (fn, args) in pieces.items()}
