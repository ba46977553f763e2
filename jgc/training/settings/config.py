"""The configuration of a run: frozen dataclasses, completed by a workload, overridden on the command line.

A value comes from the first of these that sets it: the command line; the config file, if it differs from the default of
the field's class; the workload (`--workload`), by `resolve`; the class's default. A field that a workload may fill in
has an impossible default (-1, "", "workload"), so an explicit value always counts. A compressor's settings have real
defaults: a workload overrides a config file that sets one of them to its default; set it on the command line instead.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
import tyro

from jgc import compress
from jgc.rounds.arithmetic import OVERLAPPED_MOMENTUM
from jgc.training.errors import UserError
from jgc.training.settings.local_config import LocalConfig, check_local
from jgc.training.settings.rounds_config import RoundsConfig, check_rounds
from jgc.training.settings.workloads import DEFAULT, Schedule, Workload, workload_named
from jgc.wire.values import ValueCode

OPEN = -(2**31)  # stands for the workload's value; a -1 that a user gives is refused
MOST_NODES = 4096  # each has gradients in the program; a million never compile
M = TypeVar("M")


@dataclass(frozen=True)
class DataConfig:
    """The data set."""

    name: str = ""
    """data set: digits, cifar10, cifar100, camvid, food101, imagenet, ptb, ptb_characters, tiny_imagenet"""
    dir: Annotated[str | None, tyro.conf.arg(name="data-dir", prefix_name=False)] = None
    """folder of prepared data sets; if not given, TensorFlow Datasets' default: $TFDS_DATA_DIR or
    ~/tensorflow_datasets"""
    window: int = 0
    """of a text: words of each stream in a step, the length of back-propagation; if not given, the workload's"""
    crop: int = 0
    """of images that are cropped at random: pixels on each side of a crop; 0: the data set's size"""
    threads: int = 0
    """of images that are decoded while training: number of decoding threads; 0: one per processor"""
    shrink: int = 0
    """of images with a label per pixel: factor by which all images, test images too, are made smaller; 0: 1"""
    validation: float = 0.0
    """share of the training images held out for a validation loss; ptb and camvid come with validation data"""


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    name: str = ""
    """alexnet, convnet5, resnet18, 20, 32, 50, 101, or vgg11, 13, 14, 16, 19; pspnet18, pspnet18_half, pspnet50; lstm;
    gpt800k, gpt3m, gpt25m, gpt124m"""
    norm: Literal["", "batch", "group", "none"] = ""
    """batch norm with statistics of each node, group norm, or no norm (not in ResNets and PSPNets)"""
    stem: Literal["", "cifar", "imagenet"] = ""
    """of a ResNet: 3x3, or 7x7 with stride 2 and pooling; if not given, that of its depth"""
    classes: int = 0
    """outputs of the head, at least the data set's classes; 0: equal to them. The LGC paper's sizes suggest 1000"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the activations; parameters and gradients stay float32"""


@dataclass(frozen=True)
class LayersConfig:
    """Layers that the compressor does not send. Patterns are regular expressions, searched for in the parameters'
    paths, such as ^head/."""

    dense: str | None = None
    """pattern of layers sent uncompressed, "first" for the model's first layer, "" for none; if not given, the
    workload's or the method's. Models of text have no first layer: the method's "first" then means no layer"""
    top_k: str | None = None
    """pattern of layers sent by plain top-k after the uncompressed steps, "last" for the model's last layer, "" for
    none; if not given, the workload's or the method's"""
    value_code: ValueCode = "float32"
    """value code of the top-k layers; quantisation error goes to the residual"""
    shard: bool = False
    """shard each parameter of two or more dimensions over the devices of its node (FSDP), in its largest dimension
    that divides evenly; each device then compresses its shards. Needs --devices-per-node"""
    stacked: str = ""
    """pattern of parameters [L, ...] that hold L layers, as with jax.lax.scan: each layer is compressed separately"""


