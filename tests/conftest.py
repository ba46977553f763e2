"""Eight CPU devices for every test, set before JAX starts; what shares compiled steps runs in one process."""

import os

# Nearly all of the suite's time goes into compiling, so LLVM is told not to work hard: the same HLO, slower code.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("jgc", deadline=None, derandomize=True, max_examples=30)  # JAX compiles for every new shape
settings.load_profile("jgc")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A group of `--dist loadgroup` for each file, and in the contract suite for each variant of a method."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        variant = params["case"].variant if "case" in params else params.get("name", "")
        group = f"{item.path.name} {variant}" if item.path.name == "test_contract.py" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
