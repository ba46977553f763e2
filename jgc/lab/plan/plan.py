"""What a run will need, before it is run: memory of a device and bytes on the wire, from shapes alone.

    python -m jgc plan --workload imagenet_resnet50 --nodes 8 --methods dgc,lgc_ps

Neither the data set nor a device of the right kind has to be there. What a device holds from step to step follows from
shapes, exactly; `jgc.lab.plan.memory` says what comes on top while it computes.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax

from jgc.lab.bench.step_time import evaluated_at_once, random_source
from jgc.lab.plan.memory import Measure, Seen, Temporary, size_of, temporaries
from jgc.method.guard import logical
from jgc.nodes import make_nodes
from jgc.training.cli import with_options
from jgc.training.config import Config, check, resolve
from jgc.training.costs import gradient_bytes
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.setup import make_parts, model_of
from jgc.training.step import Batch, Parts, TrainState, init_state
from jgc.types import Nodes, PyTree
from jgc.wire.account import Table, logical_bytes

BATCHES = 3  # on the device: that of the step, and two that are made ahead of it


class PhaseBytes(NamedTuple):
    """What is sent in one step of a phase.

    Attributes:
      name: of the phase.
      logical: by role, direction and kind, as in a run's summary.json.
      once: what is sent a single time, on entering the phase, likewise.
    """

    name: str
    logical: Table
    once: Table


class Plan(NamedTuple):
    """One method's run.

    Attributes:
      method: its name.
      config: resolved.
      values: numbers in the model's gradient, n.
      dense: bytes of one node's uncompressed gradient.
      per_device: nodes on each device.
      held: bytes that a device holds from step to step, by what they are.
      temporary: bytes that come on top, one line for each program of a step; they do not run at the same time.
      phases: as planned; upper bounds where a method finds its sizes in the run.
    """

    method: str
    config: Config
    values: int
    dense: float
    per_device: int
    held: dict[str, int]
    temporary: tuple[Temporary, ...]
    phases: tuple[PhaseBytes, ...]

    @property
    def peak(self) -> float:
        """Bytes of a device at most."""
        return sum(self.held.values()) + max(t.bytes for t in self.temporary)


def plans_of(
    variants: dict[str, Any],
    workload: str,
    nodes: int | None = None,
    devices: int | None = None,
    measure: Measure = "node",
    options: dict[str, list[str]] | None = None,
) -> list[Plan]:
    """The plan of every method.

    Args:
      variants: settings by the method's name.
      workload: a name in `jgc.training.workloads`.
      nodes: K; the workload's if None.
      devices: over which the nodes are spread evenly; as training would on this machine if None.
      measure: what to have measured by the compiler, see `jgc.lab.plan.memory`.
      options: words of `train.py`'s command line by the method's name.

    Raises:
      UserError: a setting that no run can have, or nodes that do not divide among the devices.
    """
    seen: Seen = {}  # what is the same for several methods is compiled once
    plans = []
    for name, settings in variants.items():
        words = [*([] if nodes is None else [f"--nodes={nodes}"]), *(options or {}).get(name, [])]
        config = with_options(resolve(Config(settings, workload=workload)), words)
        check(config)
        with values_of_the_user():
            plans.append(plan_of(name, config, layout_of(config.nodes, devices, measure), measure, seen))
    return plans


def layout_of(count: int, devices: int | None, measure: Measure) -> Nodes:
    """Where the nodes are to run.

    Raises:
      UserError: they do not divide among the devices, or those to be compiled for are not the ones that are here.
    """
    if devices is None:
        return make_nodes(count)
    if devices < 1 or count % devices:
        fits = [k for k in range(1, count + 1) if count % k == 0]
        raise UserError(f"--devices must divide the {count} nodes evenly (one of {', '.join(map(str, fits))}), got "
                        f"{devices}")  # fmt: skip
    if measure == "step":
        here = make_nodes(count)
        if here.per_device == count // devices:
            return here
        raise UserError(
            f"--measure step compiles for the devices that are here, on which {here.per_device} of {count} nodes share "
            f"one; with --devices {devices} only --measure node or nothing"
        )
    return Nodes(count, count // devices)


def plan_of(name: str, config: Config, nodes: Nodes, measure: Measure, seen: Seen) -> Plan:
    """The plan of one run.

    Args:
      name: of the method, for the tables.
      config: resolved and checked.
      nodes: the layout; without a mesh `nodes.per_device` of them share a device, and the others are not here.
      measure: what to have measured by the compiler.
      seen: programs measured for another method, added to.

    Raises:
      ValueError: a setting of the model or the method that is out of range.
    """
    parts, state, batch, evaluated = shapes_of(config, nodes)
    compressor = parts.compressor
    wires = [(phase.name, logical(compressor, phase.value, state.params, nodes)) for phase in compressor.schedule]
    phases = tuple(
        PhaseBytes(phase, logical_bytes(wire.logical, nodes.count), logical_bytes(wire.once, nodes.count))
        for phase, wire in wires
    )
    values = sum(x.size for x in jax.tree.leaves(state.params))
    held = bytes_held(state, batch, nodes)
    temporary = temporaries(parts, state, batch, evaluated, measure, seen)
    return Plan(name, config, values, gradient_bytes(state.params), nodes.per_device, held, temporary, phases)


def shapes_of(config: Config, nodes: Nodes) -> tuple[Parts, TrainState, Batch, PyTree]:
    """The parts of a run, and the shapes of its state and of a batch, of all nodes, and of what a device evaluates.

    Nothing is computed.
    """
    source = random_source(dataclasses.replace(config, batch_size=config.nodes))
    model = model_of(config, source)
    parts = make_parts(config, nodes, model, source, jax.random.key(config.seed))
    inputs = source.inputs(config.batch_size // config.nodes)  # zeros, of which no page is ever touched
    whole = parts._replace(nodes=Nodes(nodes.count, nodes.count))  # the same shapes wherever they lie

    def first(key):
        return init_state(whole, model.module.init(key, inputs, train=False), key)

    one = source.batch(0, 0, config.nodes, config.nodes)  # one example of each node: leading axes [K, 1]
    per_node = config.batch_size // config.nodes
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], per_node, *x.shape[2:]), x.dtype), one)
    count = -(-evaluated_at_once(config, source) // (nodes.count // nodes.per_device))
    example, *_ = next(iter(source.evaluation(1)))
    evaluated = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), example)
    return parts, jax.eval_shape(first, jax.random.key(config.seed)), batch, evaluated


def bytes_held(state: TrainState, batch: Batch, nodes: Nodes) -> dict[str, int]:
    """What a device holds from step to step, in bytes. The gradients are those of all its nodes."""
    here = partial(_share, nodes=nodes)
    held = {
        "parameters": size_of(state.params),
        "optimiser": size_of(state.opt_state),
        "statistics and carry": here(state.own),
    }
    for part, tree in by_part(state.compressor.shared, "state").items():
        name = f"compressor, shared: {part}"
        held[name] = size_of(tree)
    for part, tree in by_part(state.compressor.local, "memory").items():
        held[f"compressor, each node's: {part}"] = here(tree)
    held["gradients"] = nodes.per_device * size_of(state.params)
    held["batches, two of them ahead"] = BATCHES * here(batch)
    return {name: size for name, size in held.items() if size}


def _share(tree: PyTree, nodes: Nodes) -> int:
    """Bytes on one device of arrays with a leading axis [K]."""
    return size_of(tree) * nodes.per_device // nodes.count


def by_part(tree: PyTree, nameless: str) -> dict[str, list[Any]]:
    """The arrays of a compressor's state by the name that the method gives the part, such as residual, or `nameless`.

    Example:
      >>> from jgc.types import Info
      >>> list(by_part((Info(1, 2, 3, 4), 5), "memory"))
      ['residual_norm', 'elements_sent', 'overflow', 'finite', 'memory']
    """
    out: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
        names = [name for name in names if name != "memory"]  # which holds parts of its own
        out.setdefault(names[0] if names else nameless, []).append(leaf)
    return out
