"""jgc: gradient compression for JAX.

    nodes = jgc.make_nodes(8)
    init, step = jgc.make_step(loss, jgc.compress.topk(alpha=0.01), optax.adamw(1e-3), nodes)

See the README for a training loop, `jgc.types` for the contract, `jgc.compress` for the methods.
"""

from jgc import compress
from jgc.checks.optax_states import MomentumWarning
from jgc.citation import citation
from jgc.loops.local_loop import LocalMetrics, LocalState
from jgc.loops.local_steps import LocalSteps, local_steps
from jgc.loops.make_step import make_step
from jgc.loops.mean_gradients import mean_gradients
from jgc.loops.saving import as_arrays, from_arrays
from jgc.loops.skipped import SkippedStepsWarning
from jgc.loops.step_loop import LoopState
from jgc.loops.step_program import Metrics
from jgc.loops.with_nodes import with_nodes
from jgc.method.as_optax import init_optax
from jgc.method.bytes_per_step import StepBytes, bytes_per_step
from jgc.method.diagnose import diagnose, residual
from jgc.method.encode import decode, encode, unsend
from jgc.method.phases import phase_after, phase_at
from jgc.nodes.axis import on_nodes
from jgc.nodes.gradients import node_grads
from jgc.nodes.layouts import from_mesh, make_nodes
from jgc.nodes.placement import BATCH, LOCAL, SHARED, Sharded, Stacked, placements_of
from jgc.nodes.placing import place, place_parts, to_host
from jgc.nodes.slow_loops import SlowLoopWarning
from jgc.types import Compressor, Info, Message, Nodes, Phase, Sent, State, Wire

__version__ = "0.1.0"

__all__ = [
    "BATCH", "LOCAL", "SHARED", "Compressor", "Info", "LocalMetrics", "LocalState", "LocalSteps",
    "LoopState", "Message", "Metrics", "MomentumWarning", "Nodes", "Phase", "Sent", "Sharded",
    "SkippedStepsWarning", "SlowLoopWarning", "Stacked", "State", "StepBytes", "Wire", "as_arrays",
    "bytes_per_step", "citation", "compress", "decode", "diagnose", "encode", "from_arrays",
    "from_mesh", "init_optax", "local_steps", "make_nodes", "make_step", "mean_gradients",
    "node_grads", "on_nodes", "phase_after", "phase_at", "place", "place_parts", "placements_of",
    "residual", "to_host", "unsend", "with_nodes",
]  # fmt: skip
