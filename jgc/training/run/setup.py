"""Build a run's parts from its config: nodes, data, model, compressor, optimiser, first state."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgc import compress
from jgc.compress.registry import FIRST, LAST
from jgc.compress.settings import ErrorFeedback
from jgc.loops.local_steps import local_steps
from jgc.loops.outer import Parts as LocalParts
from jgc.nodes.layouts import make_nodes
from jgc.training.data import MissingDataError, Scenes, Source, Streamed, Text, load_dataset, shrunk, source_of
from jgc.training.errors import UserError
from jgc.training.models import Model, make_model
from jgc.training.settings.config import Config, method_name
from jgc.training.settings.workloads import workload_named
from jgc.training.steps.costs import PhaseCost
from jgc.training.steps.local_costs import costs_of
from jgc.training.steps.optimizer import make_inner, make_optimizer, make_outer, make_schedule
from jgc.training.steps.step import Parts, TrainState, init_state, make_steps, model_state_of
from jgc.types import Compressor, Key, Nodes, PyTree

OF_SOME_DATA: dict[str, tuple[Any, str]] = {  # settings of some types of data, and a name of these for messages
    "window": (Text, "texts"),
    "crop": ((Streamed, Scenes), "images that are cropped at random sizes while training"),
    "threads": (Streamed, "images that are decoded while training"),
    "shrink": (Scenes, "images with a label per pixel"),
}
MEMORY = tuple(field.name for field in dataclasses.fields(ErrorFeedback))  # settings of a method's memory


class Setup(NamedTuple):
    """A run before its first step."""

    parts: Parts  # of the step functions
    source: Source  # the data
    step: Any  # the step function, of `jgc.make_step` or `jgc.local_steps`
    state: TrainState  # the first train state
    costs: tuple[PhaseCost, ...]  # of every phase of the schedule
    values: int  # n, the number of values in the gradient


def build(config: Config, source: Source | None = None) -> Setup:
    """Build a run, with data that is given or the config's."""
    try:
        nodes = make_nodes(config.nodes, devices_per_node=config.devices_per_node)
        source = source or data_of(config)
        source.epoch_steps(config.batch_size)
        model = model_of(config, source)
        init_key, compressor_key, step_key = jax.random.split(jax.random.key(config.seed), 3)
        parts = make_parts(config, nodes, model, source, step_key)
        variables = init_model(model, init_key, source.inputs(config.batch_size // config.nodes))
        check_devices(config, source, carries="carry" in variables)
        step = make_steps(parts, bool(model_state_of(variables)))
        state = init_state(parts, variables, compressor_key, step)
        costs = costs_of(parts, state)
    except (MissingDataError, ValueError) as error:
        raise UserError(str(error)) from error
    values = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(variables["params"]))
    return Setup(parts, source, step, state, costs, values)


def check_devices(config: Config, source: Source, carries: bool) -> None:
    """Raise UserError if devices of a node that hold whole parameters would train a different loss than one device.

    Each device takes the mean over its examples, and the node the mean over its devices.
    """
    if config.devices_per_node == 1 or config.layers.shard or not (carries or source.void):
        return
    why = f"{config.data.name} has pixels without a label, and each device would take the mean over its labelled pixels"
    if carries:
        why = f"{config.model.name} carries a state from batch to batch, which devices of a node do not divide"
    raise UserError(f"--devices-per-node {config.devices_per_node}: {why}: give --layers.shard, too, or more nodes of "
                    "one device")  # fmt: skip


def make_parts(config: Config, nodes: Nodes, model: Model, source: Source, key: Key) -> Parts:
    """The parts of the step functions; `key` is that of all random choices in steps."""
    compressor = make_compressor(config, model, steps_of_epoch(config, source))
    schedule, local = make_schedule(config), None
    if config.local.every is None:
        optimizer = make_optimizer(config, compressor.owns_momentum)
    else:
        optimizer = make_inner(config)
        local = local_parts(config, optimizer, compressor, nodes)
        if config.rounds.bucket:  # which has the memory of the method and the outer optimiser's
            local = local_steps(optimizer, optax.sgd(1.0), compress.dense(), local.every, nodes).parts
    return Parts(config, nodes, model.module.apply, compressor, optimizer, schedule, key, source.void, local)


def local_parts(
    config: Config, inner: optax.GradientTransformation, compressor: Compressor, nodes: Nodes
) -> LocalParts:
    """Local steps as a config has them."""
    how = config.local
    assert how.every is not None
    if compressor.owns_momentum:
        corrects = hasattr(config.compressor, "momentum_correction")
        raise UserError(
            f"--method {method_name(config.compressor)} keeps a momentum, which with --local.every is the outer "
            f"optimiser's: give {'--compressor.no-momentum-correction' if corrects else 'a different method'}"
        )
    outer = make_outer(config)
    try:
        return local_steps(inner, outer, compressor, how.every, nodes, how.fragments, how.overlap, how.merge).parts
    except ValueError as error:  # it begins with the setting's name
        raise UserError(f"--local.{error}") from error


def data_of(config: Config) -> Source:
    """The data set that a config names."""
    dataset = load_dataset(config.data.name, config.data.dir)
    of_workload = {"window": workload_named(config.workload).window}  # not given by the user: an error of the model
    for name, (kinds, what) in OF_SOME_DATA.items():
        given = getattr(config.data, name) not in (0, of_workload.get(name))
        if given and not isinstance(dataset, kinds):
            raise ValueError(f"--data.{name} is a setting of {what}, not of {config.data.name}")
    if isinstance(dataset, Text):
        dataset = dataset._replace(window=config.data.window or dataset.window)
    if isinstance(dataset, Streamed):
        dataset = dataset._replace(crop=config.data.crop or dataset.crop, threads=config.data.threads)
    if isinstance(dataset, Scenes):
        dataset = shrunk(dataset, config.data.shrink or 1)._replace(crop=config.data.crop or dataset.crop)
    source = source_of(dataset, config.data.validation)
    if (config.schedule == "validation" or config.correction.every) and source.validation is None:
        asked = "--schedule validation" if config.schedule == "validation" else "--correction.every"
        raise ValueError(f"{asked} needs images held out from training: give their share, as in --data.validation 0.1")
    return source


def model_of(config: Config, source: Source) -> Model:
    """The model for a data set."""
    settings: dict[str, Any] = {"norm": config.model.norm, "dtype": jnp.dtype(config.model.dtype)}
    if config.model.classes and config.model.classes < source.classes:
        least = source.classes
        raise ValueError(f"--model.classes must be at least the data set's {least}, got {config.model.classes}")
    if config.model.stem:
        if not config.model.name.startswith("resnet"):
            raise ValueError(f"--model.stem is a setting of ResNets, not of {config.model.name}")
        settings["stem"] = config.model.stem
    if config.model.name.startswith("gpt") and source.kind == "text":
        settings["context"] = source.inputs(1).words.shape[1]  # one position for each token of a window
    model = make_model(config.model.name, config.model.classes or source.classes, **settings)
    if model.kind != source.kind:
        raise ValueError(
            f"--model.name {config.model.name} takes {model.kind}, and --data.name {config.data.name} has {source.kind}"
        )
    return model


def init_model(model: Model, key: Any, inputs: PyTree) -> PyTree:
    """The model's first variables, by Flax collection, for one node's inputs."""
    return jax.jit(lambda key: model.module.init(key, inputs, train=False))(key)


def steps_of_epoch(config: Config, source: Source) -> int:
    """Steps of an epoch, rounded, at least 1."""
    return max(1, round(source.epoch_steps(config.batch_size)))


def with_epoch(settings: Any, epoch: int) -> Any:
    """A method's settings with `measure_every` 0 replaced by the steps of an epoch."""
    once = getattr(settings, "measure_every", None) == 0
    return dataclasses.replace(settings, measure_every=epoch) if once else settings


def make_compressor(config: Config, model: Model, epoch: int = 1) -> Compressor:
    """The method, with the run's momentum if it owns that, and the layers that are sent differently."""
    settings = with_epoch(config.compressor, epoch)
    if hasattr(settings, "momentum"):
        default = next(f.default for f in dataclasses.fields(settings) if f.name == "momentum")
        if settings.momentum not in (default, config.momentum):
            raise UserError(
                f"--compressor.momentum {settings.momentum} contradicts --momentum {config.momentum}: "
                "give only --momentum, it goes to the optimiser or to the compressor's memory"
            )
        owns = getattr(settings, "momentum_correction", True)
        settings = dataclasses.replace(settings, momentum=config.momentum if owns else default)
    return _with_layers(config, model, settings)


def _with_layers(config: Config, model: Model, settings: Any) -> Compressor:
    """The method, combined with top-k and the uncompressed mean for the layers of --layers.

    Patterns are searched for in the paths of stacked parameters' layers, such as blocks/kernel/0.
    """
    layers = config.layers
    for name in ("dense", "stacked"):
        if isinstance(settings, compress.Dense) and (pattern := getattr(layers, name)):
            raise UserError(f"--layers.{name} {pattern} does nothing here: the method dense sends all layers alike")
    if layers.value_code != "float32" and not layers.top_k:
        raise UserError(f"--layers.value-code {layers.value_code} does nothing without --layers.top-k")
    patterns = {FIRST: model.first_layer, LAST: model.last_layer}
    method, rules = compress.build(settings), []
    owned = {"momentum_correction": True, "momentum": config.momentum}
    momentum: dict[str, Any] = owned if method.owns_momentum else {}
    if dense := patterns.get(layers.dense or "", layers.dense):
        rules.append((dense, compress.dense(**momentum)))
    if top_k := patterns.get(layers.top_k or "", layers.top_k):
        names = (*MEMORY, "alpha", "min_values", "warmup_steps", "strategy")
        shared = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
        rules.append((top_k, compress.topk(**shared | momentum, value_code=layers.value_code)))
    method = compress.per_layer(rules, default=method) if rules else method
    return compress.stacked(layers.stacked, method) if layers.stacked else method
