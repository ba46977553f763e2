#!/usr/bin/env bash
# Finding: optax 0.2.7 cannot be imported with JAX 0.10.2, although its metadata allow it; optax 0.2.6 and 0.2.8 can.
#
# Versions: optax 0.2.6, 0.2.7 and 0.2.8, jax 0.10.2, CPU.
# Guess:    pip installs optax 0.2.7 next to JAX 0.10.2 and `pip check` finds no fault, so `import optax` works, and a
#           requirement of optax>=0.2.6 is safe.
# Seen:     optax 0.2.7 sets the option jax_pmap_shmap_merge where it is imported. JAX has removed the option:
#           AttributeError: Unrecognized config option: jax_pmap_shmap_merge. 0.2.6 does not set it, 0.2.8 no longer does.
# Cure:     optax>=0.2.8. Who upgrades JAX alone keeps optax 0.2.7 and meets the error.
# Exits with 0 if all of this is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
export JAX_PLATFORMS=cpu
for version in 0.2.6 0.2.7 0.2.8; do
  "$folder/venv/bin/pip" install --quiet "jax==0.10.2" "optax==$version"
  "$folder/venv/bin/pip" check > /dev/null
  if "$folder/venv/bin/python" -W ignore -c "import optax" 2> "$folder/error.txt"; then
    told=imported
  else
    told=$(tail -n 1 "$folder/error.txt")
  fi
  echo "optax $version: $told"
  case $version in
    0.2.7) [ "$told" = "AttributeError: Unrecognized config option: jax_pmap_shmap_merge" ] ;;
    *) [ "$told" = imported ] ;;
  esac
done
