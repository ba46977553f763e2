#!/usr/bin/env bash
# Finding: processes on CPU that come to their first collective more than 30 s apart fail; to any later one, they wait.
#
# Versions: jax 0.10.2 (also 0.12.0.1), CPU, Gloo, two processes of jax.distributed.
# Guess:    a collective waits for the slowest process, as between GPUs, or for the time that one gave to
#           jax.distributed.initialize (initialization_timeout, heartbeat_timeout_seconds: both 600 s below).
# Seen:     with one process 40 s late at its first psum both end after 30 s: "Gloo context initialization failed:
#           DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:gloo/...". With a psum before, 40 s do nothing. XLA
#           connects the devices of a collective when it first runs, and a second group of devices connects anew.
#           Training that computes for long before it first communicates (local steps, one late checkpoint) meets it.
# Cure:     a barrier, or a small psum over the same devices, where all processes are together.
# Exits with 0 if all of this is still so. Takes two minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/run.py" <<'PY'
import os
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

process, port, before = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", 2, process, initialization_timeout=600, heartbeat_timeout_seconds=600
)
mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), jnp.ones(1))
psum = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
psum = psum.lower(x).compile()
for _ in range(before):
    psum(x).block_until_ready()
if process:
    time.sleep(40)
began = time.monotonic()
try:
    print("psum", float(psum(x)[0]), flush=True)
except jax.errors.JaxRuntimeError as error:
    print(f"after {time.monotonic() - began:.0f} s:", str(error)[:120], flush=True)
    os._exit(3)  # without the barrier of a regular end, to which the other one does not come
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2"
export JAX_PLATFORMS=cpu
together() { # PORT, number of collectives before: the exit status of process 0
  "$folder/venv/bin/python" "$folder/run.py" 1 "$1" "$2" > "$folder/other" 2>&1 &
  "$folder/venv/bin/python" "$folder/run.py" 0 "$1" "$2" 2> /dev/null
}
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
echo "with a collective before:"
together "$port" 1 | tee "$folder/later"
wait
grep -q "psum 2.0" "$folder/later"
echo "without:"
(together "$((port + 1))" 0 || true) | tee "$folder/first"
grep -q "after 30 s: .*Gloo context initialization failed: DEADLINE_EXCEEDED" "$folder/first"
