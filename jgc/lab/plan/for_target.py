"""A plan for a target: the methods and parameters that the command line asks for, compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jgc import compress
from jgc.lab.plan.needs import config_of, shapes_of
from jgc.lab.plan.programs import Program, Row, rows_of
from jgc.lab.plan.shapes import divided, number, transformer
from jgc.lab.plan.target_page import DENSE, TargetPlan
from jgc.lab.plan.targets import Target
from jgc.lab.shared.choices import registered_name
from jgc.training.errors import UserError, values_of_the_user
from jgc.types import Compressor, Nodes, PyTree

OF_NODES = ("--layers.shard", "--devices-per-node")  # options of train.py that --shard takes the place of
DECIDED = ("--nodes", "--batch-size", "--local.")  # a target has nodes, and a plan for it is of one exchange
OF_MODELS = ("--layers.", "--model.")  # those that do nothing for a transformer of --params


class Asked(NamedTuple):
    """The options of the command line.

    Attributes:
      variants: settings by the method's name.
      options: words of `train.py`'s command line by the method's name.
      workload: whose model, and whose settings of methods.
      params: a transformer with that number of parameters, such as "25M", instead of the workload's model; or "".
      alpha: share of each layer that is selected; None for the workload's.
      shard: whether parameters are sharded within a node.
      last: only the last phase of every method.
      traced: compile nothing.
    """

    variants: dict[str, Any]
    options: dict[str, list[str]]
    workload: str
    params: str = ""
    alpha: float | None = None
    shard: bool = False
    last: bool = False
    traced: bool = False


def plan_for(
    target: Target, asked: Asked, gbits: float, told: Callable[[str], None], known: dict[str, Program],
    compiled: Callable[[TargetPlan], None],
) -> TargetPlan:  # fmt: skip
    """Compile the phases of the methods for a target, the dense step's first.

    Args:
      target: the devices.
      asked: what to compile.
      gbits: Gbit/s of the slow link; 0 if not given.
      told: called with a line after each program.
      known: programs that need not be compiled, by key.
      compiled: called with the plan so far after each program that was compiled.

    Raises:
      UserError: a setting that no run can have, or parameters that cannot be sharded.
    """
    nodes = target.nodes()
    with values_of_the_user():
        methods, shapes = methods_of(asked, nodes)
    whole = jax.tree.leaves(shapes)
    if asked.shard:
        shapes = divided(shapes, nodes)
    model = f"a transformer of {asked.params}" if asked.params else asked.workload
    empty = TargetPlan(target, model, asked.shard, sum(x.size for x in whole), len(whole), (), gbits)

    def plan_of(rows: list[Row]) -> TargetPlan:
        return empty._replace(rows=tuple(rows))

    rows = rows_of(methods, shapes, target, told, last=asked.last, traced=asked.traced, known=known,
                   compiled=lambda rows: compiled(plan_of(rows)))  # fmt: skip
    return plan_of(rows)


def methods_of(asked: Asked, nodes: Nodes) -> tuple[dict[str, Compressor], PyTree]:
    """The compressors, dense first, and the shapes of the parameters.

    Raises:
      UserError: an option of `train.py` that a target decides.
    """
    methods: dict[str, Compressor] = {DENSE: compress.dense()}
    shapes: PyTree = transformer(number(asked.params)) if asked.params else None
    for name, settings in asked.variants.items():
        if any(word.split("=")[0] in OF_NODES for word in asked.options[name]):
            raise UserError("a target has its devices: instead of --set layers.shard and devices_per_node give "
                            "--shard, which shards the parameters over the devices of a host or slice")  # fmt: skip
        idle = (*DECIDED, *(OF_MODELS if asked.params else ()))
        if word := next((word for word in asked.options[name] if word.startswith(idle)), None):
            other = "--target" if word.startswith(DECIDED) else "--params"
            raise UserError(f"--set {word.split('=')[0].lstrip('-')} does nothing with {other}")
        # the batch of a config only has to fit its nodes: nothing but the model and the methods is used
        words = [f"--nodes={nodes.count}", f"--batch-size={nodes.count}", *asked.options[name]]
        config = config_of(settings, asked.workload, words, asked.alpha)
        method = DENSE if registered_name(name) == DENSE else name
        if asked.params:
            methods[method] = compress.build(config.compressor)  # all layers alike
        else:
            parts, state, *_ = shapes_of(config, Nodes(nodes.count, nodes.count))
            methods[method], shapes = parts.compressor, state.params
    return methods, shapes