@dataclass(frozen=True)
class CorrectionConfig:
    """--schedule validation: how the validation loss lowers the learning rate (EGC, Algorithm 2)."""

    decay: float = 0.1
    """t: the rate falls to the initial rate divided by 1 + t i, where i counts validation losses"""
    patience: int = 1
    """n: it falls after n validation losses in a row that are no better than the best"""
    min_learning_rate: float = 0.0
    """lower bound of the rate"""
    every: int = 0
    """steps between two validation losses, 0: an epoch. Held-out images give them with any schedule"""
    literal: bool = False
    """follow Algorithm 2 to the letter"""


@dataclass(frozen=True)
class RecordConfig:
    """Gradients that a run records in its folder; see jgc/training/output/recording.py."""

    every: int = 0
    """interval of recorded steps, from the first on; 0: none. On --resume only the limit may differ from before"""
    layers: str = ""
    """regular expression that parameter paths such as layer3/conv/kernel must match; all if not given"""
    max_megabytes: float = 1000.0
    """limit of the whole recording; a run that would exceed it does not start"""
    dtype: Literal["float32", "float16"] = "float32"
    """float16 halves the files; each array then has a scale"""
    residuals: bool = False
    """record each node's residuals of these layers too, from before the step"""


@dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a run find each other. docs/distributed.md shows how to start them."""

    coordinator: str = ""
    """HOST:PORT of process 0, with a free port; the same for all processes"""
    num_processes: int = 0
    """number of processes on all hosts together"""
    process_id: int = -1
    """index of this process, from 0"""
    auto: bool = False
    """let JAX detect the three above, under Slurm, Kubernetes, Open MPI and on Cloud TPU"""
    timeout: float = 60.0
    """seconds that a process may be silent, or a step late, before the run ends; must be longer than any step"""
    connect_timeout: float = 120.0
    """seconds in which all processes must connect"""


@dataclass(frozen=True)
class Config(Generic[M]):
    """Settings of a run; the compressor's are fields of its method's dataclass."""

    compressor: M
    workload: str = DEFAULT
    """preset of data set, model, steps, learning rate and phases; see jgc/training/settings/workloads.py"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layers: LayersConfig = field(default_factory=LayersConfig)
    nodes: int = OPEN
    """data-parallel workers; several share a device if there are fewer devices"""
    devices_per_node: int = 1
    """devices of one node: they share its examples, and with --layers.shard the parameters; without it batch norm has
    the statistics of each device's examples"""
    steps: int = OPEN
    """length of the run in updates; does not change the length of schedules"""
    batch_size: int = OPEN
    """examples in a step on all nodes together: images, or streams of text"""
    seed: int = 0
    """of the parameters, the order of the data and all other random choices"""
    local: LocalConfig = field(default_factory=LocalConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    optimizer: Literal["workload", "sgd", "adam", "muon"] = "workload"
    """adam decays weights decoupled from the gradient (AdamW); muon: optax's for kernels, with steps of Adam's size,
    and AdamW for embeddings, the last layer, biases and norms; if not given, the workload's"""
    adam_beta2: float = OPEN
    """of Adam: decay of the mean of squared gradients, in [0, 1)"""
    learning_rate: float = OPEN
    """its highest value"""
    schedule: Schedule = "workload"
    """constant; cosine, down to 1 %; step: divided by 10 after 1/2 and 3/4 of schedule_steps; thirds: the same
    after 1/3 and 2/3; halving: by 2 after 4/13 and each further 1/13; poly: times (1 - step / schedule_steps)^0.9;
    validation: lowered whenever the validation loss stops falling"""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    schedule_steps: int = OPEN
    """steps over which the learning rate falls; independent of --steps, which --resume may change"""
    learning_rate_warmup: int = OPEN
    """steps of the linear warm-up of the learning rate"""
    momentum: float = OPEN
    """of SGD: in the optimiser, or in the compressor's memory if the method has momentum correction"""
    weight_decay: float = OPEN
    """sgd: added to each node's gradient; adam and muon: decoupled"""
    decay_all: bool = False
    """decay biases and norm parameters too, not only parameters of two or more dimensions"""
    clip_norm: float = OPEN
    """clip each node's gradient to this norm divided by the root of the number of nodes, with --local.every to this
    norm; 0: no clipping"""
    unroll_nodes: Literal["auto", "yes", "no"] = "auto"
    """compute the gradients of a device's nodes one by one (yes) or together under vmap (no); auto: one by one
    on CPU, together on GPU and TPU, which is faster"""
    deterministic: bool = False
    """on a GPU the same bits from the same step, also if it is compiled again or the run was resumed; slower"""
    run_dir: str | None = None
    """folder of the run; a new one in runs/ if not given"""
    resume: bool = False
    """continue the run in --run-dir"""
    compile_cache: str = ""
    """folder that keeps compiled programs for the next start, or none; if not given, $JAX_COMPILATION_CACHE_DIR, or
    programs/ in the run folder"""
    log_every: int = 10
    """steps between two lines of output if it is not a terminal, and between two points of TensorBoard's curves, which
    have every evaluation and diagnose step besides; metrics.jsonl has every step"""
    evaluate_every: int = OPEN
    """steps between two evaluations, in addition to those at the end of each phase; 0: only those"""
    diagnose_every: int = OPEN
    """steps between two diagnose steps, which compare the aggregate with the true mean; 0: none. They send whole
    gradients between processes, so with --distributed there are none by default"""
    checkpoint_every: int = OPEN
    """steps between two checkpoints, in addition to the one at the end; 0: only that one"""
    check_replicas_every: int = 100
    """steps between two comparisons of the devices' copies, in addition to one at every checkpoint; 0: only those"""
    record: RecordConfig = field(default_factory=RecordConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


GROUPS: dict[str, Any] = {  # nested dataclasses of `Config` by field name, without the compressor's
    f.name: f.default_factory for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)
}


def resolve(config: Config, several: bool = False) -> Config:
    """The config completed by its workload; `several`: of a run of several processes, which it need not say yet."""
    workload = workload_named(config.workload)
    changes: dict[str, Any] = {
        name: getattr(workload, name) for name in open_fields() if getattr(config, name) in (OPEN, "workload")
    }
    if config.rounds.bucket:  # this process is one node
        of_one = {"nodes": 1, "batch_size": max(1, workload.batch_size // workload.nodes)}
        changes |= {name: value for name, value in of_one.items() if name in changes}
    local = config.local
    if config.rounds.overlap and config.rounds.outer == "sgd" and local.outer_momentum == LocalConfig.outer_momentum:
        local = dataclasses.replace(local, outer_momentum=OVERLAPPED_MOMENTUM)
    several = several or bool(config.distributed.coordinator) or config.distributed.auto
    if several and "diagnose_every" in changes:
        changes["diagnose_every"] = 0  # whole gradients on a slow link
    data, model = config.data, config.model
    return dataclasses.replace(
        config, **changes, local=local, layers=layers_of(config, workload),
        compressor=_with_workload(config.compressor, workload),
        data=dataclasses.replace(data, name=data.name or workload.dataset, window=data.window or workload.window),
        model=dataclasses.replace(model, name=model.name or workload.model, norm=model.norm or workload.norm,
                                  classes=model.classes or workload.classes),
    )  # fmt: skip


def layers_of(config: Config, workload: Workload) -> LayersConfig:
    """The layers that are sent differently, with the workload's for this method if none are given."""
    name = method_name(config.compressor)
    patterns = {"dense": "", "top_k": "", **compress.METHODS[name].layers, **workload.layers.get(name, {})}
    chosen = {name: x for name in patterns if (x := getattr(config.layers, name)) is not None}
    return dataclasses.replace(config.layers, **patterns | chosen)


def open_fields() -> list[str]:
    """The fields of `Config` that a workload fills in."""
    return [f.name for f in dataclasses.fields(Config) if f.default in (OPEN, "workload")]


def _with_workload(settings: Any, workload: Workload) -> Any:
    """A compressor's settings; those at the class's default take the workload's value."""
    filled = {"warmup_steps": workload.warmup_steps, "autoencoder_steps": workload.autoencoder_steps}
    filled |= {**workload.compressor, **workload.methods.get(method_name(settings), {})}
    open_names = {f.name for f in dataclasses.fields(settings) if getattr(settings, f.name) == f.default}
    return dataclasses.replace(settings, **{name: x for name, x in filled.items() if name in open_names})


RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (  # options, whether a value fits, in words
    ("nodes devices_per_node steps batch_size schedule_steps log_every", lambda x: x >= 1, "at least 1"),
    ("learning_rate_warmup evaluate_every diagnose_every checkpoint_every check_replicas_every seed data.crop "
     "data.threads", lambda x: x >= 0, "at least 0"),
    ("correction.every record.every", lambda x: x >= 0, "at least 0 steps"),
    ("nodes", lambda x: x <= MOST_NODES, f"at most {MOST_NODES:,}"),
    ("seed", lambda x: x < 2**32, "below 2**32"),
    ("learning_rate record.max_megabytes", lambda x: 0 < x < float("inf"), "positive"),
    ("momentum adam_beta2", lambda x: 0 <= x < 1, "in [0, 1)"),
    ("weight_decay clip_norm", lambda x: 0 <= x < float("inf"), "at least 0"),
    ("data.validation", lambda x: 0 <= x < 1, "a share of the images, at least 0 and below 1 (0.1)"),
    ("distributed.timeout distributed.connect_timeout", lambda x: 1 <= x <= 10**6, "from 1 to 1000000 seconds"),
)  # fmt: skip


def check(config: Config) -> None:
    """Raise UserError for a setting out of range. The compressor checks its settings when it is built."""
    check_rounds(config)
    for names, fits, words in RANGES:
        for name in names.split():
            if not fits(value := attrgetter(name)(config)):
                raise UserError(f"--{name.replace('_', '-')} must be {words}, got {value}")
    if config.batch_size % config.nodes:
        down = config.batch_size // config.nodes * config.nodes
        near = f"{down} or {down + config.nodes}" if down else f"{config.nodes}"
        raise UserError(
            f"{config.nodes} nodes do not divide a batch of {config.batch_size} among them; "
            f"--batch-size (of all nodes together) {near} would do"
        )
    per_node = config.batch_size // config.nodes
    if per_node % config.devices_per_node:
        raise UserError(
            f"--devices-per-node {config.devices_per_node} does not divide the {per_node} examples of a node; "
            f"--batch-size {config.nodes * config.devices_per_node * -(-per_node // config.devices_per_node)} would do"
        )
    if config.layers.shard and config.devices_per_node == 1:
        raise UserError("--layers.shard shards parameters over the devices of a node: give --devices-per-node, too")
    if not config.resume:  # a run of an early version may have them
        by_loss = config.schedule == "validation"
        _check_used(config.record, "record", ("max_megabytes",), config.record.every > 0, "--record.every")
        _check_used(config.correction, "correction", ("every",), by_loss, "--schedule validation")
        _check_optimizer(config)
    if config.record.residuals and config.layers.shard:
        raise UserError("--record.residuals does not go with --layers.shard: leave one of them out")
    check_local(config)
    if config.resume and config.run_dir is None:
        raise UserError("--resume goes on with the run in --run-dir: give both")


def _check_optimizer(config: Config) -> None:
    """Raise UserError for a setting of the other optimiser."""
    sgd, workload = config.optimizer == "sgd", workload_named(config.workload)
    name, kind = ("adam_beta2", "adam") if sgd else ("momentum", "sgd")
    if getattr(config, name) != getattr(workload, name):
        raise UserError(f"--{name.replace('_', '-')} {getattr(config, name):g} does nothing without --optimizer {kind}")
    if config.decay_all and not config.weight_decay:
        raise UserError("--decay-all does nothing without --weight-decay")


def _check_used(part: Any, group: str, free: tuple[str, ...], used: bool, needed: str) -> None:
    """Raise UserError for a setting of a group that does nothing."""
    for setting in dataclasses.fields(part):
        value = getattr(part, setting.name)
        if not used and setting.name not in free and value != setting.default:
            raise UserError(f"--{group}.{setting.name.replace('_', '-')} {value} does nothing without {needed}")


def as_json(config: Config) -> dict[str, Any]:
    """The config as plain data, with the method's name; NumPy's numbers are Python's."""
    method = method_name(config.compressor)
    return {"method": method, **json.loads(json.dumps(dataclasses.asdict(config), default=np.generic.item))}


def method_name(settings: Any) -> str:
    """The registry's name of the method that these settings belong to."""
    return compress.method_of(settings).name
