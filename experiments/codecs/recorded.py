"""Gradients that a run recorded itself (`train.py --record.every N`), for `experiments codecs`."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from experiments.analysis import recorded
from experiments.record import Recording, flat
from jgc.nodes.layouts import make_nodes


def load(folder: Path) -> Recording:
    """The recorded layers of all recorded steps; with local steps their pseudo-gradients.

    Raises:
      UserError: `folder` is no run, or has no recording that can be read.
    """
    run = recorded.find(folder)
    params = unflatten_dict({path: jnp.zeros(shape, jnp.float32) for path, shape in run.shapes.items()}, sep="/")

    def vectors(gradients: dict[str, np.ndarray]) -> np.ndarray:
        shaped = {path: g.reshape(-1, *run.shapes[path]) for path, g in gradients.items()}
        return flat(unflatten_dict(shaped, sep="/"))

    every = run.config["local"]["every"]
    what = f"pseudo-gradients of {every} local steps" if every else "gradients"
    title = f"{run.title}: {what}, {len(run.steps)} recorded in steps {run.steps[0]} to {run.steps[-1]}"
    return Recording(title, make_nodes(run.nodes), params, np.stack([vectors(s.gradients) for s in recorded.read(run)]))
