"""Settings of rounds through a bucket: --rounds.bucket and what goes with it."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jgc.rounds.arithmetic import AdamW, Sgd
from jgc.rounds.context import Rules, check_rules
from jgc.rounds.names import check_node
from jgc.training.errors import UserError

if TYPE_CHECKING:
    from jgc.rounds.arithmetic import Outer


@dataclass(frozen=True)
class RoundsConfig:
    """Rounds: this process is one node, and meets others in a bucket after every --local.every steps. Nodes may come
    and go (docs/rounds.md). The same command starts and resumes a node; a round of all nodes counts as H steps."""

    bucket: str = ""
    """s3://bucket/run7, gs://..., az://... with credentials in the environment, or a folder that all nodes see"""
    node: str = ""
    """this node's name, different from all others and the same after a restart"""
    quorum: int = 1
    """fewest messages that close a round; the same on all nodes"""
    start: int = 0
    """nodes that the first round waits for before its grace begins; 0: the quorum"""
    grace: float = 60.0
    """seconds that a quorum waits for missing nodes"""
    timeout: float = 3600.0
    """seconds in one round after which a line names the missing nodes"""
    end: bool = False
    """end the process then, instead of waiting on"""
    checkpoint_every: int = 20
    """rounds between two checkpoints of the shared parameters in the bucket"""
    retained: Annotated[int, tyro.conf.arg(name="rounds.keep", prefix_name=False)] = 50
    """rounds whose messages stay in the bucket, for nodes that are behind"""
    seconds: float = 0.0
    """as many local steps a round as fit into these seconds, at least one; 0: --local.every. Nodes may differ"""
    overlap: bool = False
    """exchange while the next round's local steps run; costs loss, see docs/rounds.md. --local.outer-momentum of sgd is
    then 0.3 if not given"""
    merge: float | Literal["eager"] | None = None
    """with overlap, the fraction of its movement in a round that a node keeps until the mean arrives, in [0, 1], 0.5 if
    not given; or eager: its share of the mean goes through the outer step immediately, and is corrected later"""
    outer: Literal["sgd", "adamw"] = "sgd"
    """outer optimiser. Its rate is --local.outer-learning-rate, its (Nesterov) momentum or beta1
    --local.outer-momentum"""
    outer_beta2: float = 0.999
    """of an outer AdamW"""

    def rules(self) -> dict[str, Any]:
        """The rules of `jgc.rounds.join`."""
        names = [name for name in Rules._fields if hasattr(self, name)]
        return {name: getattr(self, name) for name in names} | {"start": self.start or self.quorum}


def outer_of(config: Any) -> "Outer":
    """The outer optimiser."""
    local = config.local
    if config.rounds.outer == "adamw":
        return AdamW(local.outer_learning_rate, b1=local.outer_momentum, b2=config.rounds.outer_beta2)
    return Sgd(local.outer_learning_rate, local.outer_momentum)


def check_rounds(config: Any) -> None:
    """Raise UserError for a setting of rounds that is out of range, does nothing, or does not go with others."""
    rounds = config.rounds
    if not rounds.bucket:
        for field in dataclasses.fields(rounds):
            if (value := getattr(rounds, field.name)) != field.default:
                raise UserError(f"--rounds.{_option(field.name)} {value} does nothing without --rounds.bucket")
        return
    if not rounds.node:
        raise UserError("--rounds.bucket needs --rounds.node, a name for this node that no other node has")
    _check_others(config)
    if rounds.merge is not None and not rounds.overlap:
        raise UserError(f"--rounds.merge {rounds.merge} does nothing without --rounds.overlap")
    if rounds.merge == "eager":
        if rounds.outer != "sgd":
            raise UserError("--rounds.merge eager needs --rounds.outer sgd, whose steps add up")
    elif rounds.merge is not None and not 0 <= rounds.merge <= 1:
        raise UserError(f"--rounds.merge must be in [0, 1] or eager, got {rounds.merge}")
    if not 0 <= rounds.seconds < float("inf"):
        raise UserError(f"--rounds.seconds must be at least 0, got {rounds.seconds}")
    if rounds.outer == "sgd" and rounds.outer_beta2 != type(rounds).outer_beta2:
        raise UserError(f"--rounds.outer-beta2 {rounds.outer_beta2} does nothing without --rounds.outer adamw")
    rate = config.local.outer_learning_rate
    if rounds.outer == "adamw" and rate == type(config.local).outer_learning_rate:
        raise UserError(
            f"--rounds.outer adamw would move every parameter by up to --local.outer-learning-rate {rate:g} a round, "
            "which is meant for sgd: give a rate such as 0.001"
        )
    try:
        check_node(rounds.node)
        check_rules(Rules(**rounds.rules()))
        outer_of(config)
    except ValueError as error:  # it begins with the setting's name
        raise UserError(f"--rounds.{str(error).replace('retained', 'keep', 1)}") from error


def _check_others(config: Any) -> None:
    """Raise UserError for settings that do not go with a bucket."""
    team, local = config.distributed, config.local
    if config.nodes != 1:
        raise UserError(f"--nodes {config.nodes} does not go with --rounds.bucket: a process is one node, and further "
                        "nodes are further processes with other names")  # fmt: skip
    if team.coordinator or team.auto or team.num_processes or team.process_id != -1:
        raise UserError("--distributed does not go with --rounds.bucket: processes meet only in the bucket")
    if local.every is None:
        raise UserError("--rounds.bucket needs --local.every H, the steps of a round")
    for name in ("fragments", "overlap", "merge"):
        if getattr(local, name) != getattr(type(local), name):
            other = "; give --rounds.overlap" if name == "overlap" else ""
            raise UserError(f"--local.{name} {getattr(local, name)} does not go with --rounds.bucket{other}")
    if config.layers.shard:
        raise UserError("--layers.shard does not go with --rounds.bucket: a node has whole parameters")
    if config.record.every:
        raise UserError(f"--record.every {config.record.every} does not go with --rounds.bucket")


def _option(name: str) -> str:
    return "keep" if name == "retained" else name.replace("_", "-")
