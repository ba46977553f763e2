"""Sizes of codes for sorted positions (which k of n values are sent), and the entropy bound.

n: values in the vector; k: positions sent; p: i64[k], strictly increasing, 0 <= p < n. Bits per position at
k/n = 0.1 % (n = 2.4M, random positions): entropy bound 11.4, Elias-Fano 12.0, DEFLATE of int32 positions 25, int32
itself 32. Only Elias-Fano has a size that is known before the positions are, so only it can be packed inside jit.
DEFLATE sizes are computed on the host, to compare with papers.

    elias_fano_bits(n=2_400_000, k=2_400) / 8      # bytes of a message that carries 2,400 positions
"""

import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.integer] | Sequence[int]


def entropy_bound_bits(n: int, k: int) -> float:
    """log2 C(n, k), in bits: no code does better on average over all k-subsets of n positions.

    Computed by lgamma; rounding stays below 1e-4 bits up to n = 2^31. Raises ValueError unless 0 <= k <= n.
    Example: `entropy_bound_bits(8, 1) == 3`, up to rounding.
    """
    _check(n, k)
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def elias_fano_bits(n: int, k: int) -> int:
    """Size in bits of the Elias-Fano code of k sorted positions out of n. It depends only on n and k.

    With l = floor(log2(n/k)): k*l bits for the low l bits of each position; then, for each of the ceil(n/2^l)
    possible high parts, a one per position with that high part, and a zero.
    At most 2 bits a position (plus one bit) above the entropy bound. Raises ValueError unless 0 <= k <= n.
    Example: `elias_fano_bits(1024, 8) == 8 * 7 + 8 + 8`.
    Source: Elias, Efficient storage and retrieval by content and address of static files, J. ACM 21(2), 1974.
    """
    _check(n, k)
    if k == 0:
        return 0
    low = (n // k).bit_length() - 1  # floor(log2(n/k)) without rounding
    return k * low + k + -(-n >> low)


def deflate_bytes(positions: Positions, n: int) -> int:
    """Bytes of the positions as int32, little-endian, absolute, after raw DEFLATE at level 9.

    The most direct reading of "indices compressed with DEFLATE" in a paper; LGC counts its positions in this way.
    Raw: without the 6 bytes of zlib's header and checksum. Raises ValueError unless p is strictly increasing
    in [0, n) and n <= 2^31. Example: `deflate_bytes([3, 17, 40], n=64)`. Source: RFC 1951.
    """
    if n > 2**31:
        raise ValueError(f"`n` must be at most 2**31 for int32 positions, got {n}")
    return _deflate(_checked(positions, n).astype("<i4"))


def _check(n: int, k: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"`k` positions out of `n` need 0 <= k <= n, got k={k}, n={n}")


def _checked(positions: Positions, n: int) -> npt.NDArray[np.int64]:
    p = np.asarray(positions)
    if p.ndim != 1 or (p.size and not np.issubdtype(p.dtype, np.integer)):
        raise ValueError(f"`positions` must be integers in one dimension, got {p.dtype}{list(p.shape)}")
    p = p.astype(np.int64)
    if p.size and (p[0] < 0 or p[-1] >= n or np.any(np.diff(p) <= 0)):
        raise ValueError(f"`positions` must be strictly increasing in [0, {n}), got {p[:3]}...{p[-3:]}")
    return p


def _deflate(codes: npt.NDArray[np.integer]) -> int:
    packer = zlib.compressobj(level=9, wbits=-15)  # negative: raw, no header
    return len(packer.compress(codes.tobytes()) + packer.flush())
