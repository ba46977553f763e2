"""A compressor as the coder of a run's messages, by `jgc.encode` and `jgc.decode`.

Shared parameters and differences are vectors f32[n]: the float leaves of the parameters in tree
order. Other leaves, such as counts of steps, are not exchanged.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgc.checks.misuse import check_compressor
from jgc.method.encode import decode, encode
from jgc.method.phases import phase_at
from jgc.nodes.layouts import make_nodes
from jgc.rounds.arithmetic import Arrays, Vector
from jgc.types import Compressor, PyTree, State

USE = "use topk, qsgd, natural, onebit, cast or dense"


class Leaves:
    """How a tree of parameters lies in a vector.

    Attributes:
      like: a tree of shapes, with f32 for every float leaf: what messages are made of.
      size: n.

    Example:
      >>> leaves = Leaves({"a": jnp.zeros((2, 2), jnp.bfloat16), "count": jnp.int32(3)})
      >>> leaves.size, leaves.tree(np.arange(4, dtype=np.float32), {"a": 0, "count": 3})["a"].dtype
      (4, dtype(bfloat16))
    """

    def __init__(self, params: PyTree):
        flat, treedef = jax.tree.flatten(params)
        self.treedef: Any = treedef
        self.dtypes = [np.dtype(x.dtype) for x in flat]
        self.floats = [bool(jnp.issubdtype(dtype, jnp.floating)) for dtype in self.dtypes]
        if not any(self.floats):
            raise ValueError("params has no arrays of floats: give the model's parameters")
        self.shapes = [tuple(x.shape) for x in flat]
        self.sizes = [
            int(np.prod(s)) if f else 0 for s, f in zip(self.shapes, self.floats, strict=True)
        ]
        self.size = sum(self.sizes)
        kinds = zip(self.shapes, self.dtypes, self.floats, strict=True)
        like = [
            jax.ShapeDtypeStruct(shape, jnp.float32 if f else dtype) for shape, dtype, f in kinds
        ]
        self.like = jax.tree.unflatten(self.treedef, like)

    def vector(self, tree: PyTree) -> Vector:
        """f32[n]: the float leaves of a tree, on the host.

        Raises:
          ValueError: another structure, or other shapes, than the parameters have.
        """
        flat, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef or [tuple(np.shape(x)) for x in flat] != self.shapes:
            raise ValueError(f"expected a tree like the parameters, {self.treedef}, got {treedef}")
        chosen = [x for x, is_float in zip(flat, self.floats, strict=True) if is_float]
        return np.concatenate(
            [np.asarray(x, np.float32).reshape(-1) for x in jax.device_get(chosen)]
        )

    def tree(self, vector: Vector, like: PyTree) -> PyTree:
        """The inverse, in the parameters' dtypes; leaves without floats are those of `like`."""
        parts = np.split(vector, np.cumsum(self.sizes)[:-1])
        specs = zip(
            parts, self.shapes, self.dtypes, self.floats, jax.tree.leaves(like), strict=True
        )
        flat = [jnp.asarray(x.reshape(s), d) if f else old for x, s, d, f, old in specs]
        return jax.tree.unflatten(self.treedef, flat)


class CompressorCoder:
    """See `jgc.rounds.context.Coder`. A round's phase is the phase of that step.

    Raises:
      ValueError: a method that needs the other nodes while it encodes, or whose mean is none.
    """

    def __init__(self, compressor: Compressor, params: PyTree, seed: int):
        check_compressor(compressor)
        self.compressor, self.seed = compressor, seed
        self.leaves = Leaves(params)
        self.size = self.leaves.size
        self._zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.leaves.like)
        state = compressor.init(jax.random.key(seed), self._zeros, make_nodes(1, jax.devices()[:1]))
        local = jax.tree.map(lambda x: x[0], state.local)
        flat, self._treedef = jax.tree.flatten(State(state.shared, local))
        self._dtypes = [np.dtype(x.dtype) for x in flat]
        self._first = self._arrays(flat)
        self._programs: dict[Any, tuple[Any, Any]] = {}
        name = compressor.schedule[-1].name
        if compressor.owns_momentum:
            raise ValueError(
                f"the method {name!r} has momentum correction, and rounds have their momentum outside: {USE}"
            )
        if compressor.next_phase is not None or name == "majority vote":
            raise ValueError(f"the method {name!r} decides together with all nodes: {USE}")
        try:
            self.lengths = [self._shape(phase.value).shape[0] for phase in compressor.schedule]
        except ValueError as error:
            raise ValueError(f"{error}; for rounds, {USE}") from None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What nodes compare when they join."""
        schedule = [[x.name, x.start] for x in self.compressor.schedule]
        shapes = [
            [list(s), d.name] for s, d in zip(self.leaves.shapes, self.leaves.dtypes, strict=True)
        ]
        return {"phases": schedule, "words": self.lengths, "params": shapes, "seed": self.seed}

    def first(self) -> Arrays:
        return dict(self._first)

    def compile(self) -> None:
        """Compile the programs of all phases, so that no round waits for that."""
        for phase in self.compressor.schedule:
            fields, _ = self.encode(phase.start, self.first(), np.zeros(self.size, np.float32), 0)
            self.decode(phase.start, fields)

    def encode(
        self, number: int, memory: Arrays, difference: Vector, noise: int
    ) -> tuple[Arrays, Arrays]:
        key = jax.random.fold_in(jax.random.key(self.seed), noise)
        run = self._program(self._phase(number))[0]
        words, state = run(key, self.leaves.tree(difference, self._zeros), self._state(memory))
        return {"words": np.asarray(words)}, self._arrays(jax.tree.leaves(state))

    def decode(self, number: int, fields: Arrays) -> Vector:
        run = self._program(self._phase(number))[1]
        return self.leaves.vector(run(jnp.asarray(fields["words"], jnp.uint32)))

    def shapes(self, number: int) -> Mapping[str, Any]:
        return {"words": self._shape(self._phase(number))}

    def _phase(self, number: int) -> Any:
        return phase_at(self.compressor.schedule, number).value

    def _program(self, phase: Any) -> tuple[Any, Any]:
        """The compiled functions of a phase: encode, and decode of one message."""
        if phase not in self._programs:
            method, like = self.compressor, self.leaves.like
            self._programs[phase] = (
                jax.jit(partial(_encoded, method, phase)),
                jax.jit(lambda words: decode(method, phase, [words], like)),
            )
        return self._programs[phase]

    def _shape(self, phase: Any) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(
            partial(_encoded, self.compressor, phase),
            jax.random.key(0),
            self._zeros,
            self._state(self._first),
        )[0]

    def _arrays(self, leaves: list[Any]) -> Arrays:
        """A state's leaves for the node's disk, which has no bfloat16: by their bits."""
        arrays = [np.asarray(x) for x in leaves]
        bits = [x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for x in arrays]
        return {f"{i:03d}": x for i, x in enumerate(bits)}

    def _state(self, arrays: Arrays) -> State:
        pairs = zip((arrays[name] for name in sorted(arrays)), self._dtypes, strict=True)
        leaves = [jnp.asarray(x.view(d) if x.dtype != d else x) for x, d in pairs]
        return jax.tree.unflatten(self._treedef, leaves)


def _encoded(compressor: Compressor, phase: Any, key: Any, tree: PyTree, state: State) -> Any:
    """The message and the state after it. The difference was found usable on the host."""
    words, after, _ = encode(compressor, phase, key, tree, state, node=0, count=1)
    return words, after
