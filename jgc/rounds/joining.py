"""Take part in rounds: the arguments of `jgc.rounds.join` and its defaults."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jgc.checks.argument_types import fits
from jgc.rounds.arithmetic import OVERLAPPED_MOMENTUM, Outer, Sgd, settings_of
from jgc.rounds.bucket import Bucket, open_bucket
from jgc.rounds.coder import CompressorCoder, Leaves
from jgc.rounds.context import Context, Rules, check_rules
from jgc.rounds.loop import EAGER, Rounds, log
from jgc.rounds.messages import secret_of_environment
from jgc.rounds.names import check_node
from jgc.rounds.node_disk import Disk, NoDisk
from jgc.rounds.opening import compared_run
from jgc.rounds.protocol import Member
from jgc.rounds.requests import perform
from jgc.rounds.slices import SliceRounds, check_slice, told
from jgc.types import Compressor, PyTree

OVERLAPPED_MERGE = 0.5  # see `OVERLAPPED_MOMENTUM`


def _prepared(
    bucket: Any, node: str, params: PyTree, compressor: Compressor, outer: Outer,
    settings: Any = None, seed: int = 0, **rules: Any,
) -> tuple[Bucket, Context, CompressorCoder, dict[str, Any]]:  # fmt: skip
    """Check arguments, without a request; bucket, context, coder, and values equal on all nodes."""
    check_node(node)
    rules.setdefault("start", rules.get("quorum", 1))
    unknown = sorted(rules.keys() - set(Rules._fields))
    if unknown:
        known = ", ".join(Rules._fields)
        raise TypeError(f"join has no argument {unknown[0]!r}; rules are {known}")
    chosen = Rules(**rules)
    check_rules(chosen)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be a whole number from 0 to 2**32 - 1, got {seed!r}")
    coder = CompressorCoder(compressor, params, seed)
    alike = {**coder.settings, **settings_of(outer), "quorum": chosen.quorum}
    alike |= _plain({} if settings is None else settings, alike)
    store = open_bucket(bucket) if isinstance(bucket, str | os.PathLike) else bucket
    if not hasattr(store, "create"):
        raise TypeError(f"bucket must be a URL, a folder or an open bucket, got {bucket!r}")
    context = Context(node, coder, outer, chosen, secret_of_environment(), seed, say=log.warning)
    return store, context, coder, alike


def _plain(settings: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """A user's settings, which must survive JSON and may not replace jgc's."""
    if not isinstance(settings, Mapping):
        raise TypeError(f'settings must be a dict such as {{"every": 30}}, got {settings!r}')
    plain = {}
    for name, value in settings.items():
        value = value.item() if isinstance(value, np.generic) else value
        finite = isinstance(value, float) and np.isfinite(value)
        is_plain = value is None or isinstance(value, int | str) or finite
        if not (isinstance(name, str) and is_plain):
            raise ValueError(
                f"settings[{name!r}] must be a finite number, a string, True, False or None, got "
                f"{value!r}"
            )
        if name in taken:
            raise ValueError(f"settings may not have {name!r}: jgc compares its value already")
        plain[name] = value
    return plain


def _with_defaults(
    overlap: int, merge: float | str | None, outer: Outer | None
) -> tuple[float | str, Outer]:
    """merge and outer optimiser; with overlap the best of those searched: docs/rounds.md."""
    if not (isinstance(overlap, int) and overlap in (0, 1)):
        raise ValueError(f"overlap must be 0 or 1 round, got {overlap!r}")
    if merge is not None and not overlap:
        raise ValueError(f"merge={merge} does nothing without overlap=1")
    outer = outer or Sgd(momentum=OVERLAPPED_MOMENTUM if overlap else Sgd.momentum)
    merge = OVERLAPPED_MERGE if merge is None else merge
    if merge == EAGER and not isinstance(outer, Sgd):
        raise ValueError(
            f'merge="eager" needs jgc.rounds.Sgd outside, whose steps add up, got {outer}'
        )
    share = 0.0 if merge == EAGER else merge
    if isinstance(share, str) or not (fits(float, share) and 0 <= share <= 1):
        raise ValueError(f'merge must be in [0, 1] or "eager", got {merge!r}')
    return merge, outer


def check(
    bucket: str | os.PathLike | Bucket, *, node: str, params: PyTree, outer: Outer | None = None,
    overlap: int = 0, merge: float | str | None = None, folder: str | os.PathLike | None = None,
    pause: Callable[[float], Any] | None = None, **arguments: Any,
) -> str | None:  # fmt: skip
    """The token of the run that `join` would take part in; None if it would start a new run.

    One request, which changes nothing: call it before a long compilation. It takes the arguments
    of `join`; `folder` and `pause` are not used, and the parameters may be shapes. Raises the
    errors of `join`.
    """
    del folder, pause
    _, outer = _with_defaults(overlap, merge, outer)

    def token(params: PyTree) -> str | None:
        store, context, _, alike = _prepared(bucket, node, params, outer=outer, **arguments)
        return perform(compared_run(context, alike), store)

    if jax.process_count() == 1:
        return token(params)
    check_slice(node)
    leaves = Leaves(params)
    forms = zip(leaves.shapes, leaves.dtypes, strict=True)
    whole = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in forms]
    return told(lambda: token(jax.tree.unflatten(leaves.treedef, whole)))


def join(
    bucket: str | os.PathLike | Bucket, *, node: str, params: PyTree, compressor: Compressor,
    outer: Outer | None = None, overlap: int = 0, merge: float | str | None = None,
    folder: str | os.PathLike | None = None, settings: Mapping[str, Any] | None = None,
    seed: int = 0, pause: Callable[[float], Any] = time.sleep, **rules: Any,
) -> Rounds:  # fmt: skip
    """Join the run in a bucket; the first node creates it.

    Compile the training step before: others wait for this node from now on. The processes of a
    `jax.distributed` job are one node: all call `join`, and later `exchange` and `leave`, together.

    Args:
      bucket: a URL or a folder (see `open_bucket`), or an open bucket.
      node: this node's name, unique in the run and the same after a restart.
      params: the parameters. Those of the first node count; others only need the same shapes.
      compressor: of `jgc.compress`: topk, gradient_dropping, qsgd, natural, onebit, cast or dense.
      outer: `Sgd` or `AdamW` of `jgc.rounds`; by default `Sgd(0.7, momentum=0.9)`, with overlap
        `Sgd(0.7, momentum=0.3)`.
      overlap: 1 to exchange in a thread while the next round's steps run.
      merge: with overlap, the fraction of its movement in a round that a node keeps until the mean
        of all movements arrives, by default 0.5; or "eager": the node's share of the mean goes
        through the outer step immediately, and the others' shares follow.
      folder: where the node keeps its residual, so that it survives a kill; None for nowhere.
      settings: further plain values that must be equal on all nodes, such as local steps a round.
      seed: of random rounding; the same on all nodes.
      pause: waits for some seconds. Its exceptions end `join` or `exchange`; call `leave` then.
      rules: `quorum`, `grace`, `start`, `total`, `timeout`, ... of `jgc.rounds.Rules`.

    Raises:
      NoBucket: no such bucket, no credentials, or no obstore.
      RoundsError: a run with other settings, lost objects, or two processes with one name.
      ValueError: a setting out of range, or a method that communicates while it encodes.
    """
    merge, outer = _with_defaults(overlap, merge, outer)

    if not (folder is None or isinstance(folder, str | os.PathLike)):
        raise TypeError(f"folder must be the path of a folder, or None, got {folder!r}")

    def joined(params: PyTree) -> Rounds:
        store, context, coder, alike = _prepared(
            bucket, node, params, compressor, outer, settings, seed, **rules
        )
        member = Member(
            context, lambda run: NoDisk() if folder is None else Disk(folder, run, node)
        )
        return Rounds(store, member, coder, params, alike, bool(overlap), merge, pause)

    if jax.process_count() == 1:
        return joined(params)
    check_slice(node)
    return SliceRounds(params, compressor, joined)
