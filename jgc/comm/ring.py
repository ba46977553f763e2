"""Means by an explicit ring: reduce-scatter by `ppermute`, then all-gather.

Source: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of
  Workstations".
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.comm.axis import (
    devices_of,
    emulated_gather,
    emulated_shift,
    emulated_sum,
    is_emulated,
    node_index,
    vary_over,
)
from jgc.comm.collectives import from_words, gather_rows, pmean, to_words
from jgc.comm.ledger import are_local_copies, record
from jgc.types import Array, Key, Nodes


def mean_by(algorithm: str) -> Callable[[Array, Nodes, str], Array]:
    """Average by the algorithm of that name: `pmean` for "psum", `ring_mean` for "ring".

    Raises:
      ValueError: a different algorithm.
    """
    means = {"psum": pmean, "ring": ring_mean}
    if algorithm not in means:
        raise ValueError(f"algorithm must be 'psum' or 'ring', got {algorithm!r}")
    return means[algorithm]


def ring_mean(x: Array, nodes: Nodes, field: str) -> Array:
    """Mean of x over all nodes by an explicit ring: reduce-scatter by `ppermute`, then all-gather.

    x is f32[n], or integers whose sum over nodes fits the dtype. Segments are padded to equal
    length, and the padding is sent. Nodes of one device are summed before the ring between devices.
    With a single device, the ring runs over its emulated nodes.

    Raises:
      ValueError: x is not a vector.

    Source: Patarasuk and Yuan 2009; LGC paper, Section II-A.
    """
    if x.ndim != 1:
        form = f"{x.dtype}{list(x.shape)}"
        raise ValueError(f"ring_mean takes a vector, got {form}: flatten it first")
    places = ring_size(nodes)
    segments = jnp.pad(x, (0, -x.size % places)).reshape(places, -1)
    return ring_mean_of_segments(lambda i: segments[i], nodes, field)[: x.size]


def ring_size(nodes: Nodes) -> int:
    """Number of places and segments of a ring: devices, or emulated nodes of a single device."""
    return devices_of(nodes) if nodes.slow else nodes.per_device


def ring_mean_of_segments(segment: Callable[[Array], Array], nodes: Nodes, field: str) -> Array:
    """`ring_mean` of segments computed one by one, each while the previous one is sent.

    Args:
      segment: `i -> f32[m]`, this node's segment i, i32[] in [0, `ring_size`). It must not depend
        on received data, so that XLA can compute it during the transfer.
      nodes: the layout.
      field: the payload field.

    Returns:
      The means of all segments, f32[places * m], equal on every node.

    Source: Yu et al. 2018 (GradiVeQ), Algorithm 1, lines 1 to 9. An all-gather replaces lines 10 to
      14.
    """
    size, place = ring_size(nodes), _place(nodes)
    travelling = _place_sum(segment((place - 1) % size), nodes)  # segment p - 1 starts at place p
    for hop in range(1, size):
        local = _place_sum(segment((place - 1 - hop) % size), nodes)
        travelling = _shifted(travelling, nodes, field) + local
    sums = _of_all_places(travelling, nodes, field)  # place p ends with the sum of segment p
    return sums.reshape(-1) / nodes.count


def segments_of(
    part: Callable[[int, int], Array], whole: Array, places: int, overlapped: bool
) -> Callable[[Array], Array]:
    """`i -> f32[m]`, segment i of a code in `places` segments, zeros at the end of the last ones.

    If `overlapped`, a segment is computed by itself, `part(start, stop)` with static bounds, so
    that XLA can do so while the one before is sent; if not, it is sliced from the `whole` code.
    """
    width = -(-whole.size // places)

    def segment(place):
        code = part(place * width, (place + 1) * width)
        return jnp.pad(code, (0, width - code.size))

    if overlapped:
        branches = [partial(segment, place) for place in range(places)]
        return lambda i: lax.switch(i, branches)
    # The barrier makes every segment wait for all of them: XLA would compute each by itself.
    padded = lax.optimization_barrier(jnp.pad(whole, (0, places * width - whole.size)))
    return lambda i: lax.dynamic_slice_in_dim(padded, i * width, width)


def _place(nodes: Nodes) -> Array:
    """This place's index, i32[] in [0, `ring_size`)."""
    index = node_index(nodes)  # raises outside the node axis
    return lax.axis_index(nodes.slow) if nodes.slow else index


