"""The configuration of a run: frozen dataclasses, filled in by a workload, overridden on the command line.

Where a value comes from, the first that has it:
  1. the command line;
  2. the config file, for whatever it sets to something else than the default of the field's class;
  3. the workload (`--workload`), for what a run needs and the other two leave open;
  4. the class's default.
`resolve` does 3; a field that a workload may fill in has an impossible default (-1, "", "workload"), so that
an explicit value always counts. Only a compressor's own settings have real defaults: a config file that
wants exactly those where the workload says otherwise is overruled, and says so on the command line.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from jgc import compress
from jgc.training.errors import UserError
from jgc.training.workloads import DEFAULT, LAYERS, WORKLOADS, Schedule, Workload, workload_named
from jgc.wire.values import ValueCode

OPEN = -1  # the workload's value
M = TypeVar("M")


@dataclass(frozen=True)
class DataConfig:
    """What is learned."""

    name: str = ""
    """data set: digits, cifar10, cifar100, camvid, food101, imagenet, ptb, tiny_imagenet"""
    dir: str | None = None
    """folder of prepared data sets; if not given, TensorFlow Datasets' own: $TFDS_DATA_DIR or ~/tensorflow_datasets"""
    window: int = 0
    """of a text: words of each stream in a step, through which gradients go back; if not given, the text's own"""
    crop: int = 0
    """of images cropped at random sizes while training: pixels on each side of a crop; 0: the data set's own"""
    threads: int = 0
    """of images that are decoded while training: threads that do; 0: as many as there are processors"""
    shrink: int = 0
    """of images with a label a pixel: all of them, those to judge by too, so many times smaller on each side; 0: 1"""
    validation: float = 0.0
    """share of the training images held out, for a validation loss; a text and camvid have validation data of their
    own"""


@dataclass(frozen=True)
class ModelConfig:
    """What learns."""

    name: str = ""
    """alexnet, convnet5, resnet18, 20, 32, 50, 101, or vgg11, 13, 16, 19; pspnet18, pspnet18_half, pspnet50; lstm"""
    norm: Literal["", "batch", "group", "none"] = ""
    """batch norm, whose statistics are each node's own, group norm, which has none, or no norm, but in ResNets and
    PSPNets"""
    stem: Literal["", "cifar", "imagenet"] = ""
    """of a ResNet: 3x3, or 7x7 with stride 2 and pooling; if not given, the depth's own"""
    classes: int = 0
    """outputs of the head, at least the data set's classes; 0: as many. The LGC paper's sizes suggest 1000"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the activations; parameters and gradients stay float32"""


@dataclass(frozen=True)
class LayersConfig:
    """Layers that are sent in another way than by the compressor. Patterns are regular expressions, searched for in
    the parameters' paths, such as ^head/."""

    dense: str | None = None
    """pattern of layers sent uncompressed, "first" for the model's first layer, "" for none; if not given, the
    workload's"""
    top_k: str | None = None
    """pattern of layers sent by plain top-k after the uncompressed steps, "last" for the model's last layer, "" for
    none; if not given, the workload's"""
    value_code: ValueCode = "float32"
    """how values of the top-k layers are written; what a shorter code loses stays in the residual"""


@dataclass(frozen=True)
class CorrectionConfig:
    """How the validation loss lowers the learning rate with --schedule validation (EGC, Algorithm 2)."""

    decay: float = 0.1
    """t: the rate falls to the first one divided by 1 + t i, where i counts validation losses"""
    patience: int = 1
    """n: it falls after so many validation losses in a row that are no better than the best"""
    min_learning_rate: float = 0.0
    """it does not fall below this"""
    every: int = 0
    """steps between two validation losses, 0: an epoch; with images held out they are recorded by any schedule"""
    literal: bool = False
    """to the letter of Algorithm 2"""


@dataclass(frozen=True)
class RecordConfig:
    """Which gradients a run keeps in its folder, for `jgc analyze`; jgc/training/recording.py says how to read them."""

    every: int = 0
    """steps between two that are recorded, from the first on; 0: none. Stays what it is on --resume, as do all of these
    but the limit"""
    layers: str = ""
    """regular expression, searched for in the parameters' paths, such as layer3/conv/kernel; all if not given"""
    max_megabytes: float = 1000.0
    """limit for the whole recording; a run that would need more does not start"""
    dtype: Literal["float32", "float16"] = "float32"
    """float16 halves the files: each array is then in units of its own, kept beside it"""
    residuals: bool = False
    """what each node keeps back of the same layers, too, as it is before the step"""


@dataclass(frozen=True)
class DistributedConfig:
    """How this process finds the others, where a run has several. docs/distributed.md shows how to start them."""

    coordinator: str = ""
    """HOST:PORT of process 0, a free port there; the same for all processes"""
    num_processes: int = 0
    """how many processes there are, on all hosts together"""
    process_id: int = -1
    """which of them this is, from 0"""
    auto: bool = False
    """let JAX find the three above: under Slurm, Kubernetes and Open MPI and on Cloud TPU"""
    timeout: float = 60.0
    """seconds for which a process may be silent, or a step behind the others, before these end; longer than any step"""
    connect_timeout: float = 120.0
    """seconds in which all processes must have come"""


