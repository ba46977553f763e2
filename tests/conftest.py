"""Eight CPU devices for every test, set before JAX starts; what shares compiled steps runs in one process."""

import os

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
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
