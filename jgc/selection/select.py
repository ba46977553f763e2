"""Names of `jgc.selection.entries` and `jgc.selection.selector` at the place where they were."""

from jgc.selection.entries import (  # noqa: F401
    Sparse,
    SparseSum,
    Unordered,
    added,
    cleared,
    replaced,
    scatter,
    scatter_layers,
)
from jgc.selection.selector import (  # noqa: F401
    check_alpha,
    check_min_values,
    counts_per_layer,
    layer_means,
    layer_starts,
    top_positions,
)
