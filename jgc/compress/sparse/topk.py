"""Top-k with error feedback: each node sends the largest magnitudes of each layer; the residual keeps the rest.

Differs from the paper
  1. "Sparse GD" of the LGC paper cites Strom 2015, whose method sends each value above a fixed threshold as +/- the
     threshold. The LGC paper describes and measures top-k selection, and so this file implements top-k.
  2. Positions travel in Elias-Fano code, 12 bits each at 0.1 %, and are counted. The LGC paper counts DEFLATE of the
     positions; a run reports that as `deflate_position_bytes`.
  3. The first `warmup_steps` are uncompressed, as LGC's are. `strategy` has the other two starts of the LGC paper's
     Section VI-F: sparse from the first step ("fixed"), as it has Sparse GD, and DGC's ramp ("exponential").
  4. `value_code` can write values in fewer than 32 bits; the error stays in the residual.
  5. `rows` selects in two stages, for embeddings; see `jgc.compress.sparse.rows`.
  6. `selection="chunks"` takes the largest values of every 4,096, for accelerators; see `jgc.selection.chunks`.
  7. `positions="learned"` searches a part of the values in each step, learned from earlier ones, so that positions
     take 8 bits; see `jgc.compress.sparse.learned`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from jgc.compress.registry import FIRST_DENSE, Method, settings_of
from jgc.compress.settings import CANDIDATES, Selecting, SelectingRows, memory_of, schedule_of, selector_of
from jgc.compress.sparse.learned import check_candidates, learned_positions
from jgc.compress.sparse.rows import check_rows, row_top_k
from jgc.compress.sparse.sparsity import sparse_stages
from jgc.layout.opaque import each
from jgc.layout.pack import make_packing
from jgc.method.compose import Codec, compose_phases
from jgc.method.compressor import compressor_of
from jgc.method.exchange import gather
from jgc.method.from_step import Layers
from jgc.selection.rows import check_cut
from jgc.selection.select import Sparse, SparseSum
from jgc.selection.selector import Selector, make_selector
from jgc.selection.threshold import entries_at
from jgc.types import Compressor
from jgc.wire.values import ValueCode, check_value_code, decode_values, encode_values


@dataclasses.dataclass(frozen=True)
class TopK(SelectingRows):
    """Settings of `topk`."""


def top_k(alpha: float, min_values: int = 1, value_code: ValueCode = "float32") -> Codec:
    """The share alpha of each layer, at least `min_values`: mu values and their positions."""
    return selected(make_selector(alpha, min_values), value_code)


def selected(selector: Selector, value_code: ValueCode = "float32") -> Codec:
    """The values that a selector chooses: mu values and their positions."""
    check_value_code(value_code)
    counts_of = selector.counts

    def encode_with_sent(key, v, layers):
        counts = counts_of(layers)
        positions = selector.positions(v, layers)
        coded = encode_values(value_code, entries_at(v, positions), counts)
        sent = Sparse(positions, decode_values(value_code, coded, counts))
        return {"positions": selector.pack(positions, layers), **coded}, sent

    def decode(payload, layers):
        counts = counts_of(layers)
        positions = selector.unpack(payload["positions"], layers)
        return Sparse(positions, decode_values(value_code, payload, counts))

    def mean(payloads, layers):
        nodes = payloads["values"].shape[0]
        # By a TPU's cycles: 25,000 values of 8 nodes are decoded at once, 100,000 values or 256 nodes in turn.
        few = nodes * sum(counts_of(layers)) < 2**19
        everyone = each(lambda payload: decode(payload, layers), payloads, few)  # positions, values: [K, mu]
        return SparseSum(everyone._replace(values=everyone.values / nodes), counts_of(layers))

    def encode(key, v, layers):
        return encode_with_sent(key, v, layers)[0]

    def elements(layers):
        return sum(counts_of(layers))

    return Codec("top-k", False, encode, decode, mean, elements, encode_with_sent=encode_with_sent)


def codec_of(config: SelectingRows) -> Callable[[float], Codec]:
    """The codec of a share alpha, with the settings' other choices.

    Raises:
      ValueError: negative `rows`, or `rows` with selection="chunks".
    """
    check_rows(config.rows)
    if not config.rows:
        return lambda share: selected(selector_of(config, share, config.min_values), config.value_code)
    selector_of(config, config.alpha, config.min_values)  # raises for settings that do not fit together
    if config.selection != "layer":
        raise ValueError(f"rows={config.rows} needs selection='layer', got {config.selection!r}: it selects rows first")
    return partial(row_top_k, rows=config.rows, min_values=config.min_values, value_code=config.value_code)


def topk(config: TopK | None = None, **overrides) -> Compressor:
    """Top-k sparsification with error feedback, gathered by all nodes.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: alpha outside (0, 1], a memory that does not fit (see `jgc.compress.settings.memory_of`), negative
        `warmup_steps` or `rows`, an unknown strategy, `positions` or value_code, learned positions with rows or
        chunks, a selection that does not fit (see `make_selector`), fewer than 2 candidates, or candidates without
        positions="learned"; in `init`, no layer has more than `rows` rows.

    Example:
      >>> [phase.name for phase in topk(alpha=0.01, warmup_steps=100).schedule]
      ['dense', 'top-k']

    References:
      Strom 2015; Aji and Heafield 2017; Stich et al. 2018 (Sparsified SGD with memory); LGC paper, Section II-B.
    """
    config = settings_of(TopK, config, overrides)
    return sparsified(config, codec_of(config))


def sparsified(
    config: Selecting, codec: Callable[[float], Codec], clip_norm: float = 0.0,
    scope: Callable[[Layers], Layers] = lambda layers: layers,
) -> Compressor:  # fmt: skip
    """The method whose nodes send `codec(share)` in each phase, or as many values at learned positions.

    Args:
      config: its settings.
      codec: of a share of the values.
      clip_norm: see `from_step`.
      scope: what the selection takes for layers.

    Raises:
      ValueError: a setting out of range, or one that does nothing.
    """
    memory, schedule = memory_of(config), schedule_of(config)
    if config.positions not in ("own", "learned"):
        raise ValueError(f"positions must be 'own' or 'learned', got {config.positions!r}")
    check_candidates(config.candidates)
    if config.positions == "own":
        if config.candidates != CANDIDATES:
            raise ValueError(f"candidates={config.candidates} does nothing without positions='learned'")
        stages = sparse_stages(schedule, config.alpha, codec, gather())
        compressor = compose_phases(stages, memory, schedule, clip_norm)
        rows = getattr(config, "rows", 0)
        if not rows:
            return compressor
        # of the whole parameters: a fragment or a device's shards may have no embedding
        return compressor_of(
            compressor.method._replace(check=lambda params: check_cut(make_packing(params).layers, rows))
        )
    for setting, default in (("rows", 0), ("selection", "layer")):
        if (value := getattr(config, setting, default)) != default:
            raise ValueError(f"{setting}={value!r} needs positions='own': learned positions select in another way")
    return learned_positions(
        lambda share: selector_of(config, share, config.min_values), config.candidates, config.value_code,
        memory, schedule, config.alpha, clip_norm, scope,
    )  # fmt: skip


STROM = """@inproceedings{strom2015scalable,
  title = {Scalable Distributed {DNN} Training Using Commodity {GPU} Cloud Computing},
  author = {Strom, Nikko},
  booktitle = {Interspeech},
  year = {2015},
}"""
STICH = """@inproceedings{stich2018sparsified,
  title = {Sparsified {SGD} with Memory},
  author = {Stich, Sebastian U. and Cordonnier, Jean-Baptiste and Jaggi, Martin},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2018},
}"""

METHOD = Method(
    "topk", TopK, topk, "Strom 2015; Stich et al. 2018", lossless={"alpha": 1.0}, layers=FIRST_DENSE,
    citation=f"{STROM}\n{STICH}",
)  # fmt: skip
