"""Bytes that Gloo adds to the messages of one collective, measured while nothing else runs.

Each message has a preamble, and both sides announce that they are ready: 144 bytes at any length. They are nothing in
a step of megabytes, and much in a step of kilobytes. The number of messages of a collective depends on its kind, on the
number of hosts and, for small collectives, on its size.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from jgc.lab.shared.hlo import Collective, collectives
from jgc.nodes.layouts import NODE
from jgc.types import Array, Nodes

LARGE = 1 << 16  # bytes; from here on the number of messages is constant, except for segments of very large ones
CALLS = 20

KINDS: dict[str, Callable[[Array, int], Array]] = {
    "all-reduce": lambda x, hosts: jax.lax.psum(x, NODE),
    "all-gather": lambda x, hosts: jax.lax.all_gather(x, NODE),
    "collective-permute": lambda x, hosts: jax.lax.ppermute(x, NODE, [(i, (i + 1) % hosts) for i in range(hosts)]),
    "reduce-scatter": lambda x, hosts: jax.lax.psum_scatter(x, NODE, tiled=True),
    "all-to-all": lambda x, hosts: jax.lax.all_to_all(x, NODE, 0, 0, tiled=True),
}
"""The exchange of a host's f32[n], by XLA's name of the collective."""


def counted(operations: Sequence[Collective]) -> dict[str, int]:
    """Count the collectives of a program by kind and size.

    Example:
      >>> flag = Collective("all-reduce", "f32", 1, 4, 2, 4, "", times=3)
      >>> counted([flag, Collective("all-gather", "u8", 9, 9, 2, 9, "", times=1)])
      {'all-reduce 4': 3, 'all-gather 12': 1}
    """
    counts: dict[str, int] = {}
    for operation in operations:
        name = f"{operation.op} {min(4 * -(-operation.payload_bytes // 4), LARGE)}"
        counts[name] = counts.get(name, 0) + operation.times
    return counts


def make(name: str, nodes: Nodes) -> tuple[Callable[[], None], float]:
    """Compile a program of one collective over all hosts, and count the bytes that a host sends in it.

    Args:
      name: from `counted`.
      nodes: one per host.

    Returns:
      `run()`, which calls it `CALLS` times, and the bytes of one call.
    """
    assert nodes.mesh is not None, "every host has a device"
    kind, size = name.split()
    values = int(size) // 4 or 1
    if kind in ("reduce-scatter", "all-to-all"):
        values = -(-values // nodes.count) * nodes.count
    spec = P(NODE)
    program = jax.shard_map(lambda x: KINDS[kind](x, nodes.count).reshape(1, -1).sum(1), mesh=nodes.mesh,
                            in_specs=spec, out_specs=spec, check_vma=False)  # fmt: skip
    x = jax.jit(lambda: jnp.ones(values * nodes.count), out_shardings=NamedSharding(nodes.mesh, spec))()
    compiled = jax.jit(program).lower(x).compile()

    def run() -> None:
        for _ in range(CALLS):
            jax.block_until_ready(compiled(x))

    return run, float(sum(operation.sent_bytes for operation in collectives(compiled)))
