#!/usr/bin/env bash
# Finding: the "AdamW" of optax.contrib.muon, for parameters that are no matrices, is NAdamW: its first step is 1.47 times
# the learning rate.
#
# Versions: optax 0.2.8, jax 0.10.2, CPU.
# Guess:    with optax.contrib.muon(rate) biases, norms and whatever is left to Adam move as with optax.adamw(rate): the
#           documentation says that they are "passed through an AdamW optimizer".
# Seen:     nesterov=True, which Muon's momentum needs, goes to that AdamW as well. A constant gradient moves a bias by
#           -1.4737, -1.1573, -1.0782 times the rate; optax.adamw by -1, -1, -1. Equal to adamw(nesterov=True).
# Cure:     optax.partition with optax.contrib.muon for the matrices and optax.adamw for the rest.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "optax==0.2.8"
cat > "$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import optax

RATE = 0.1
params = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
grads = jax.tree.map(jnp.ones_like, params)


def steps(tx):
    """What the first three updates do to a value of the bias, in units of the rate."""
    state, moved = tx.init(params), []
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        moved.append(float(updates["bias"][0]) / RATE)
    return np.array(moved)


options = {"b1": 0.9, "b2": 0.999, "weight_decay": 0.0}
results = {
    "muon": steps(optax.contrib.muon(RATE)),
    "adamw": steps(optax.adamw(RATE, **options)),
    "adamw, nesterov=True": steps(optax.adamw(RATE, nesterov=True, **options)),
}
for name, moved in results.items():
    print(f"{name}: {moved.round(4).tolist()}")
np.testing.assert_allclose(results["adamw"], -1, rtol=1e-4)
np.testing.assert_allclose(results["muon"], results["adamw, nesterov=True"], rtol=1e-4)
assert results["muon"][0] < -1.4
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/run.py"
