"""jgc: gradient compression for JAX.

    nodes = jgc.make_nodes(8)
    compressor = jgc.compress.lgc_ps(alpha=0.001)

See the README for a training loop, `jgc.types` for the contract, `jgc.compress` for the methods.
"""

from jgc import compress
from jgc.method.guard import diagnose, residual
from jgc.nodes import from_mesh, make_nodes, node_grads, on_nodes
from jgc.placement import BATCH, LOCAL, SHARED, place, placements_of
from jgc.types import Compressor, Info, Message, Nodes, Phase, Sent, State, Wire

__version__ = "0.1.0"

__all__ = [
    "BATCH", "LOCAL", "SHARED", "Compressor", "Info", "Message", "Nodes", "Phase", "Sent", "State", "Wire", "compress",
    "diagnose", "from_mesh", "placements_of", "make_nodes", "node_grads", "on_nodes", "place",
    "residual",
]  # fmt: skip
