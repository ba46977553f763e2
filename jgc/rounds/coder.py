"""A compressor as the coder of a run's messages, by `jgc.encode` and `jgc.decode`.

Shared parameters and differences are vectors f32[n]: the float leaves of the parameters in tree
order. Other leaves, such as counts of steps, are not exchanged.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jgc.checks.misuse import check_arrays, check_compressor, is_key, leaves_by_path
from jgc.method.encode import decode, encode
from jgc.method.phases import phase_at
from jgc.nodes.layouts import make_nodes
from jgc.rounds.arithmetic import Arrays, Vector
from jgc.rounds.shards import Shard, cut, fill, shards_of
from jgc.types import Compressor, PyTree, State

USE = "use topk, qsgd, natural, onebit, cast or dense"


class Leaves:
    """The layout of a tree of parameters in a vector f32[size].

    Example:
      >>> leaves = Leaves({"a": jnp.zeros((2, 2), jnp.bfloat16), "count": jnp.int32(3)})
      >>> leaves.size, leaves.tree(np.arange(4, dtype=np.float32), {"a": 0, "count": 3})["a"].dtype
      (4, dtype(bfloat16))
    """

    def __init__(self, params: PyTree):
        check_arrays(params)
        for name, x in leaves_by_path(params).items():
            if is_key(x):
                raise TypeError(f"the leaf {name!r} of the parameters is a random key; omit it")
        flat, treedef = jax.tree.flatten(params)
        self.treedef: Any = treedef
        self.dtypes = [np.dtype(x.dtype) for x in flat]
        self.floats = [bool(jnp.issubdtype(dtype, jnp.floating)) for dtype in self.dtypes]
        if not any(self.floats):
            raise ValueError("params has no arrays of floats: give the model's parameters")
        self.shapes = [tuple(x.shape) for x in flat]
        # in the vector; leaves that are not exchanged are empty there
        exchanged = zip(self.shapes, self.floats, strict=True)
        self.vector_shapes = [shape if f else (0,) for shape, f in exchanged]
        self.sizes = [int(np.prod(shape)) for shape in self.vector_shapes]
        self.size = sum(self.sizes)

    def vector(self, tree: PyTree) -> Vector:
        """f32[n]: the float leaves of a tree, on the host."""
        flat, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(f"expected a tree like the parameters, {self.treedef}, got {treedef}")
        for i, (x, shape) in enumerate(zip(flat, self.shapes, strict=True)):
            if np.shape(x) != shape:
                name = list(leaves_by_path(tree))[i]
                raise ValueError(f"the parameter {name!r} had the shape {shape}, now {np.shape(x)}")
        pairs = zip(flat, self.floats, strict=True)
        floats = jax.device_get([_on_this_host(x) for x, f in pairs if f])
        return np.concatenate([np.asarray(x, np.float32).reshape(-1) for x in floats])

    def rounded(self, vector: Vector) -> Vector:
        """f32[n] as the parameters can hold it: in bfloat16 they have fewer bits."""
        out = vector.copy()
        parts = np.split(out, np.cumsum(self.sizes)[:-1])  # views
        for part, dtype, is_float in zip(parts, self.dtypes, self.floats, strict=True):
            if is_float and dtype != np.float32:
                part[...] = part.astype(dtype)
        return out

    def tree(self, vector: Vector, like: PyTree) -> PyTree:
        """The inverse, in the parameters' dtypes; leaves without floats come from `like`."""
        flat, parts = jax.tree.leaves(like), np.split(vector, np.cumsum(self.sizes)[:-1])
        for i, (part, is_float) in enumerate(zip(parts, self.floats, strict=True)):
            if is_float:
                flat[i] = _placed(part.reshape(self.shapes[i]).astype(self.dtypes[i]), flat[i])
        return jax.tree.unflatten(self.treedef, flat)


