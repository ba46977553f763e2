"""Top-k at learned positions: nodes agree on where to search, from all that was sent before.

    b     blocks of 8 values that are due, the same on all nodes (`jgc.selection.due_blocks`)
    x     v at the values of these blocks, one after the other
    send  the largest |x| of each layer, with their positions in x
    r     v - sent

The number of values per layer, the memory, the value code and the phases are `topk`'s. But a value
is sent only when its block is due; until then it stays in the residual. Positions in x take few
bits whatever n is: in Elias-Fano code log2(candidates) + 2, where candidates is the number of
values in x for each value sent.

Source: ours. Measured on docs/results/learned_positions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Sparsifying, memory_of, schedule_of
from jgc.compress.sparse.sparsity import shares_of
from jgc.layout.devices import cut, each
from jgc.layout.pack import values_of
from jgc.method.from_step import Step, dense_step, from_step
from jgc.method.messages import sizes_of, to_all
from jgc.selection import due_blocks
from jgc.selection.entries import Sparse, SparseSum, Unordered, nonzero
from jgc.selection.selector import make_selector
from jgc.selection.top_k import largest_in_ranges
from jgc.types import Compressor
from jgc.wire import elias_fano
from jgc.wire.values import ValueCode, decode_values, encode_values


@dataclasses.dataclass(frozen=True)
class LearnedTopK(Sparsifying):
    """Settings of `learned_topk`."""

    value_code: ValueCode = "float32"
    """code of the values sent; the error of a shorter code stays in the residual"""
    candidates: int = 64
    """values searched for each value sent, at least 2"""


def learned_topk(config: LearnedTopK | None = None, **overrides) -> Compressor:
    """Top-k among the values that all nodes search in a step, gathered by all nodes.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [phase.name for phase in learned_topk(value_code="1bit", warmup_steps=100).schedule]
      ['dense', 'top-k']
    """
    config = settings_of(LearnedTopK, config, overrides)
    if config.candidates < 2:
        raise ValueError("candidates must be at least 2 (values searched for each value sent), got "
                         f"{config.candidates}")  # fmt: skip
    memory, schedule = memory_of(config), schedule_of(config)
    shares = shares_of(schedule, config.alpha)
    selectors = {phase: make_selector(share, config.min_values) for phase, share in shares.items()}

    def blocks_in(phase, layers):
        counts = selectors[phase].counts(layers)
        return counts, due_blocks.cut_in_blocks(layers, counts, config.candidates)

    def step(phase, key, v, state, layers, nodes):
        n = values_of(layers)
        if phase not in selectors or not n:
            return dense_step(cut(v, n), state, nodes)
        counts, plan = blocks_in(phase, layers)
        b = due_blocks.due(state.shared, plan)
        x = due_blocks.candidates_of(v, b, plan)
        chosen = largest_in_ranges(x, plan.selected)  # positions in x, i32[mu]
        values = encode_values(config.value_code, x[chosen], counts)
        payload = {"positions": elias_fano.encode(chosen, x.size), **values}

        def decode(payload):
            chosen = elias_fano.decode(payload["positions"], x.size, sum(counts))
            return chosen, decode_values(config.value_code, payload, counts)

        chosen_by, values_by = each(decode, comm.all_gather_dict(payload, nodes))  # [K, mu] each
        positions, positions_by = (
            due_blocks.positions_of(at, b, plan, n) for at in (chosen, chosen_by))
        sent = Sparse(positions, decode_values(config.value_code, values, counts))
        sent_blocks = b[chosen_by // due_blocks.BLOCK]
        return Step(
            mean=SparseSum(Unordered(positions_by, values_by / nodes.count), counts),
            sent=nonzero(sent, v.size),
            shared=due_blocks.after(state.shared, b, sent_blocks, plan, nodes.count),
            elements=sum(counts))

    def messages(phase, layers, nodes):
        if not layers:
            return ()
        counts, plan = blocks_in(phase, layers)
        x = jax.ShapeDtypeStruct((sum(counts),), jnp.float32)
        values = jax.eval_shape(lambda x: encode_values(config.value_code, x, counts), x)
        sizes = {"positions": 4.0 * elias_fano.words(plan.candidates, sum(counts))}
        return to_all(sizes | sizes_of(values), nodes)

    return from_step(
        step, memory=memory, schedule=schedule, messages=messages, takes_filled=True,
        init=lambda key, layers, nodes: (due_blocks.first(layers), ()))


METHOD = Entry("learned_topk", LearnedTopK, learned_topk, "ours", lossless={"alpha": 1.0},
               layers=FIRST_DENSE)  # fmt: skip
