"""Needs of a run: memory of a device and bytes on the wire, from shapes.

Neither the data set nor a device of the right kind has to be there. The bytes that a device holds from step to step
follow exactly from shapes; `jgc.lab.plan.memory` estimates the temporaries of its programs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax

from jgc.lab.plan.bucket import messages_of
from jgc.lab.plan.memory import Measure, Measured, Temporary, size_of, temporaries
from jgc.lab.shared.progress import each
from jgc.lab.shared.random_data import evaluated_at_once, random_source
from jgc.loops.fragments import take
from jgc.loops.step_loop import LoopState
from jgc.method.compressor import logical
from jgc.method.messages import added
from jgc.nodes.layouts import make_nodes
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.run.setup import make_parts, model_of
from jgc.training.settings.cli import with_options
from jgc.training.settings.config import Config, check, resolve
from jgc.training.steps.costs import gradient_bytes
from jgc.training.steps.step import Batch, Parts, TrainState, init_state
from jgc.types import Nodes, PyTree, Wire
from jgc.wire.account import Table, logical_bytes

BATCHES = 3  # on the device: the step's, and two prefetched


class PhaseBytes(NamedTuple):
    """Bytes of one step of a phase; with local steps of one round.

    Attributes:
      name: of the phase.
      logical: by role, direction and kind, as in a run's summary.json.
      once: likewise, sent a single time on entering the phase.
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
      held: bytes that a device holds from step to step, by name.
      temporary: bytes on top of these, for each program of a step; the programs run in turn.
      phases: as planned; upper bounds where a method finds its sizes in the run.
      starts: first step of each phase, with local steps first round; None if the method chooses its phases in the run.
      messages: with `bucket`, see `jgc.lab.plan.bucket.messages_of`; else None.
    """

    method: str
    config: Config
    values: int
    dense: float
    per_device: int
    held: dict[str, int]
    temporary: tuple[Temporary, ...]
    phases: tuple[PhaseBytes, ...]
    starts: tuple[int, ...] | None
    messages: tuple[int, ...] | str | None = None

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
    alpha: float | None = None,
    bucket: bool = False,
) -> list[Plan]:
    """The plan of each method.

    Args:
      variants: settings by the method's name.
      workload: a name in `jgc.training.settings.workloads`.
      nodes: K; the workload's if None.
      devices: over which the nodes are spread evenly; as training would on this machine if None.
      measure: which programs to compile, see `jgc.lab.plan.memory`.
      options: words of `train.py`'s command line by the method's name.
      alpha: share of each layer that is selected, for the methods that select; the workload's if None.
      bucket: also plan messages through a bucket.

    Raises:
      UserError: a setting that no run can have, or nodes that do not divide among the devices.
    """
    measured: Measured = {}  # several methods share the programs for gradients and evaluation

    def plan(name: str) -> Plan:
        words = [] if nodes is None else [f"--nodes={nodes}"]
        config = config_of(variants[name], workload, [*words, *(options or {}).get(name, [])], alpha)
        if config.local.every and measure == "step":
            raise UserError("--measure step compiles ordinary steps: with local.every only --measure node or nothing")
        if config.devices_per_node > 1:
            raise UserError("--set devices_per_node: a plan for nodes of several devices needs --target, and --shard")
        with values_of_the_user():
            return plan_of(name, config, layout_of(config.nodes, devices, measure), measure, measured, bucket)

    return [plan(name) for name in variants] if measure == "nothing" else each(list(variants), plan)


def config_of(settings: Any, workload: str, words: list[str], alpha: float | None) -> Config:
    """The resolved config of a run.

    Args:
      settings: the method's.
      workload: a name in `jgc.training.settings.workloads`.
      words: of `train.py`'s command line.
      alpha: share of each layer that is selected, if the method selects; the workload's if None.

    Raises:
      UserError: a setting that no run can have.
    """
    share = [f"--compressor.alpha={alpha}"] if alpha is not None and hasattr(settings, "alpha") else []
    config = with_options(resolve(Config(settings, workload=workload)), [*share, *words])
    check(config)
    return config


def layout_of(count: int, devices: int | None, measure: Measure) -> Nodes:
    """The nodes' layout.

    Raises:
      UserError: the nodes do not divide among the devices, or `measure` needs devices that are not here.
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