@dataclass(frozen=True)
class Config(Generic[M]):
    """Settings of a run. The compressor's own are those of its method's dataclass."""

    compressor: M
    workload: str = DEFAULT
    """preset of data set, model, steps, learning rate and phases; see jgc/training/workloads.py"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layers: LayersConfig = field(default_factory=LayersConfig)
    nodes: int = OPEN
    """data-parallel workers; several share a device where there are fewer devices"""
    steps: int = OPEN
    """length of the run in updates; schedules do not stretch with it"""
    batch_size: int = OPEN
    """examples in a step, of all nodes together: images, or streams of text"""
    seed: int = 0
    """of the parameters, the order of the data and all other random choices"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """adam decays weights decoupled from the gradient (AdamW)"""
    learning_rate: float = OPEN
    """its highest value"""
    schedule: Schedule = "workload"
    """constant; cosine, down to 1 % of it; step: divided by 10 after 1/2 and 3/4 of schedule_steps; thirds: the same
    after 1/3 and 2/3; halving: by 2 after 4/13 and each further 1/13; poly: times (1 - step / schedule_steps)^0.9;
    validation: lowered whenever the validation loss stops falling"""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    schedule_steps: int = OPEN
    """steps over which the learning rate falls, then it stays; not tied to --steps, which --resume may change"""
    learning_rate_warmup: int = OPEN
    """steps over which the learning rate first rises in a straight line"""
    momentum: float = OPEN
    """of SGD: kept by the optimiser, or by the compressor's memory where that corrects momentum"""
    weight_decay: float = OPEN
    """sgd: times the weights, added to each node's gradient; adam: decoupled"""
    decay_all: bool = False
    """decay biases and norm parameters too, not only what has two or more dimensions"""
    clip_norm: float = OPEN
    """clip each node's gradient to this norm divided by the root of the number of nodes; 0: no clipping"""
    unroll_nodes: bool = True
    """compute the gradients of one device's nodes one after another instead of under vmap; far faster on CPU"""
    run_dir: str | None = None
    """folder of the run; a new one in runs/ if not given"""
    resume: bool = False
    """go on with the run in --run-dir"""
    log_every: int = 10
    """steps between two lines, where the output is not a terminal; metrics.jsonl has every step"""
    evaluate_every: int = OPEN
    """steps between two evaluations; those at the end of each phase come on top; 0: only those"""
    diagnose_every: int = OPEN
    """steps between two comparisons of the aggregate with the true mean, a step of its own; 0: none"""
    checkpoint_every: int = OPEN
    """steps between two checkpoints; the one at the end comes on top; 0: only that"""
    record: RecordConfig = field(default_factory=RecordConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


GROUPS: dict[str, Any] = {
    f.name: f.default_factory for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)
}
"""The settings of a run that are dataclasses of their own, by name, without the compressor's."""

# What may differ between a run's first start and its resumption: steps, run folder, nodes, processes, threads, logging.
# What is recorded may not, though the run is the same with and without: a recording would have holes that nothing tells
# of.
FREE = frozenset(
    "steps run_dir resume nodes distributed data.dir data.threads log_every evaluate_every diagnose_every "
    "checkpoint_every record.max_megabytes".split()
)


def resolve(config: Config) -> Config:
    """The config with everything that its workload fills in. Once is enough: later changes stand.

    Raises:
      UserError: an unknown workload.
    """
    workload = workload_named(config.workload)
    changes: dict[str, Any] = {
        name: getattr(workload, name) for name in _open_fields() if getattr(config, name) in (OPEN, "workload")
    }
    return dataclasses.replace(
        config,
        **changes,
        data=dataclasses.replace(config.data, name=config.data.name or workload.dataset),
        model=dataclasses.replace(
            config.model, name=config.model.name or workload.model, norm=config.model.norm or workload.norm
        ),
        layers=_layers(config, workload),
        compressor=_with_workload(config.compressor, workload),
    )


def _layers(config: Config, workload: Workload) -> LayersConfig:
    """The layers that go another way, with the workload's for this method where none are given."""
    method = method_name(config.compressor)
    ours = {"dense": "", "top_k": ""} | dict(LAYERS.get(method, {})) | dict(workload.layers.get(method, {}))
    given = {name: x for name in ours if (x := getattr(config.layers, name)) is not None}
    return dataclasses.replace(config.layers, **ours | given)


def _open_fields() -> list[str]:
    """The settings of a run that a workload fills in."""
    return [f.name for f in dataclasses.fields(Config) if f.default in (OPEN, "workload")]


