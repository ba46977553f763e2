"""Top-k with error feedback: each node sends the largest magnitudes of each layer.

    v = r + g;  send v at the k largest |v| of each layer;  r = v - sent

Differs from the paper
  1. "Sparse GD" of the LGC paper cites Strom 2015, whose method sends each value above a fixed
     threshold as +/- the threshold. The LGC paper describes and measures top-k, and so does this
     file.
  2. Positions travel in Elias-Fano code, 12 bits each at 0.1 %, and are counted. The LGC paper
     counts DEFLATE of the positions; a run reports that as `deflate_position_bytes`.
  3. The first `warmup_steps` are uncompressed, like LGC's. `strategy` has the other two starts of
     the LGC paper's Section VI-F: sparse from the first step ("fixed"), its Sparse GD, and DGC's
     ramp ("exponential").
  4. `value_code` can code values in fewer than 32 bits; the error stays in the residual.
     A value that such a code decodes to 0 is not sent: factor masking keeps its velocity.
  5. `selection="chunks"` takes the largest values of every 4,096, for accelerators; see
     `jgc.selection.chunks`.
"""

import dataclasses

from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Selecting, memory_of, schedule_of, selector_of
from jgc.compress.sparse.sparsity import sparse_stages
from jgc.layout.devices import each
from jgc.method.compose import compose_phases
from jgc.method.exchange import Codec, gather
from jgc.selection.entries import Sparse, SparseSum, entries_at, nonzero
from jgc.selection.selector import Selector
from jgc.types import Compressor
from jgc.wire.values import WITH_ZERO, ValueCode, decode_values, encode_values


def selected(selector: Selector, value_code: ValueCode = "float32") -> Codec:
    """The values that a selector chooses: mu values and their positions."""

    def encode_with_sent(key, v, layers):
        counts = selector.counts(layers)
        positions = selector.positions(v, layers)
        coded = encode_values(value_code, entries_at(v, positions), counts)
        sent = Sparse(positions, decode_values(value_code, coded, counts))
        if value_code in WITH_ZERO:  # factor masking must not restart an unsent value's velocity
            sent = nonzero(sent, v.size)
        return {"positions": selector.pack(positions, layers), **coded}, sent

    def decode(payload, layers):
        positions = selector.unpack(payload["positions"], layers)
        return Sparse(positions, decode_values(value_code, payload, selector.counts(layers)))

    def mean(payloads, layers):
        nodes, counts = payloads["values"].shape[0], selector.counts(layers)
        # By a TPU's cycles: 25,000 values of 8 nodes are decoded together, 100,000 values or 256
        # nodes in turn.
        few = nodes * sum(counts) < 2**19
        entries = each(lambda payload: decode(payload, layers), payloads, few)  # [K, mu] each
        return SparseSum(entries._replace(values=entries.values / nodes), counts)

    return Codec(
        "top-k",
        linear=False,
        encode=lambda key, v, layers: encode_with_sent(key, v, layers)[0],
        decode=decode,
        mean=mean,
        elements=lambda layers: sum(selector.counts(layers)),
        encode_with_sent=encode_with_sent,
    )


@dataclasses.dataclass(frozen=True)
class TopK(Selecting):
    """Settings of `topk`."""


def topk(config: TopK | None = None, **overrides) -> Compressor:
    """Top-k with error feedback: mu values and positions of each node's f32[n], gathered by all
    nodes.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [phase.name for phase in topk(alpha=0.01, warmup_steps=100).schedule]
      ['dense', 'top-k']

    Source: Strom 2015; Aji and Heafield 2017; Stich et al. 2018 (Sparsified SGD with memory); LGC
    paper, Section II-B.
    """
    return of_largest(settings_of(TopK, config, overrides))


def of_largest(config: Selecting, clip_norm: float = 0.0) -> Compressor:
    """`topk` with the settings of `topk` or `dgc`, and the `clip_norm` of `from_step`."""
    memory, schedule = memory_of(config), schedule_of(config)

    def codec(share):
        return selected(selector_of(config, share), config.value_code)

    stages = sparse_stages(schedule, config.alpha, codec, gather())
    return compose_phases(stages, memory, schedule, clip_norm)


METHOD = Entry(
    "topk", TopK, topk, "Strom 2015; Stich et al. 2018", lossless={"alpha": 1.0},
    layers=FIRST_DENSE,
    citation=("strom2015scalable", "stich2018sparsified"),
)  # fmt: skip
