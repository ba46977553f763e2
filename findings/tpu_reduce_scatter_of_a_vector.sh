#!/usr/bin/env bash
# Finding: the TPU compiler makes an all-reduce of jax.lax.psum_scatter of a flat vector, so twice the bytes travel.
#
# Versions: jax 0.10.2, libtpu 0.0.52. Compiled for v5e:2x4, which needs no TPU.
# Guess:    psum_scatter of f32[n] sends (K-1)/K n values, half of what psum sends; ZeRO and
#           FSDP use it for flattened gradients because of that.
# Seen:     f32[1048576] and f32[64, 128] a device compile to all-reduce; f32[65536, 128] to reduce-scatter.
# Cure:     scatter a matrix with rows of 128 values and many rows.
# Exits with 0 if this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "libtpu==0.0.52"
cat > "$folder/run.py" <<'PY'
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = jax.make_mesh((8,), ("x",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))


def collective(shape):
    def scatter(x):
        return jax.lax.psum_scatter(2 * x[0], "x", tiled=True)

    mapped = jax.shard_map(scatter, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = jax.ShapeDtypeStruct((8, *shape), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    text = jax.jit(mapped).lower(x).compile().as_text()
    return sorted(set(re.findall(r" (all-reduce|reduce-scatter)(?:-start)?\(", text)))


expected = {(2**20,): ["all-reduce"], (64, 128): ["all-reduce"], (65536, 128): ["reduce-scatter"]}
for shape, found in {shape: collective(shape) for shape in expected}.items():
    print(shape, found)
    assert found == expected[shape]
PY
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_HOSTNAMES=localhost "$folder/venv/bin/python" "$folder/run.py"