def _place_sum(x: Array, nodes: Nodes) -> Array:
    """Sum of x over the nodes of a place."""
    if not nodes.slow:
        return x
    return vary_over(emulated_sum(x, node_index(nodes)) if is_emulated(nodes) else x, nodes.slow)


def _shifted(x: Array, nodes: Nodes, field: str) -> Array:
    """x of the previous place."""
    if not nodes.slow:
        return emulated_shift(x, node_index(nodes))
    size = devices_of(nodes)
    record("collective-permute", field, x, size)
    if are_local_copies():
        return lax.optimization_barrier(x)
    return lax.ppermute(x, nodes.slow, [(i, (i + 1) % size) for i in range(size)])


def _of_all_places(x: Array, nodes: Nodes, field: str) -> Array:
    """x of all places, [places, ...]."""
    if not nodes.slow:
        return emulated_gather(nodes.per_device)(x, node_index(nodes))
    record("all-gather", field, x, devices_of(nodes))
    return gather_rows(x[None], nodes)


def ring_quantized_mean(
    key: Key,
    x: Array,
    encode: Callable[[Key, Array], dict[str, Array]],
    decode: Callable[[dict[str, Array]], Array],
    nodes: Nodes,
) -> tuple[Array, Array]:
    """Mean by a ring for codes that cannot be added up: a hop decodes, adds and encodes the sum.

    A place of the ring is a device, whose nodes are summed uncompressed first, or on a single
    device an emulated node. So the number of hops depends on the layout, and layouts agree only as
    far as the code is exact. Each hop is one collective of codes.

    Args:
      key: the same on all nodes; each place derives a key for each hop from it.
      x: f32[`ring_size`, m], this node's segments.
      encode: `(key, f32[m]) -> payload`, arrays of static shapes.
      decode: `payload -> f32[m]`.
      nodes: the layout.

    Returns:
      The means, f32[places, m], equal on every node, and this node's quantisation errors,
      f32[places, m], a place's divided equally among its nodes: mean of x = means + mean of errors.

    Raises:
      ValueError: x has more or fewer rows than the ring has places.

    Source: Yu et al. 2018 (GradiVeQ), Section 1, on scalar quantisers in a ring.
    """
    size, place = ring_size(nodes), _place(nodes)
    if len(x) != size:
        raise ValueError(f"x must have a row for each of the {size} places of the ring "
                         f"(jgc.comm.ring_size), got {len(x)}")  # fmt: skip
    x = _place_sum(x, nodes)
    nodes_per_place = nodes.count // size
    place_key = jax.random.fold_in(key, place * nodes_per_place)  # `node_key` of its first node

    def quantize(hop: int, received: Array | float) -> tuple[dict[str, Array], Array]:
        """Encode the received sum plus the place's segment; return the code and its error."""
        whole = received + x[(place - 1 - hop) % size]  # f32[m]
        payload = encode(jax.random.fold_in(place_key, hop), whole)
        return payload, whole - _decoded(decode, payload)

    payload, error = quantize(0, 0.0)
    errors, field = [error], "+".join(sorted(payload))
    for hop in range(1, size):
        received = from_words(_shifted(to_words(payload), nodes, field), payload)
        payload, error = quantize(hop, _decoded(decode, received))
        errors.append(error)
    words = _of_all_places(to_words(payload), nodes, field)  # place p ends with segment p
    # every place decodes its segment too, so that all places hold the same values
    sums = jax.vmap(lambda words: _decoded(decode, from_words(words, payload)))(words)
    lost = jnp.stack(errors)[(place - 1 - np.arange(size)) % size]  # hop h was segment p - 1 - h
    return sums / nodes.count, lost / nodes_per_place


def _decoded(decode: Callable[[dict[str, Array]], Array], payload: dict[str, Array]) -> Array:
    # the barrier prevents fusion with the next sum, so that every place decodes to the same bits
    return lax.optimization_barrier(decode(payload))