def plan_of(
    name: str, config: Config, nodes: Nodes, measure: Measure, measured: Measured, bucket: bool = False
) -> Plan:
    """The plan of one run.

    Args:
      name: of the method, for the tables.
      config: resolved and checked.
      nodes: the layout; without a mesh `nodes.per_device` of them share a device, and the others are not here.
      measure: which programs to compile.
      measured: programs measured for other methods; this method's are added.
      bucket: also plan messages through a bucket.

    Raises:
      ValueError: a setting of the model or the method that is out of range.
    """
    parts, state, batch, evaluated = shapes_of(config, nodes)
    method, count = parts.compressor, nodes.count
    wires = [(phase.name, logical_of(parts, phase.value, state, nodes)) for phase in method.schedule]
    phases = tuple(PhaseBytes(x, logical_bytes(w.logical, count), logical_bytes(w.once, count)) for x, w in wires)
    starts = None if method.next_phase else tuple(phase.start for phase in method.schedule)
    values = sum(x.size for x in jax.tree.leaves(state.params))
    held = bytes_held(state, batch, nodes)
    temporary = temporaries(parts, state, batch, evaluated, measure, measured)
    messages = messages_of(method, state.params) if bucket else None
    return Plan(
        name, config, values, gradient_bytes(state.params), nodes.per_device, held, temporary, phases, starts, messages
    )


def logical_of(parts: Parts, phase: Any, state: TrainState, nodes: Nodes) -> Wire:
    """The messages of a step in a phase; with local steps of a round, one exchange of each fragment."""
    if parts.local is None:
        return logical(parts.compressor, phase, state.params, nodes)
    fragments = [take(state.params, leaves) for leaves in parts.local.leaves(state.params)]
    wires = [logical(parts.local.method(), phase, fragment, nodes) for fragment in fragments]
    return wires[0]._replace(logical=added([w.logical for w in wires]), once=added([w.once for w in wires]))


def shapes_of(config: Config, nodes: Nodes) -> tuple[Parts, TrainState, Batch, PyTree]:
    """The parts of a run, and shapes: its state, a batch of all nodes, and a device's part of an evaluated batch.

    Nothing is computed.
    """
    source = random_source(config, examples=config.nodes)
    model = model_of(config, source)
    parts = make_parts(config, nodes, model, source, jax.random.key(config.seed))
    inputs = source.inputs(config.batch_size // config.nodes)  # zeros: the system never allocates their pages
    whole = parts._replace(nodes=Nodes(nodes.count, nodes.count))  # in any layout the shapes are the same
    if parts.local is not None:
        whole = whole._replace(local=parts.local._replace(nodes=whole.nodes))

    def first(key):
        state = init_state(whole, model.module.init(key, inputs, train=False), key)
        return state._replace(step=(), **{name: () for name in ("phase", "phases") if hasattr(state, name)})

    examples = source.batch(0, 0, config.nodes, config.nodes)  # one example of each node: leading axes [K, 1]
    per_node = config.batch_size // config.nodes
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], per_node, *x.shape[2:]), x.dtype), examples)
    count = -(-evaluated_at_once(config, source) // (nodes.count // nodes.per_device))
    example, *_ = next(iter(source.evaluation(1)))
    evaluated = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), example)
    return parts, jax.eval_shape(first, jax.random.key(config.seed)), batch, evaluated


def bytes_held(state: TrainState, batch: Batch, nodes: Nodes) -> dict[str, int]:
    """Bytes that a device holds from step to step. The gradients are of all its nodes."""
    here = partial(_share, nodes=nodes)
    held = {
        "parameters": size_of(state.params),
        "optimiser": size_of(state.opt_state if isinstance(state, LoopState) else state.outer),
        "statistics and carry": here(state.model_state),
    }
    if not isinstance(state, LoopState):
        held["optimiser, outer"] = held.pop("optimiser") + size_of(state.waiting)
        held["each node's parameters"] = here(state.own)
        held["each node's optimiser"] = here(state.inner)
    compressors = (state.compressor,) if isinstance(state, LoopState) else state.compressor  # one for each fragment
    for part, tree in by_part([compressor.shared for compressor in compressors], "state").items():
        held[f"compressor, shared: {part}"] = size_of(tree)
    for part, tree in by_part([compressor.local for compressor in compressors], "memory").items():
        held[f"compressor, each node's: {part}"] = here(tree)
    held["gradients"] = nodes.per_device * size_of(state.params)
    held["batches, two of them ahead"] = BATCHES * here(batch)
    return {name: size for name, size in held.items() if size}


def _share(tree: PyTree, nodes: Nodes) -> int:
    """Bytes on one device of arrays with a leading axis [K]."""
    return size_of(tree) * nodes.per_device // nodes.count


def by_part(tree: PyTree, nameless: str) -> dict[str, list[Any]]:
    """The arrays of a compressor's state by the method's name for the part, such as residual, or `nameless`.

    Example:
      >>> from jgc.types import Info
      >>> list(by_part((Info(1, 2, 3, 4), 5), "memory"))
      ['residual_norm', 'elements_sent', 'overflow', 'finite', 'memory']
    """
    out: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
        names = [name for name in names if name != "memory"]  # which holds its parts
        out.setdefault(names[0] if names else nameless, []).append(leaf)
    return out