class CompressorCoder:
    """See `jgc.rounds.context.Coder`. A round's phase is the phase of that step.

    Each device encodes its shards of the difference, and a message is the payloads in turn (see
    `shards`). All nodes of a run shard their parameters alike. Raises ValueError: a method that
    needs the other nodes while it encodes, or whose result is no mean.
    """

    def __init__(self, compressor: Compressor, params: PyTree, seed: int):
        check_compressor(compressor)
        self.compressor, self.seed = compressor, seed
        self.leaves = Leaves(params)
        self.size = self.leaves.size
        self.shards = shards_of(jax.tree.leaves(params), self.leaves.floats)
        name = compressor.schedule[-1].name
        if compressor.owns_momentum:
            raise ValueError(
                f"the method with the phase {name!r} has momentum correction, and rounds have "
                f"their momentum outside: {USE}"
            )
        if compressor.next_phase is not None or name == "majority vote":
            raise ValueError(
                f"the method with the phase {name!r} decides together with all nodes: {USE}"
            )
        likes = [self._like(shard) for shard in self.shards]
        parts: dict[Any, Part] = {}  # shards of equal shapes have the same programs
        for like in likes:
            key = str(like)
            parts[key] = parts.get(key) or Part(compressor, like, seed)
        self.parts = [parts[str(like)] for like in likes]
        phases = [phase.value for phase in compressor.schedule]
        try:  # words of each shard's payload, by phase
            self._counts = {phase: [part.count(phase) for part in self.parts] for phase in phases}
        except ValueError as error:
            raise ValueError(f"{error}; for rounds, {USE}") from None
        self.lengths = [sum(self._counts[phase]) for phase in phases]

    @property
    def settings(self) -> dict[str, Any]:
        """The values that nodes compare when they join."""
        schedule = [[x.name, x.start] for x in self.compressor.schedule]
        forms = zip(self.leaves.shapes, self.leaves.dtypes, strict=True)
        shapes = [[shape, dtype.name] for shape, dtype in forms]
        alike = {"phases": schedule, "words": self.lengths, "params": shapes, "seed": self.seed}
        if len(self.shards) > 1:
            alike["shards"] = [shard.pieces for shard in self.shards]
        return alike

    def first(self) -> Arrays:
        return {
            f"{i:03d}/{name}": x
            for i, part in enumerate(self.parts)
            for name, x in part.first.items()
        }

    def compile(self) -> None:
        """Compile the programs of all phases, so that no round waits for them."""
        for phase in self.compressor.schedule:
            fields, _ = self.encode(phase.start, self.first(), np.zeros(self.size, np.float32), 0)
            self.decode(phase.start, fields)

    def encode(
        self, number: int, memory: Arrays, difference: Vector, noise: int
    ) -> tuple[Arrays, Arrays]:
        phase, key = self._phase(number), jax.random.fold_in(jax.random.key(self.seed), noise)
        results = []
        for i, (shard, part) in enumerate(zip(self.shards, self.parts, strict=True)):
            pieces = cut(difference, shard, self.leaves.vector_shapes)
            tree = jax.device_put(jax.tree.unflatten(self.leaves.treedef, pieces), shard.device)
            state = {x[4:]: y for x, y in memory.items() if x.startswith(f"{i:03d}/")}
            key_of_shard = jax.random.fold_in(key, i) if i else key
            # all devices work before the first result is awaited
            results.append(part.encode(phase, key_of_shard, tree, state))
        words = [np.asarray(words) for words, _ in results]
        after = {
            f"{i:03d}/{name}": x
            for i, (part, (_, state)) in enumerate(zip(self.parts, results, strict=True))
            for name, x in part.arrays(jax.tree.leaves(state)).items()
        }
        return {"words": words[0] if len(words) == 1 else np.concatenate(words)}, after

    def decode(self, number: int, fields: Arrays) -> Vector:
        phase, vector = self._phase(number), np.zeros(self.size, np.float32)
        payloads = np.split(fields["words"], np.cumsum(self._counts[phase])[:-1])
        trees = [
            part.decode(phase, jax.device_put(words.astype(np.uint32), shard.device))
            for shard, part, words in zip(self.shards, self.parts, payloads, strict=True)
        ]
        for shard, tree in zip(self.shards, trees, strict=True):
            pieces = iter(jax.tree.leaves(tree))
            new = [None if piece is None else np.asarray(next(pieces)) for piece in shard.pieces]
            fill(vector, shard, self.leaves.vector_shapes, new)
        return vector

    def shapes(self, number: int) -> Mapping[str, Any]:
        count = sum(self._counts[self._phase(number)])
        return {"words": jax.ShapeDtypeStruct((count,), jnp.uint32)}

    def _phase(self, number: int) -> Any:
        return phase_at(self.compressor.schedule, number).value

    def _like(self, shard: Shard) -> PyTree:
        """The shapes of a shard's pieces; None where a leaf has no piece."""
        shapes = (None if x is None else [stop - start for start, stop in x] for x in shard.pieces)
        likes = [None if x is None else jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
        return jax.tree.unflatten(self.leaves.treedef, likes)


class Part:
    """The programs for shards of the shapes `like`, and the memory before the first message."""

    def __init__(self, compressor: Compressor, like: PyTree, seed: int):
        self.compressor, self.like = compressor, like
        self._zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        state = compressor.init(jax.random.key(seed), self._zeros, make_nodes(1, jax.devices()[:1]))
        local = jax.tree.map(lambda x: x[0], state.local)
        flat, self._treedef = jax.tree.flatten(State(state.shared, local))
        self._dtypes = [np.dtype(x.dtype) for x in flat]
        self.first = self.arrays(flat)
        self._encode = jax.jit(self._encoded, static_argnums=0)
        self._decode = jax.jit(self._decoded, static_argnums=0)

    def encode(self, phase: Any, key: Any, tree: PyTree, memory: Arrays) -> Any:
        """The payload u32[m] and the state after it, on the device of the tree."""
        return self._encode(phase, key, tree, self._state(memory))

    def decode(self, phase: Any, words: Any) -> PyTree:
        """The decoded payload."""
        return self._decode(phase, words)

    def count(self, phase: Any) -> int:
        """m, the words of a payload."""
        args = jax.random.key(0), self._zeros, self._state(self.first)
        return self._encode.eval_shape(phase, *args)[0].shape[0]

    def arrays(self, leaves: list[Any]) -> Arrays:
        """A state's leaves for the node's disk, which has no bfloat16: by their bits."""
        arrays = [np.asarray(x) for x in leaves]
        bits = [x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for x in arrays]
        return {f"{i:03d}": x for i, x in enumerate(bits)}

    def _state(self, arrays: Arrays) -> State:
        pairs = zip((arrays[name] for name in sorted(arrays)), self._dtypes, strict=True)
        leaves = [jnp.asarray(x.view(d) if x.dtype != d else x) for x, d in pairs]
        return jax.tree.unflatten(self._treedef, leaves)

    def _encoded(self, phase: Any, key: Any, tree: PyTree, state: State) -> Any:
        # the host has checked that the difference is usable
        words, after, _ = encode(self.compressor, phase, key, tree, state, node=0, count=1)
        return words, after

    def _decoded(self, phase: Any, words: Any) -> PyTree:
        return decode(self.compressor, phase, [words], self.like)


def _on_this_host(x: Any) -> Any:
    """An array that this process has whole; all processes of a slice call it together."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return x


def _placed(x: np.ndarray, old: Any) -> Any:
    """An array placed like an older one: sharded over devices, or on JAX's default device."""
    sharding = getattr(old, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return jnp.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
