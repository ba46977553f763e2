"""A node of several processes (`jax.distributed`, as on a TPU slice): the first speaks for it."""

import pickle
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jgc.rounds.arithmetic import Vector
from jgc.rounds.bucket import Counts
from jgc.rounds.coder import Leaves
from jgc.rounds.context import RoundsError
from jgc.rounds.loop import Rounds
from jgc.rounds.names import check_node
from jgc.rounds.outcome import Outcome
from jgc.types import Compressor, PyTree

T = TypeVar("T")
PATIENCE = 5.0  # seconds between two signs of life: a collective that waits for longer may fail
BLOCK = 16_384  # words: messages of few lengths, because each length is a program


def check_slice(node: str) -> None:
    """Raise ValueError on all processes if they have different names for their node."""
    check_node(node)
    names = np.asarray(multihost_utils.process_allgather(np.uint32(zlib.crc32(node.encode()))))
    if len(set(names.tolist())) > 1:
        raise ValueError(
            f"the processes of one jax.distributed job are one node and need one name, got "
            f"{node!r} in process {jax.process_index()} and a different one in others"
        )


def told(work: Callable[[], T]) -> T:
    """The result of `work` in the first process, or its error, in all processes of this job.

    All call it together; only the first does the work, in a thread, for as long as it takes.
    """
    if jax.process_index() > 0:
        while not _from_first(np.int32(0)):
            pass
        done, value = pickle.loads(_bytes_from_first(b""))
        if not done:
            raise value
        return value
    flying: Future[T] = Future()

    def run() -> None:
        try:
            flying.set_result(work())
        except BaseException as error:
            flying.set_exception(error)

    Thread(target=run, daemon=True).start()  # Ctrl-C does not wait for it
    while not _from_first(np.int32(bool(wait([flying], PATIENCE).done))):
        pass
    _bytes_from_first(_pickled(flying))
    return flying.result()


class _Bucket(NamedTuple):
    """The first process's requests and bytes so far, for the others."""

    counts: Counts


class _Facts(NamedTuple):
    """What the other processes know of the first one's `Rounds`."""

    run: str
    number: int
    coming: int
    last: Outcome | None
    counts: Counts
    theta: Vector  # f32[n], the shared parameters
    start: Vector | None  # f32[n], where local steps go on; None: at theta


class SliceRounds(Rounds):
    """A node of several processes, with the public methods and attributes of `Rounds`.

    All processes call `join`, `exchange` and `leave` together. The first reaches the bucket and
    encodes; the others get its results and raise its errors. After an error in only one process,
    the others wait until `jax.distributed` ends them. Parameters may be sharded over the devices of
    all processes: every process gathers them, whole, to its host.
    """

    def __init__(self, params: PyTree, compressor: Compressor, join: Callable[[PyTree], Rounds]):
        self.leaves, self._like = Leaves(params), params
        self._rounds: Rounds | None = None  # of the first process
        vector = self.leaves.vector(params)

        def joined() -> tuple[_Facts, str, dict[int, int]]:
            self._rounds = first = join(self._here(vector))
            starts = [phase.start for phase in compressor.schedule]
            return _facts(first), first.node, {i: first.payload_bytes(i) for i in starts}

        facts, self._node, self._payloads = told(joined)
        self._know(facts)

    @property
    def params(self) -> PyTree:
        """The shared parameters after the last call, placed like its argument."""
        return self.leaves.tree(self._facts.theta, self._like)

    @property
    def node(self) -> str:
        """This node's name."""
        return self._node

    @property
    def number(self) -> int:
        """The number of closed rounds in the shared parameters."""
        return self._facts.number

    @property
    def run(self) -> str:
        """The run's token, in `run.json`."""
        return self._facts.run

    def payload_bytes(self, number: int) -> int:
        """See `Rounds.payload_bytes`."""
        return self._payloads[max(start for start in self._payloads if start <= number)]

    def exchange(self, params: PyTree, tokens: int) -> tuple[PyTree, Outcome | None]:
        """See `Rounds.exchange`; `tokens` of the whole node, as the first process gives them."""
        vector, self._like = self.leaves.vector(params), params

        def exchanged() -> tuple[_Facts, Outcome | None]:
            assert self._rounds is not None
            start, outcome = self._rounds.exchange(self._here(vector), tokens)
            return _facts(self._rounds, start), outcome

        facts, outcome = told(exchanged)
        self._know(facts)
        start = facts.theta if facts.start is None else facts.start
        return self.leaves.tree(start, self._like), outcome

    def leave(self, params: PyTree = None) -> None:
        """See `Rounds.leave`."""
        vector = None if params is None else self.leaves.vector(params)

        def left() -> _Facts:
            assert self._rounds is not None
            self._rounds.leave(None if vector is None else self._here(vector))
            return _facts(self._rounds)

        self._know(told(left))

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error_type is None:
            self.leave()
        elif self._rounds is not None:  # the other processes may not have this error
            self._rounds.__exit__(error_type, error, trace)

    def _here(self, vector: Vector) -> PyTree:
        """f32[n] as a tree like the parameters, of this process's arrays."""
        forms = zip(self.leaves.dtypes, self.leaves.shapes, strict=True)
        blank = [np.broadcast_to(np.zeros((), dtype), shape) for dtype, shape in forms]
        return self.leaves.tree(vector, jax.tree.unflatten(self.leaves.treedef, blank))

    def _know(self, facts: _Facts) -> None:
        self._facts, self.coming, self.last = facts, facts.coming, facts.last
        self.bucket: Any = _Bucket(facts.counts)


def _facts(rounds: Rounds, start: PyTree = None) -> _Facts:
    """`start`: where local steps go on."""
    shared, ahead = rounds.member.shared, rounds.overlap and start is not None
    return _Facts(
        rounds.run, shared.number, rounds.coming, rounds.last, rounds.bucket.counts, shared.theta,
        rounds.leaves.vector(start) if ahead else None,
    )  # fmt: skip


def _from_first(x: Any) -> Any:
    """An array of the first process, in all."""
    return np.asarray(multihost_utils.broadcast_one_to_all(x))


def _bytes_from_first(data: bytes) -> bytes:
    """Bytes of the first process, in all."""
    count = int(_from_first(np.int32(-(-len(data) // (4 * BLOCK)))))
    words = np.frombuffer(data.ljust(4 * BLOCK * count, b"\0"), np.uint32)
    return _from_first(words).tobytes()


def _pickled(flying: Future) -> bytes:
    """Whether it has a result, and that or its error."""
    error = flying.exception()
    value = (True, flying.result()) if error is None else (False, error)
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:  # an error of a class that does not survive it
        data = pickle.dumps((False, RoundsError(str(error))))
    return data
