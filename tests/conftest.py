"""Eight CPU devices for every test, set before JAX starts; what shares compiled steps runs in one process."""

import os
import re

# Nearly all of the suite's time goes into compiling, so LLVM is told not to work hard: the same HLO, slower code.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hypothesis import settings  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

settings.register_profile("jgc", deadline=None, derandomize=True, max_examples=30)  # JAX compiles for every new shape
settings.load_profile("jgc")


class Together(LoadScopeScheduling):
    """A file's tests go to one process, and of the contract suite those of one variant of a method.

    Written here, for `--dist loadgroup` of pytest-xdist 3.8 has no effect with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        path, _, test = nodeid.partition("::")
        variant = re.search(r"\[(?:nan-|-inf-)?(.+?)(?:, |-\d device|\])", test)
        return f"{path} {variant[1]}" if path.endswith("test_contract.py") and variant else path


def pytest_xdist_auto_num_workers(config):
    """One process more than cores: tests of real processes wait for each other, and whole runs for files."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config, log):
    """What shares compiled steps and fixtures runs in one process."""
    return Together(config, log)
