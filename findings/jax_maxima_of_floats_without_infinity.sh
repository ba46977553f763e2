#!/usr/bin/env bash
# Finding: JAX starts some maxima from -inf, which is NaN in types without infinity: max(), argmax() and cummax() of
# float8_e8m0fnu, the scales of MXFP8 and MXFP4, are wrong; so are softmax and segment_max of float8_e4m3fn.
#
# Versions: jax 0.10.2 (also 0.12.0.1), ml_dtypes 0.6.0, CPU.
# Guess:    the maximum of some powers of two is one of them, in every type, as NumPy with ml_dtypes says.
# Seen:     scales [4, 16, 0.5, 2] in float8_e8m0fnu: jnp.max nan, jnp.argmax 0, lax.cummax nan at all four, and nan from
#           segment_max and from pmax over a vmapped axis. jnp.sort, lax.top_k, jnp.maximum and .at[].max are right.
#           [4, -16, 0.5, 2] in float8_e4m3fn: jnp.max is right, 4; jax.nn.softmax and segment_max are nan.
#           float8_e8m0fnu has no zero either: jnp.zeros, jnp.pad and what ppermute leaves at a device that nobody sends
#           to are nan, where np.zeros of the same type is 2^-127.
# Cure:     the maximum of the bits as uint8, which order as the scales do, or of the values as float32.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/run.py" <<'PY'
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

scales = np.array([4, 16, 0.5, 2], np.float32).astype(jnp.float8_e8m0fnu)
values = np.array([4, -16, 0.5, 2], np.float32).astype(jnp.float8_e4m3fn)
blocks = jnp.array([0, 0, 1, 1])


def show(name, result, expected):
    result = np.asarray(result).astype(np.float32).ravel()
    print(f"{name}: {result}")
    np.testing.assert_array_equal(result, np.asarray(expected, np.float32).ravel())


nan, one = np.nan, P("i")
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
print("jax", jax.__version__)
show("NumPy: max, argmax", [np.max(scales).astype(np.float32), np.argmax(scales)], [16, 1])
show("e8m0 max", jnp.max(scales), nan)
show("e8m0 argmax", jnp.argmax(scales), 0)
show("e8m0 cummax", jax.lax.cummax(jnp.asarray(scales)), [nan] * 4)
show("e8m0 segment_max", jax.ops.segment_max(jnp.asarray(scales), blocks, 2), [nan] * 2)
show("e8m0 pmax, vmap", jax.vmap(lambda x: jax.lax.pmax(x, "i"), axis_name="i")(jnp.asarray(scales)), [nan] * 4)
show("e8m0 sort", jnp.sort(scales), [0.5, 2, 4, 16])
show("e8m0 top_k", jax.lax.top_k(jnp.asarray(scales), 2)[0], [16, 4])
show("e8m0 maximum", jnp.maximum(scales, scales[::-1]), [4, 16, 16, 4])
show("e8m0 bits as uint8", jnp.argmax(jax.lax.bitcast_convert_type(jnp.asarray(scales), jnp.uint8)), 1)
show("e4m3fn max", jnp.max(values), 4)
show("e4m3fn segment_max", jax.ops.segment_max(jnp.asarray(values), blocks, 2), [nan] * 2)
show("e4m3fn softmax", jax.nn.softmax(jnp.asarray(values)), [nan] * 4)
show("e8m0 jnp.zeros", jnp.zeros(1, scales.dtype), nan)
show("e8m0 np.zeros", np.zeros(1, scales.dtype), 2.0**-127)
show("e8m0 pad", jnp.pad(scales, (1, 0)), [nan, 4, 16, 0.5, 2])
send = jax.shard_map(lambda x: jax.lax.ppermute(x, "i", [(0, 1)]), mesh=mesh, in_specs=one, out_specs=one)
show("e8m0 ppermute", jax.jit(send)(scales), [nan, nan, 4, 16])
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "ml_dtypes==0.6.0"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/run.py"
