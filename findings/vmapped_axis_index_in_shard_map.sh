#!/usr/bin/env bash
# Finding: lax.axis_index of a vmapped axis fails inside jax.shard_map once a nested jit, lax.cond or a loop uses it.
#
# Versions: jax 0.10.2 and 0.12.0.1, CPU with two virtual devices.
# Guess:    `vmap(f, axis_name="v")` inside shard_map (check_vma=True, the default) gives the same with `jax.jit(f)` as with f.
# Seen:     f itself gives [0, 2, 2, 4]. With jit, cond or fori_loop around the addition a bare AssertionError without a
#           message: the index is typed as varying over "v", which is no axis of the mesh. A jit that only returns the
#           index, and a switch over it, work.
# Cure:     check_vma=False, or add the index outside of the nested function: [0, 2, 2, 4].
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

print("jax", jax.__version__)
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))


def result(f, check):
    inside = jax.shard_map(
        jax.vmap(f, axis_name="v"), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check
    )
    try:
        return jax.jit(inside)(jnp.arange(4.0)).tolist()
    except AssertionError as error:
        return f"AssertionError{str(error)!r}"


WORK = {
    "plain": lambda x: x + lax.axis_index("v"),
    "a jit that returns it": lambda x: x + jax.jit(lambda: lax.axis_index("v"))(),
}
FAIL = {
    "jit": lambda x: jax.jit(lambda y: y + lax.axis_index("v"))(x),
    "cond": lambda x: lax.cond(x >= 0, lambda: x + lax.axis_index("v"), lambda: x),
    "fori_loop": lambda x: lax.fori_loop(0, 1, lambda _, y: y + lax.axis_index("v"), x),
}
right = [0.0, 2.0, 2.0, 4.0]
for name, f in (WORK | FAIL).items():
    checked, unchecked = result(f, True), result(f, False)
    print(f"{name}: {checked}; check_vma=False: {unchecked}")
    assert unchecked == right
    assert checked == (right if name in WORK else "AssertionError''")
PY
ran=0
for version in 0.10.2 0.12.0.1; do
  python=python3
  if [ "$version" = 0.12.0.1 ]; then  # needs Python 3.12
    python=$(command -v python3.12) || continue
  fi
  "$python" -m venv "$folder/$version" || continue
  "$folder/$version/bin/pip" install --quiet "jax==$version"
  JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 "$folder/$version/bin/python" "$folder/run.py"
  ran=$((ran + 1))
done
test $ran -gt 0
