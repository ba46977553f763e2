"""Learned positions: nodes agree on where to search, from all that was sent before, and positions say where in there.

    b     blocks of 8 values whose turn it is, the same on all nodes     see `jgc.compress.sparse.turns`
    x     v at the values of these blocks, one after the other
    send  the largest |x| of each layer, with their positions in x

A method's number of values of each layer stays, and so do memory, values and phases. What changes is that a value is
sent only when its turn comes; until then it stays in the residual. Positions in x are few bits whatever n is: in
Elias-Fano code log2(candidates) + 2, where candidates is the number of values in x for each one sent.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jgc import comm
from jgc.compress.sparse import turns
from jgc.compress.sparse.sparsity import share_of
from jgc.layout.opaque import each
from jgc.layout.pack import values_of
from jgc.layout.tiles import cut
from jgc.method.from_step import Layers, Step, dense_step, from_step
from jgc.method.memory import Memory
from jgc.method.messages import sizes_of, to_all
from jgc.selection.select import SparseSum, Unordered
from jgc.selection.selector import Selector
from jgc.selection.top_k import largest_in_ranges
from jgc.types import Compressor, Phase
from jgc.wire import elias_fano
from jgc.wire.values import ValueCode, check_value_code, decode_values, encode_values


def check_candidates(candidates: int) -> None:
    """Raise ValueError unless candidates is at least 2."""
    if candidates < 2:
        raise ValueError(f"candidates must be at least 2 (values searched for each value sent), got {candidates}")


def learned_positions(
    select: Callable[[float], Selector], candidates: int, value_code: ValueCode, memory: Memory,
    schedule: tuple[Phase, ...], alpha: float, clip_norm: float = 0.0,
    scope: Callable[[Layers], Layers] = lambda layers: layers,
) -> Compressor:  # fmt: skip
    """A sparse method with learned positions.

    Args:
      select: the selector of a share of the values; it says how many each layer sends.
      candidates: values searched for each one sent.
      value_code: how values are written.
      memory: the memory of each node.
      schedule: from `sparse_schedule`.
      alpha: share of the values in the schedule's last phase.
      clip_norm: see `from_step`.
      scope: what the selection takes for layers.

    Raises:
      ValueError: fewer than 2 candidates, an unknown value_code.
    """
    check_candidates(candidates)
    check_value_code(value_code)
    shares = {phase.value: share_of(phase, alpha) for phase in schedule}
    selectors = {value: select(share) for value, share in shares.items() if share is not None}

    def plan(phase, layers):
        layers = scope(layers)
        counts = selectors[phase].counts(layers)
        return counts, turns.cut_in_blocks(layers, counts, candidates)

    def step(phase, key, v, state, layers, nodes):
        n = values_of(layers)
        if phase not in selectors or not n:
            return dense_step(cut(v, n), state, nodes)
        counts, blocks_of = plan(phase, layers)
        blocks = turns.due(state.shared, blocks_of)
        x = lax.optimization_barrier(turns.candidates_of(v, blocks, blocks_of))  # or XLA gathers in each use of it
        chosen = largest_in_ranges(x, blocks_of.selected)
        values = encode_values(value_code, x[chosen], counts)
        payload = {"positions": elias_fano.encode(chosen, x.size), **values}

        def decode(payload):
            chosen = elias_fano.decode(payload["positions"], x.size, sum(counts))
            return chosen, decode_values(value_code, payload, counts)

        chosen_by, values_by = each(decode, comm.all_gather_dict(payload, nodes))  # [K, mu] each
        where, where_by = (turns.positions_of(at, blocks, blocks_of, n) for at in (chosen, chosen_by))
        return Step(
            mean=SparseSum(Unordered(where_by, values_by / nodes.count), counts),
            sent=Unordered(where, decode_values(value_code, values, counts)),
            shared=turns.taken(state.shared, blocks, blocks[chosen_by // turns.BLOCK], blocks_of, nodes.count),
            elements=sum(counts),
        )

    def messages(phase, layers, nodes):
        if not layers:
            return ()
        counts, blocks_of = plan(phase, layers)
        x = jax.ShapeDtypeStruct((sum(counts),), jnp.float32)
        values = jax.eval_shape(lambda x: encode_values(value_code, x, counts), x)
        sizes = {"positions": 4.0 * elias_fano.words(blocks_of.candidates, sum(counts))}
        return to_all(sizes | sizes_of(values), nodes)

    return from_step(
        step,
        memory=memory,
        schedule=schedule,
        messages=messages,
        init=lambda key, layers, nodes: (turns.first(scope(layers)), ()),
        clip_norm=clip_norm,
        takes_filled=True,
    )
