"""`import jgc` loads little beyond JAX."""

import subprocess
import sys

PROGRAM = """
import sys
import jax
packages = lambda: {name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names
before = packages()
import jgc
jgc.compress.topk(), jgc.compress.as_optax
print(*sorted(packages() - before))
"""


def test_import_loads_no_package_that_jax_does_not_load_itself():
    """Flax takes 0.15 s and optax 0.1 s: functions that use them import them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["jgc"]