def _with_workload(settings: Any, workload: Workload) -> Any:
    """A compressor's settings with the workload's, where they still are the class's default."""
    ours = {"warmup_steps": workload.warmup_steps, "autoencoder_steps": workload.autoencoder_steps}
    ours |= workload.compressor
    ours |= workload.methods.get(method_name(settings), {})
    defaults = {f.name: f.default for f in dataclasses.fields(settings)}
    names = [name for name in ours if name in defaults and getattr(settings, name) == defaults[name]]
    return dataclasses.replace(settings, **{name: ours[name] for name in names})


def check(config: Config) -> None:
    """Raise UserError for a value that no run can have; the compressor checks its own settings when it is built."""
    for name in ("nodes", "steps", "batch_size", "schedule_steps", "log_every"):
        _require(getattr(config, name) >= 1, config, name, "at least 1")
    for name in ("learning_rate_warmup", "evaluate_every", "diagnose_every", "checkpoint_every", "seed"):
        _require(getattr(config, name) >= 0, config, name, "at least 0")
    _require(config.seed < 2**32, config, "seed", "below 2**32")
    _require(0 < config.learning_rate < float("inf"), config, "learning_rate", "positive")
    _require(0 <= config.momentum < 1, config, "momentum", "in [0, 1)")
    for name in ("weight_decay", "clip_norm"):
        _require(0 <= getattr(config, name) < float("inf"), config, name, "at least 0")
    if config.batch_size % config.nodes:
        down = config.batch_size // config.nodes * config.nodes
        near = f"{down} or {down + config.nodes}" if down else f"{config.nodes}"
        raise UserError(
            f"{config.nodes} nodes do not divide a batch of {config.batch_size} among them; "
            f"--batch-size (of all nodes together) {near} would do"
        )
    if not 0 <= config.data.validation < 1:
        raise UserError(f"--data.validation must be a share of the images, at least 0 and below 1 (0.1), got "
                        f"{config.data.validation}")  # fmt: skip
    for name in ("crop", "threads"):
        if getattr(config.data, name) < 0:
            raise UserError(f"--data.{name} must be at least 0, got {getattr(config.data, name)}")
    if config.correction.every < 0:
        raise UserError(f"--correction.every must be at least 0 steps, got {config.correction.every}")
    if config.record.every < 0:
        raise UserError(f"--record.every must be at least 0 steps, got {config.record.every}")
    if not 0 < config.record.max_megabytes < float("inf"):
        raise UserError(f"--record.max-megabytes must be positive, got {config.record.max_megabytes}")
    for name in ("timeout", "connect_timeout"):
        seconds = getattr(config.distributed, name)
        if not 1 <= seconds <= 10**6:
            raise UserError(f"--distributed.{name.replace('_', '-')} must be from 1 to 1000000 seconds, got {seconds}")
    if config.resume and config.run_dir is None:
        raise UserError("--resume goes on with the run in --run-dir: give both")


def _require(holds: bool, config: Config, name: str, what: str) -> None:
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} must be {what}, got {getattr(config, name)}")


def as_json(config: Config) -> dict[str, Any]:
    """The config as plain data, with the method's name."""
    return {"method": method_name(config.compressor), **dataclasses.asdict(config)}


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A config as a run wrote it down, and what has been added since, by default or as its workload says: no change.

    Example:
      >>> completed({"method": "topk", "compressor": {"alpha": 0.1}})["compressor"]["strategy"]
      'warmup'
    """
    method = compress.METHODS.get(config.get("method", ""))
    parts = GROUPS | ({} if method is None else {"compressor": method.settings})
    inner = {name: _defaults(kind) | config.get(name, {}) for name, kind in parts.items()}
    workload = WORKLOADS.get(config.get("workload", ""))
    filled_in = {} if workload is None else {name: getattr(workload, name) for name in _open_fields()}
    return _defaults(Config) | filled_in | config | inner


def _defaults(kind: type) -> dict[str, Any]:
    """What the fields of a dataclass are by default; nothing of those that a workload fills in."""
    missing = dataclasses.MISSING
    return {f.name: f.default for f in dataclasses.fields(kind) if f.default not in (missing, OPEN, "workload")}


def method_name(settings: Any) -> str:
    """The name under which `jgc.compress` knows the method that these settings belong to."""
    return compress.method_of(settings).name


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Which fields of two resolved configs differ that a resumed run must not change, with both values.

    Example:
      >>> differences({"seed": 0, "steps": 5}, {"seed": 1, "steps": 9})
      ['seed was 0, is 1']
    """
    found = []
    for name in [*new, *(name for name in old if name not in new)]:
        path = f"{prefix}{name}"
        if path in FREE:
            continue
        was, now = old.get(name, "absent"), new.get(name, "absent")
        if isinstance(was, dict) and isinstance(now, dict):
            found += differences(was, now, f"{path}.")
        elif was != now:
            found.append(f"{path} was {was!r}, is {now!r}")
    return found
