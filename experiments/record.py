"""All nodes' gradients of consecutive steps of an uncompressed run, recorded on disk for later commands.

The run is the workload's baseline. Recorded is the compressor's input: each node's gradient with coupled weight decay,
clipped if the run clips. 40 steps of a 390k-parameter model on 8 nodes take 0.5 GB. `train.py --record.every` records
some steps and layers of any run; `experiments.codecs.recorded` reads those.
"""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc.compress import Dense
from jgc.lab.shared.progress import count
from jgc.layout.pack import make_packing, pack, unpack
from jgc.loops.buffers import copied
from jgc.nodes.placing import place
from jgc.training.errors import NonFinite, UserError, say
from jgc.training.run.folder import read_object, write_json
from jgc.training.run.periodic import batches
from jgc.training.run.setup import Setup, build
from jgc.training.settings.config import Config, DataConfig, as_json, check, resolve
from jgc.training.steps.step import arrays_by_name, with_arrays
from jgc.types import Nodes, PyTree

GRADIENTS, ABOUT = "gradients.npy", "recording.json"


class Recording(NamedTuple):
    """Gradients of S steps.

    Attributes:
      title: the run and its steps in words.
      nodes: of the run, K.
      params: before the run's first step, or zeros of their shapes.
      flat: f32[S, K, n], in the order of `jgc.layout.pack`.
    """

    title: str
    nodes: Nodes
    params: PyTree
    flat: np.ndarray

    @property
    def shapes(self) -> PyTree:
        """The parameters' shapes and dtypes."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)

    def tree(self, index: int) -> PyTree:
        """All nodes' gradients of a step, leaves [K, ...], placed on the devices."""
        packing = make_packing(self.shapes)
        trees = [unpack(g, packing) for g in np.asarray(self.flat[index])]
        return place(jax.tree.map(lambda *xs: np.stack(xs), *trees), "local", self.nodes)


def record(
    run_dir: Path, workload: str, nodes: int, seed: int, start: int, steps: int, data_dir: str | None = None
) -> Recording:
    """The gradients of steps `start` to `start + steps - 1`; those in `run_dir` if they are of the same run.

    Args:
      run_dir: folder of the recording.
      workload: a name in `jgc.training.settings.workloads`.
      nodes: K.
      seed: of the run.
      start: uncompressed steps before the first that is recorded.
      steps: how many are recorded.
      data_dir: folder of prepared data sets.

    Raises:
      UserError: a negative `start`, nodes that do not fit the workload, or a `run_dir` with a recording of something
        else.
      NonFinite: the run diverges.
    """
    config, setup, settings = uncompressed_run(workload, nodes, seed, start, steps, data_dir)
    about = {"start": start, "config": settings}
    if (run_dir / ABOUT).exists():
        if read_object(run_dir / ABOUT) != json.loads(json.dumps(about)):
            raise UserError(f"{run_dir} holds a recording of something else: give a new --run-dir or remove it")
    else:
        run_dir.mkdir(parents=True, exist_ok=True)
        _run(config, setup, start, run_dir / GRADIENTS)
        write_json(run_dir / ABOUT, about)
    title = f"{workload}, {nodes} nodes, steps {start} to {start + steps - 1} of an uncompressed run"
    return Recording(title, setup.parts.nodes, setup.state.params, np.load(run_dir / GRADIENTS, mmap_mode="r"))


def uncompressed_run(
    workload: str, nodes: int, seed: int, start: int, steps: int, data_dir: str | None
) -> tuple[Config, Setup, dict[str, Any]]:
    """A run of `start + steps` uncompressed steps: its config, what it trains, and the config as plain data, without
    the folder of the data, which may lie elsewhere.

    Raises:
      UserError: a setting is wrong, or the data set is missing.
    """
    if start < 0:
        raise UserError(f"--start must be at least 0, got {start}")
    config = resolve(
        Config(Dense(), workload=workload, nodes=nodes, seed=seed, steps=start + steps, data=DataConfig(dir=data_dir))
    )
    check(config)
    settings = as_json(config)
    settings["data"].pop("dir")
    return config, build(config), settings


def _run(config: Config, setup: Setup, start: int, path: Path) -> None:
    """Train without compression and record the gradients from step `start` on."""
    partial = path.with_suffix(".partial")
    shape = (config.steps - start, config.nodes, setup.values)
    gradients = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
    begun = monotonic()
    try:
        for step, grads in training_gradients(config, setup):
            if step % 10 == 0:
                say(f"{count(step, config.steps, monotonic() - begun)} recording gradients")
            if step >= start:
                gradients[step - start] = flat(grads)
                if not np.isfinite(gradients[step - start]).all():
                    raise NonFinite(step + 1, "a gradient is not finite", "nothing was recorded")
        gradients.flush()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def training_gradients(config: Config, setup: Setup) -> Iterator[tuple[int, PyTree]]:
    """Each step of a run: its number, and the compressor's input, all nodes' gradients [K, ...]."""
    state = with_arrays(setup.state, copied(arrays_by_name(setup.state)))
    with closing(batches(setup)) as arriving:
        for step, batch in zip(range(config.steps), arriving, strict=True):
            yield step, setup.step.gradients(state, batch)
            state, _ = setup.step(state, batch)


def flat(grads: PyTree) -> np.ndarray:
    """All nodes' gradients as vectors in the order of `jgc.layout.pack`: leaves [K, ...] -> f32[K, n]."""
    layout = make_packing(jax.tree.map(lambda x: x[0], grads))
    return np.asarray(jax.vmap(lambda tree: pack(tree, layout))(grads))
