"""A process of a node of several, for test_slices: it joins, takes part, and prints a line of JSON.

Usage: slice_member.py BUCKET PORT PROCESS OPTIONS, with OPTIONS of `jgc.rounds.join`, and "name", in JSON
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

import jgc
import jgc.rounds

COUNT = 3


def params():
    draw = np.random.default_rng(0)
    w, b = draw.normal(size=(8, 6)).astype(np.float32), draw.normal(size=5).astype(np.float32)
    return {"w": w, "b": jnp.asarray(b, jnp.bfloat16), "count": np.int32(3)}


def moved(tree, seed):
    """Local steps: the same on every machine, and not the same everywhere."""
    draw = np.random.default_rng(seed)
    return {"w": tree["w"] - draw.normal(size=(8, 6)).astype(np.float32), "b": tree["b"] - jnp.bfloat16(0.5),
            "count": tree["count"]}  # fmt: skip


def method():
    return jgc.compress.topk(alpha=0.25, strategy="fixed")


def main(bucket, port, process, options):
    process, options = int(process), json.loads(options)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    mesh = jax.make_mesh((4,), ("x",))
    specs = {"w": P("x"), "b": P(), "count": P()}
    whole = {k: np.asarray(x) for k, x in params().items()}
    put = {k: jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[k]), x.__getitem__)
           for k, x in whole.items()}  # fmt: skip
    names = options.pop("names", ["slice", "slice"])
    alike = {"node": names[process], "compressor": method(), "quorum": 2, "grace": 60.0} | options
    if process == 0:
        alike["folder"] = f"{bucket}-disk"
    try:
        token = jgc.rounds.check(bucket, params=put, **alike)
        node = jgc.rounds.join(bucket, params=put, **alike)
    except (jgc.rounds.RoundsError, ValueError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    tree, digests = node.params, []
    for i in range(COUNT):
        tree, outcome = node.exchange(jax.jit(moved, static_argnums=1)(tree, i), tokens=10)
        digests += [outcome.digest] if outcome else []
    assert tree["w"].sharding.is_equivalent_to(put["w"].sharding, 2), tree["w"].sharding
    assert tree["b"].dtype == jnp.bfloat16 and node.node == "slice"
    node.leave(tree)
    if options.get("overlap"):
        digests.append(node.last.digest)
    whole = multihost_utils.process_allgather(node.params, tiled=True)
    print(json.dumps({
        "token": token, "run": node.run, "number": node.number, "coming": node.coming, "digests": digests,
        "w": np.asarray(whole["w"]).tolist(), "b": np.asarray(whole["b"], np.float32).tolist(),
        "count": int(whole["count"]), "up": node.bucket.counts.up, "payload": node.payload_bytes(2),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
