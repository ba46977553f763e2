"""Every collective of jgc. Nothing else calls `lax.psum`, `lax.all_gather`, `lax.ppermute` ..."""

from jgc.comm.axis import (
    OutsideNodeAxis,
    node_index,
    node_key,
    on_leaders_device,
    one_by_one,
    vary,
    vary_over,
)
from jgc.comm.collectives import (
    all_gather,
    all_gather_at_once,
    all_gather_dict,
    all_to_all,
    any_true,
    broadcast,
    broadcast_dict,
    exact_mean,
    fast_axes,
    mean_inside,
    pmax,
    pmean,
    psum,
    sum_inside,
)
from jgc.comm.jaxprs import varying_axes
from jgc.comm.ledger import ledger, local_copies
from jgc.comm.ring import (
    mean_by,
    ring_mean,
    ring_mean_of_segments,
    ring_quantized_mean,
    ring_size,
    segments_of,
)
from jgc.comm.rounding import at_least_f32, narrowed, rounded
from jgc.comm.two_shot import two_shot_quantized_mean

__all__ = [
    "OutsideNodeAxis", "all_gather", "all_gather_at_once", "all_gather_dict", "all_to_all",
    "any_true", "at_least_f32", "broadcast", "broadcast_dict", "exact_mean", "fast_axes",
    "ledger", "local_copies", "mean_by", "mean_inside", "narrowed", "node_index", "node_key",
    "on_leaders_device", "one_by_one", "pmax", "pmean", "psum", "ring_mean",
    "ring_mean_of_segments", "ring_quantized_mean", "ring_size", "rounded", "segments_of",
    "sum_inside", "two_shot_quantized_mean", "vary", "vary_over", "varying_axes",
]  # fmt: skip
