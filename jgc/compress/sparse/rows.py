"""Top-k in two stages for embeddings: first the largest rows, then the largest values in them.

A batch of T words changes at most T of an embedding's V rows [D]. Top-k of all values then has two costs that two
stages save. If the share alpha is more than these rows hold, the rest of it is spent on zeros, in every step. And each
position is coded as one of V D (12 bits at 0.1 %), though nearly all lie in a few rows. Here a row costs about
log2(V / R) + 2 bits once, and a position among the R chosen rows log2(R D / k) + 2 bits; none if all their values are
sent. Error feedback keeps the other rows.

Source: to send the rows of embeddings that a batch touches is usual (TensorFlow's IndexedSlices, PyTorch's sparse
gradients; Kim et al. 2019, "Parallax", EuroSys). To select values within them is ours.
"""

import jax
import jax.numpy as jnp

from jgc.layout.pack import Layer, values_of
from jgc.layout.rows import Cut, cut, largest_rows, lengthen, shorten
from jgc.layout.select import Sparse, SparseSum, check_alpha, check_min_values, top_positions
from jgc.method.compose import Codec, Payload
from jgc.types import Array, Key
from jgc.wire import elias_fano
from jgc.wire.values import ValueCode, check_value_code, decode_values, encode_values

Layers = tuple[Layer, ...]


def check_rows(rows: int) -> None:
    """Raise ValueError unless rows is at least 0."""
    if rows < 0:
        raise ValueError(f"rows must be at least 0 (0: select among all values of a layer), got {rows}")


def row_top_k(alpha: float, rows: int, min_values: int = 1, value_code: ValueCode = "float32") -> Codec:
    """The share alpha of each layer, at least `min_values`, but only from its `rows` largest rows.

    A layer sends no more values than these rows hold. Layers without as many rows are taken whole.
    """
    check_alpha(alpha)
    check_rows(rows)
    check_min_values(min_values)
    check_value_code(value_code)

    def plan_of(layers: Layers) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
        """The layers, and how many values each sends."""
        plan = cut(layers, rows)
        wanted = [max(min_values, round(alpha * layer.size)) for layer in layers]
        return plan, tuple(min(one.short.size, k) for one, k in zip(plan, wanted, strict=True))

    def row_count(plan: tuple[Cut, ...]) -> int:
        return sum(one.rows.size for one in plan if one.rows)

    def encode(key: Key, v: Array, layers: Layers) -> Payload:
        plan, counts = plan_of(layers)
        chosen = largest_rows(v, plan)
        x, short = shorten(v, chosen, plan), tuple(one.short for one in plan)
        positions = top_positions(x, short, counts)
        where = [elias_fano.encode(chosen, row_count(plan))]
        if sum(counts) < x.size:  # if not, all values of the short vector are sent, in order
            where.append(elias_fano.encode(positions, x.size))
        return {"positions": jnp.concatenate(where), **encode_values(value_code, x[positions], counts)}

    def decode(payload: Payload, layers: Layers) -> Sparse:
        plan, counts = plan_of(layers)
        size, mu, r = values_of([one.short for one in plan]), sum(counts), sum(one.rows.k for one in plan if one.rows)
        of_rows, of_values = jnp.split(payload["positions"], [elias_fano.words(row_count(plan), r)])
        chosen = elias_fano.decode(of_rows, row_count(plan), r)
        positions = elias_fano.decode(of_values, size, mu) if mu < size else jnp.arange(mu, dtype=jnp.int32)
        return Sparse(lengthen(positions, chosen, plan, counts), decode_values(value_code, payload, counts))

    def mean(payloads: Payload, layers: Layers) -> SparseSum:
        nodes = payloads["values"].shape[0]
        everyone = jax.vmap(lambda payload: decode(payload, layers))(payloads)  # positions, values: [K, mu]
        return SparseSum(everyone._replace(values=everyone.values / nodes), plan_of(layers)[1])

    return Codec("top-k of rows", False, encode, decode, mean, lambda layers: sum(plan_of(layers)[1]))
