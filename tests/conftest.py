"""Eight CPU devices for every test, set before JAX starts."""

import os

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hypothesis import settings  # noqa: E402

settings.register_profile("jgc", deadline=None, derandomize=True, max_examples=30)  # JAX compiles for every new shape
settings.load_profile("jgc")
