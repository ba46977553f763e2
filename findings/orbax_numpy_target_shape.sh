#!/usr/bin/env bash
# Finding: Orbax checks the shape of a restore target that is a JAX array, and ignores that of a NumPy array.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, CPU. StandardCheckpointer, one saved leaf f32[3, 4].
# Guess:    restore(path, target) gives arrays of the target's shapes, or an error that names the leaf.
# Seen:     target jnp.zeros((5, 2)), or jax.ShapeDtypeStruct((5, 2), float32): "ValueError: Requested shape: (5, 2) is not
#           compatible with the stored shape: (3, 4)".
#           target np.zeros((5, 2)), and np.zeros((2, 2)): no error and no warning; the result is a NumPy array (3, 4).
#           The dtype of a NumPy target does count: np.zeros((3, 4), np.int8) casts the floats without a word.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "orbax-checkpoint==0.12.8"
cat > "$folder/run.py" <<'PY'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

path = sys.argv[1]
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, {"w": jnp.arange(12.0).reshape(3, 4) + 0.5})


def restored(target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, {"w": target})["w"]


for target in (jnp.zeros((5, 2)), jax.ShapeDtypeStruct((5, 2), jnp.float32)):
    try:
        restored(target)
    except ValueError as error:
        print(f"{type(target).__name__} (5, 2): ValueError: {str(error)[:80]}")
    else:
        raise SystemExit("a JAX target of another shape is no error any more")
for shape in ((5, 2), (2, 2)):
    x = restored(np.zeros(shape, np.float32))
    print(f"NumPy {shape}: {type(x).__name__} {x.shape}, no error")
    assert isinstance(x, np.ndarray) and x.shape == (3, 4)
x = restored(np.zeros((3, 4), np.int8))
print(f"NumPy int8: {x.dtype} {x.ravel()[:3].tolist()} of 0.5, 1.5, 2.5")
assert x.dtype == np.int8 and x.ravel()[:3].tolist() == [0, 1, 2]
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/run.py" "$folder/checkpoint" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
