"""A node's process: a small network, local steps that last a given time, and an exchange."""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc
from jgc.lab.chaos.child import QUICK, end_with_parent
from jgc.lab.chaos.rounds.accounts import Account, round_on_disk
from jgc.lab.chaos.rounds.links import FaultyBucket, Switch

STEPS, BATCH = 10, 32  # local steps of a round, and examples of a step
TOKENS = STEPS * BATCH
UNITS = (8, 64, 32, 1)
REQUEST_SECONDS = 20.0  # after which a request has failed


class Settings(NamedTuple):
    """Of a node's process.

    Attributes:
      bucket: URL or folder.
      node: its name.
      folder: for disk, account, log and switches.
      seed: of its batches.
      seconds: duration of a round's local steps.
      start, quorum, grace, overlap: see `jgc.rounds.join`.
      faulty: whether the bucket is a folder, whose failures this process makes (see `links`).
      clock: seconds by which its wall clock is off.
    """

    bucket: str
    node: str
    folder: str
    seed: int = 0
    seconds: float = 5.0
    start: int = 4
    quorum: int = 2
    grace: float = 3.0
    overlap: int = 1
    faulty: bool = True
    clock: float = 0.0


class Files(NamedTuple):
    """The files of a node."""

    folder: Path

    @property
    def log(self) -> Path:
        """A line of JSON for each outcome."""
        return self.folder / "log.jsonl"

    @property
    def switch(self) -> Path:
        """The mode of its link."""
        return self.folder / "link.json"

    @property
    def stop(self) -> Path:
        """Its existence asks the node to leave after its round."""
        return self.folder / "stop"

    @property
    def nan(self) -> Path:
        """Its existence makes the node's parameters NaN; the node removes it."""
        return self.folder / "nan"

    @property
    def account(self) -> Path:
        """The folder of its balances."""
        return self.folder / "account"


def compressor() -> Any:
    """The compressor of all nodes, and of the audit."""
    return jgc.compress.topk(alpha=0.1, strategy="fixed")


def outer() -> jgc.rounds.Sgd:
    """The outer optimiser of all nodes, and of the audit."""
    return jgc.rounds.Sgd(0.7, momentum=0.5)


def rules(settings: Settings) -> dict[str, Any]:
    """The rules of all nodes, and of the audit."""
    return {
        "quorum": settings.quorum, "start": settings.start, "grace": settings.grace,
        "checkpoint_every": 10, "retained": 40, "timeout": 30.0, "poll": (0.05, 0.5),
        "patience": 0.3,
    }  # fmt: skip


def first_params(seed: int = 0) -> Any:
    """The parameters before round 0."""
    keys = jax.random.split(jax.random.key(seed), len(UNITS))
    pairs = zip(keys, UNITS[:-1], UNITS[1:], strict=False)
    return [{"w": jax.random.normal(k, (m, n)) * m**-0.5, "b": jnp.zeros(n)} for k, m, n in pairs]


def child(argv: list[str], output: str, environment: dict[str, str]) -> None:
    """Run a node; argv holds its settings as JSON. An error ends it with code 1 and one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1) for stream in (1, 2))
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s", force=True)
    os.environ.update({**environment, "XLA_FLAGS": f"{QUICK} --xla_cpu_multi_thread_eigen=false"})
    jax.config.update("jax_platforms", "cpu")
    settings = Settings(**json.loads(argv[0]))
    if settings.clock:
        _set_clock(settings.clock)
    try:
        run(settings)
    except (jgc.rounds.RoundsError, jgc.rounds.BucketError) as error:
        print(f"error: {error}", flush=True)
        sys.exit(1)
    sys.exit(0)


def run(settings: Settings) -> None:
    """Take part until the file `stop` says to leave."""
    files, node = Files(Path(settings.folder)), settings.node
    step, state, params = _training(settings)
    started = round_on_disk(files.folder, node)
    bucket: Any = jgc.rounds.open_bucket(settings.bucket, seconds=REQUEST_SECONDS)
    if settings.faulty:
        bucket = FaultyBucket(bucket, Switch(files.switch))
    rounds = jgc.rounds.join(
        bucket, node=node, params=params, compressor=compressor(), outer=outer(),
        overlap=settings.overlap, folder=files.folder, **rules(settings),
    )  # fmt: skip
    account = Account(files.account)
    account.open(rounds.member, started)
    _keep_account(rounds.member, account)
    _log(files.log, rounds, rounds.last)
    params, key, count = rounds.params, jax.random.key(settings.seed), 0
    while not _leaves(files.stop, rounds.coming):
        ends = time.monotonic() + settings.seconds
        for _ in range(STEPS):
            params, state, loss = step(params, state, jax.random.fold_in(key, count))
            count += 1
        if files.nan.exists():
            files.nan.unlink()
            params = jax.tree.map(lambda x: x * jnp.nan, params)
        time.sleep(max(0.0, ends - time.monotonic()))
        params, outcome = rounds.exchange(params, tokens=TOKENS)
        _log(files.log, rounds, outcome, float(loss))
    rounds.leave()
    _log(files.log, rounds, rounds.last if settings.overlap else None)


def _leaves(stop: Path, number: int) -> bool:
    """Whether a node is to leave before its local steps of a round."""
    return stop.exists() and number >= int(stop.read_text())


def _training(settings: Settings) -> tuple[Callable[..., Any], Any, Any]:
    """The local step, compiled; the inner state and the parameters."""
    inner, params = optax.adamw(3e-3), first_params()

    def loss(params: Any, x: Any) -> Any:
        out = x
        for i, layer in enumerate(params):
            out = out @ layer["w"] + layer["b"]
            out = jnp.tanh(out) if i < len(params) - 1 else out
        return jnp.mean((out[:, 0] - jnp.sin(x).sum(1)) ** 2)

    @jax.jit
    def step(params: Any, state: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, jax.random.normal(key, (BATCH, UNITS[0])))
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = inner.init(params)
    step(params, state, jax.random.key(settings.seed))
    return step, state, params


def _keep_account(member: Any, account: Account) -> None:
    """Enter what a member moves into its account, in the thread of its exchanges."""
    exchange = member.exchange

    def accounted(difference: np.ndarray, tokens: int) -> Any:
        account.begin(member, difference)
        outcome = yield from exchange(difference, tokens)
        account.end(member, difference)
        return outcome

    member.exchange = accounted


def _log(path: Path, rounds: Any, outcome: Any, loss: float | None = None) -> None:
    """Write a line, with the outcome if there is one."""
    line: dict[str, Any] = {"time": time.monotonic(), "loss": loss}
    if outcome is not None:
        names = ("round", "number", "digest", "counted", "reason", "waited", "discarded")
        line |= {name: getattr(outcome, name) for name in names}
    with path.open("a") as file:
        file.write(json.dumps(line | dict(rounds.bucket.counts._asdict())) + "\n")


def _set_clock(seconds: float) -> None:
    """Put this process's wall clock forward. Its monotonic clock is the system's."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
