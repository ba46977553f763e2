"""Eight CPU devices and one cache of compiled programs for every test, set before JAX starts; what shares compiled
steps runs in one process."""

import os
import re
import tempfile
from collections import Counter

# Nearly all of the suite's time goes into compiling, so LLVM is told not to work hard: the same HLO, slower code.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A run that is stopped and taken up, and every process of several, compiles what has been compiled: a folder that the
# processes started from here inherit, gone with this one; yours, if you name one, is there for the next time.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="jgc-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from hypothesis import settings  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

settings.register_profile("jgc", deadline=None, derandomize=True, max_examples=30)  # JAX compiles for every new shape
settings.load_profile("jgc")


def scope_of(nodeid: str) -> str:
    """A file's tests go to one process, and of the contract suite those of one variant of a method."""
    path, _, test = nodeid.partition("::")
    variant = re.search(r"\[(?:nan-|-inf-)?(.+?)(?:, |-\d device|\])", test)
    return f"{path} {variant[1]}" if path.endswith("test_contract.py") and variant else path


class Together(LoadScopeScheduling):
    """Written here, for `--dist loadgroup` of pytest-xdist 3.8 has no effect with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_collection_modifyitems(items):
    """What has slow tests comes first, then what has many: nothing long is left to run alone at the end."""
    slow = {scope_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    tests = Counter(scope_of(item.nodeid) for item in items)

    def place(item):
        scope = scope_of(item.nodeid)
        return scope not in slow, -tests[scope], scope

    items.sort(key=place)


def pytest_xdist_auto_num_workers(config):
    """One process more than cores: tests of real processes wait for each other, and whole runs for files."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config, log):
    """What shares compiled steps and fixtures runs in one process."""
    return Together(config, log)
