"""Mean and outer step in one fixed order, so that all nodes hold the same bits.

    mean = (w_1 x_1 + w_2 x_2 + ...) / (w_1 + w_2 + ...)    in the order of the list, w_k: tokens
    theta = outer step with the gradient `mean`

XLA does not promise equal bits on different machines: it fuses a multiplication with an addition
where the processor can, and divides by multiplying. So everything here is elementwise numpy in f32,
each operation rounded once as in IEEE 754. There are no sums over an array and no `np.dot`;
constants are computed from Python's floats by + - * /, not by `pow`.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from jgc.checks.argument_types import fits

LARGEST = np.float32(1e15)  # a message with a larger value is not counted
OVERLAPPED_MOMENTUM = 0.3  # of `Sgd` with overlap, the best of docs/results/rounds
Vector = np.ndarray  # f32[n]
Arrays = dict[str, np.ndarray]


class Shared(NamedTuple):
    """The state that is equal on all nodes."""

    number: int  # of closed rounds
    theta: Vector  # f32[n], the parameters
    outer: Arrays  # the outer optimiser's arrays
    digest: str  # SHA-256 of all that, in hexadecimal


class Outer(Protocol):
    """An outer optimiser; a frozen dataclass, so that nodes can compare its settings."""

    def init(self, n: int) -> Arrays:
        """Its arrays before the first step."""

    def step(self, theta: Vector, mean: Vector, arrays: Arrays) -> tuple[Vector, Arrays]:
        """Theta and the arrays after a step with the gradient `mean`; changes no argument."""


def shared_state(number: int, theta: Vector, outer: Arrays) -> Shared:
    """The shared state with its digest.

    Example:
      >>> shared_state(0, np.zeros(2, np.float32), {}).digest[:16]
      '1e666b3b8518a12d'
    """
    total = hashlib.sha256(f"{number} {sorted(outer)}".encode())
    for x in (theta, *(outer[name] for name in sorted(outer))):
        total.update(np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"), copy=False).data)
    return Shared(number, theta, outer, total.hexdigest())


def usable(x: Vector) -> bool:
    """Whether all values are finite and below 1e15 in magnitude, with the same result on all nodes.

    Example:
      >>> [usable(np.array([1, last], np.float32)) for last in (-1e14, 2e15, np.nan)]
      [True, False, False]
    """
    return not x.size or bool(np.max(np.abs(x)) < LARGEST)  # false for NaN, which np.max propagates


def weighted_mean(vectors: Iterable[tuple[int, Vector]], most: int) -> Vector | None:
    """The mean of (tokens, f32[n]) weighted by tokens / most, in order; None without vectors.

    `most` is the largest number of tokens: equal nodes have the weight 1, as all do if it is 0.

    Example:
      >>> weighted_mean([(3, np.float32([0, 4])), (1, np.float32([4, 8]))], most=3)
      array([1., 5.], dtype=float32)
    """
    total, weights = None, 0.0
    for tokens, x in vectors:
        weight = tokens / most if most else 1.0
        weights += weight
        part = x * np.float32(weight)
        total = part if total is None else np.add(total, part, out=total)
    return total if total is None else total / np.float32(weights)


def stepped(
    outer: Outer, shared: Shared, vectors: Iterable[tuple[int, Vector]], most: int
) -> Shared:
    """The shared state after a round; see `weighted_mean`. Without vectors only the number changes.

    Raises RuntimeError if this thread flushes denormal numbers to zero.
    """
    if not np.float32(1e-40) * np.float32(0.5) > 0:
        raise RuntimeError(
            "this thread rounds denormal numbers to zero (a library built with -ffast-math does "
            "that on import), so this node would diverge from the others: import that library "
            "elsewhere"
        )
    mean = weighted_mean(vectors, most)
    if mean is None:
        return shared_state(shared.number + 1, shared.theta, shared.outer)
    theta, arrays = outer.step(shared.theta, mean, shared.outer)
    return shared_state(shared.number + 1, theta, arrays)


@dataclasses.dataclass(frozen=True)
class Sgd:
    """SGD with momentum: u = m u + g; theta -= rate (g + m u) with Nesterov's, else rate u."""

    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        _check("rate", self.rate, lambda x: 0 < x < float("inf"), "finite and positive")
        _check("momentum", self.momentum, lambda x: 0 <= x < 1, "in [0, 1)")

    def init(self, n: int) -> Arrays:
        return {"momentum": np.zeros(n, np.float32)} if self.momentum else {}

    def step(self, theta: Vector, mean: Vector, arrays: Arrays) -> tuple[Vector, Arrays]:
        rate, m = np.float32(self.rate), np.float32(self.momentum)
        if not self.momentum:
            return theta - rate * mean, {}
        u = mean + m * arrays["momentum"]
        update = mean + m * u if self.nesterov else u
        return theta - rate * update, {"momentum": u}


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with bias correction, as `optax.adamw`."""

    rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("rate", self.rate, lambda x: 0 < x < float("inf"), "finite and positive")
        _check("b1", self.b1, lambda x: 0 <= x < 1, "in [0, 1)")
        _check("b2", self.b2, lambda x: 0 <= x < 1, "in [0, 1)")
        _check("eps", self.eps, lambda x: 0 < x < float("inf"), "finite and positive")
        _check("weight_decay", self.weight_decay, lambda x: 0 <= x < float("inf"), "at least 0")

    def init(self, n: int) -> Arrays:
        zeros = np.zeros(n, np.float32)
        return {"count": np.array(0, np.int32), "mean": zeros, "square": zeros}

    def step(self, theta: Vector, mean: Vector, arrays: Arrays) -> tuple[Vector, Arrays]:
        f = np.float32
        count = int(arrays["count"]) + 1
        m = f(self.b1) * arrays["mean"] + f(1 - self.b1) * mean
        v = f(self.b2) * arrays["square"] + f(1 - self.b2) * (mean * mean)
        unbiased_m, unbiased_v = m / f(1 - power(self.b1, count)), v / f(1 - power(self.b2, count))
        # np.sqrt is rounded correctly, as + - * / are, so it has the same bits everywhere
        update = unbiased_m / (np.sqrt(unbiased_v) + f(self.eps)) + f(self.weight_decay) * theta
        arrays = {"count": np.array(count, np.int32), "mean": m, "square": v}
        return theta - f(self.rate) * update, arrays


def power(x: float, n: int) -> float:
    """x to the n-th by multiplication: the bits of the C library's `pow` differ between systems."""
    result = 1.0
    while n:
        if n & 1:
            result *= x
        x, n = x * x, n >> 1
    return result


def settings_of(outer: Any) -> dict[str, Any]:
    """The name and the settings of an outer optimiser, for `run.json`.

    Raises TypeError: not an outer optimiser, which is a dataclass with `init` and `step`.
    """
    if not (dataclasses.is_dataclass(type(outer)) and hasattr(outer, "step")):
        raise TypeError(
            "outer must be jgc.rounds.Sgd or AdamW, whose steps have the same bits on all "
            f"machines, got {getattr(outer, '__name__', type(outer).__name__)}"
        )
    return {"outer": type(outer).__name__, **dataclasses.asdict(outer)}


def _check(name: str, value: float, is_right: Callable[[float], bool], wanted: str) -> None:
    if not (fits(float, value) and is_right(value)):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
