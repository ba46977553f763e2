"""Checks and placement of a step's arguments, for `make_step` and `local_steps`."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jgc.checks.misuse import check_arrays, check_key, is_key
from jgc.checks.states import check_remembered, remember
from jgc.loops.buffers import check_params, copied, device_of, put_arrays
from jgc.loops.frozen import frozen_for
from jgc.loops.model_state import of_all_nodes
from jgc.loops.skipped import make_skip_warning
from jgc.method.phases import phase_after
from jgc.nodes.axis import check_node_axes
from jgc.nodes.placement import BATCH, LOCAL
from jgc.types import Array, Compressor, Key, Nodes, Phase, PyTree, State


class Loop:
    """The host's memory of a loop: its compiled programs, and the states that it has checked.

    `check_state` raises ValueError for a state that does not fit; `steps` names skipped steps.
    """

    def __init__(self, nodes: Nodes, check_state: Callable[[Any], None], steps: str = "steps"):
        self.nodes = nodes
        self.programs: dict[Hashable, Any] = {}  # `jax.jit`, by phase and structure of the arrays
        self.put_frozen = frozen_for(nodes)
        self.warn_of_skips = make_skip_warning(steps)
        self._check_state = check_state
        self._fitting: set[Any] = set()  # structures of states that fit
        self._numbers: dict[Any, list[int]] = {}  # by structure, which leaves are scalars
        self._first: dict[Any, PyTree] = {}  # containers of the states that `init` makes
        self._entered: tuple[Any, ...] = (None, None, None)  # see `enter`

    def putter(self, device: SingleDeviceSharding) -> Callable[..., PyTree]:
        """`put_arrays` for this layout and device."""
        return partial(put_arrays, nodes=self.nodes, device=device)

    def begin(self, key: Key, params: PyTree, model_state: PyTree) -> tuple[Key, PyTree]:
        """Check the arguments of `init`; the key and every node's model state, on the devices."""
        check_key(key)
        check_params(params)
        put = self.putter(device_of(params))
        model_state = put(of_all_nodes(model_state, self.nodes), placements=LOCAL)
        remember(self._first, params, model_state)
        return put(key), model_state

    def enter(
        self, state: Any, method: Compressor, before: Phase, number: int, memory: State
    ) -> tuple[Phase, State]:
        """The phase of exchange `number`, and the compressor's state after the transition to it.

        Each transition runs once: until `leave`, the result for the same loop state is kept.
        """
        if self._entered[0] is not state:
            phase = phase_after(method, before, number, memory, self.nodes)
            if phase.value != before.value:
                new = method.transition(before.value, phase.value, memory, self.nodes)
                memory = self.putter(device_of(state.params))(copied(new, unless_of=memory))
            self._entered = state, phase, memory
        return self._entered[1:]

    def leave(self) -> None:
        """Forget the state of `enter`, whose arrays a program takes."""
        self._entered = None, None, None

    def check_fits(self, state: Any, structure: Any) -> None:
        """Raise ValueError, naming the leaf, unless a state is one that `init` makes."""
        if structure not in self._fitting:
            check_remembered(self._first, state.params, state.model_state)
            self._check_state(state)
            self._fitting.add(structure)

    def numbers(self, tree: PyTree) -> list[Any]:
        """The scalars of an optimiser's state, of one node or of each, which users may set."""
        leaves, structure = jax.tree.flatten(tree)
        if structure not in self._numbers:
            shapes = (), (self.nodes.count,)
            indices = [i for i, x in enumerate(leaves) if jnp.shape(x) in shapes and not is_key(x)]
            self._numbers[structure] = indices
        return [leaves[i] for i in self._numbers[structure]]

    def program(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """The program of a name, which is made once."""
        if name not in self.programs:
            self.programs[name] = make()
        return self.programs[name]

    def place_batch(self, batch: PyTree, put: Callable[..., PyTree]) -> PyTree:
        """The batch on the devices. TypeError or ValueError, with the leaf, without an axis [K]."""
        check_arrays(batch, or_numbers=True)
        check_node_axes(BATCH, batch, self.nodes, "the batch")
        return put(batch, placements=BATCH)


def shape_of(x: Any) -> Any:
    """The shape that a program is compiled for. Arrays that JAX may move have no sharding."""
    if not isinstance(x, Array):
        return x
    weak, sharding = getattr(x, "weak_type", False), x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak, sharding=sharding)


def shardings_of(arrays: PyTree) -> PyTree:
    """Shardings of a program's outputs: if XLA chose them, the second step would recompile."""
    return jax.tree.map(lambda x: x.sharding, arrays)
