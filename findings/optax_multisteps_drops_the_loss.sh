#!/usr/bin/env bash
# Finding: optax.MultiSteps passes the loss (`value=`) to its optimiser when it is called, and loses it inside optax.chain.
#
# Versions: optax 0.2.8, jax 0.10.2, CPU.
# Guess:    an optimiser that needs value= (optax.contrib.momo, polyak_sgd) works inside MultiSteps wherever MultiSteps works.
# Seen:     MultiSteps(momo, 1).update(g, s, p, value=1.0), and the same of .gradient_transformation(): right.
#           chain(clip(1.0), MultiSteps(momo, 1).gradient_transformation()) and with_extra_args_support(...):
#           "TypeError: momo.<locals>.update_fn() missing 1 required keyword-only argument: 'value'".
# Why:      gradient_transformation() returns a plain GradientTransformation, although its update takes extra arguments, and
#           every wrapper drops them for that type.
# Cure:     optax.GradientTransformationExtraArgs(tx.init, tx.update) around it.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "optax==0.2.8"
cat > "$folder/run.py" <<'PY'
import jax.numpy as jnp
import optax

p = g = jnp.ones(3)
steps = optax.MultiSteps(optax.contrib.momo(0.1), 1)
plain = steps.gradient_transformation()
cured = optax.GradientTransformationExtraArgs(plain.init, plain.update)


def takes_the_loss(tx):
    try:
        tx.update(g, tx.init(p), p, value=1.0)
    except TypeError as error:
        assert "missing 1 required keyword-only argument: 'value'" in str(error), error
        return False
    return True


for name, tx, expected in (
    ("MultiSteps", steps, True),
    ("gradient_transformation()", plain, True),
    ("chain", optax.chain(optax.clip(1.0), plain), False),
    ("with_extra_args_support", optax.with_extra_args_support(plain), False),
    ("chain, as GradientTransformationExtraArgs", optax.chain(optax.clip(1.0), cured), True),
):
    print(f"{name}: {'takes' if takes_the_loss(tx) else 'loses'} the loss")
    assert takes_the_loss(tx) == expected
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/run.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
