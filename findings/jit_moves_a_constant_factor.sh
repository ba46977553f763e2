#!/usr/bin/env bash
# Finding: jit multiplies a constant into the smaller of two factors, so a product of normal floats becomes 0.
#
# Versions: jax 0.10.2 on CPU; 0.12.0.1 does not.
# Guess:    XLA keeps the order of floating-point products: `x / 2 * s` is (x / 2) * s under jit as without it.
# Seen:     f32[4] of 64 and f32[1] of 2^-126, the smallest normal float: 3.76e-37 without jit, 0 with it. The compiled
#           program computes x * (s * 0.5), where s * 0.5 is subnormal and flushed to 0. With a constant that is not a power
#           of two the last bits differ: 0.1 * x * s for 1,000 random x, in 288 of the results.
# Cure:     factors whose products with the constants nearby are normal; two operands of equal shape keep their order.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

moves = jax.__version__ == "0.10.2"
print("jax", jax.__version__)


def half(x, s):
    return x / 2 * s


x, s = jnp.full(4, 64.0), jnp.full(1, 2.0**-126)
plain, jitted, whole = half(x, s)[0], jax.jit(half)(x, s)[0], jax.jit(half)(x, jnp.repeat(s, 4))[0]
print(f"x / 2 * s: {plain:.3g}, jit: {jitted:.3g}, jit with s of x's shape: {whole:.3g}")
assert plain == whole == 2.0**-121 and jitted == (0 if moves else plain)


def tenth(x, s):
    return 0.1 * x * s


x, s = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32), jnp.full(1, 0.3)
differ = int((tenth(x, s) != jax.jit(tenth)(x, s)).sum())
print(f"0.1 * x * s: {differ} of 1000 results differ under jit")
assert (differ > 100) == moves
PY
ran=0
for version in 0.10.2 0.12.0.1; do
  python=python3
  if [ "$version" = 0.12.0.1 ]; then  # needs Python 3.12
    python=$(command -v python3.12) || continue
  fi
  "$python" -m venv "$folder/$version" || continue
  "$folder/$version/bin/pip" install --quiet "jax==$version"
  JAX_PLATFORMS=cpu "$folder/$version/bin/python" "$folder/run.py"
  ran=$((ran + 1))
done
test $ran -gt 0
