#!/usr/bin/env bash
# Finding: the reverse-mode gradient of an adaptive diffrax solve fails inside jax.shard_map, on any number of devices.
#
# Versions: jax 0.10.2 (also 0.12.0.1), equinox 0.13.8, diffrax 0.7.2, CPU with two virtual devices.
# Guess:    a function of one device's arrays has the same gradient inside shard_map (check_vma=False, no collectives) as
#           outside of it, and as under vmap.
# Seen:     outside and under vmap 3.9638; inside shard_map
#           "ValueError: Closure-converted function called with different dynamic arguments to the example arguments
#           provided", whose two lists print the same shapes and dtypes: Equinox compares the arrays' shardings as well,
#           and inside the map an array's sharding names the mesh. With check_vma=True it is a TypeError on the carry's type.
# Cure:     trace the gradient outside of the map (jax.make_jaxpr), and evaluate the jaxpr inside: 3.9638.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "equinox==0.13.8" "diffrax==0.7.2"
cat > "$folder/run.py" <<'PY'
import diffrax
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P


def loss(w, y):
    def end(y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, _: jnp.tanh(w @ y)), diffrax.Tsit5(), 0.0, 1.0, 0.1, y,
            stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
        )
        return solution.ys

    return jnp.mean(jax.vmap(end)(y) ** 2)


def gradient(w, y):
    return jax.value_and_grad(loss)(w, y)


def mapped(function, check):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    on_device = lambda w, y: jax.tree.map(lambda a: a[None], function(w, y))
    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=check))


w, y = jnp.ones((2, 2)), jnp.ones((4, 2))
outside = float(gradient(w, y)[0])
under_vmap = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(w, y.reshape(2, 2, 2))[0]
print("outside", outside, "under vmap", under_vmap)
assert abs(under_vmap - outside).max() < 1e-5
for check, kind in ((False, ValueError), (True, TypeError)):
    try:
        mapped(gradient, check)(w, y)
    except kind as error:
        print(f"shard_map, check_vma={check}: {kind.__name__}: {str(error).splitlines()[0]}")
    else:
        raise SystemExit("it works now")
traced = jax.make_jaxpr(gradient)(w, y[:2])
inside = mapped(lambda w, y: jax.core.eval_jaxpr(traced.jaxpr, traced.consts, w, y), False)(w, y)[0]
print("traced outside, evaluated inside", inside)
assert abs(inside - outside).max() < 1e-5
PY
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 "$folder/venv/bin/python" "$folder/run.py"
