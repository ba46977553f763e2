"""The tests that fit on one GPU: `JGC_TESTS_ON=gpu python -m pytest`. conftest.py calls these functions.

`JGC_TESTS_ON=cpu` runs the same tests on one CPU device, to try this file out where there is no GPU.
"""

import os
import re
from pathlib import Path

import pytest

PLATFORMS = {"gpu": "cuda,cpu", "cpu": "cpu"}  # JAX computes on the first; callbacks into Python need a CPU, too
MARKERS = "not slow and not targets"  # the contract suite's layout of one device is `exhaustive`
# What methods compute, file by file. Loops, layouts, saving and messages of errors are the same on every device.
FILES = frozenset(
    f"test_{name}.py"
    for name in (
        "contract powersgd quantizers top_k chunks select values sums top_k_digits rounding memory pack squares "
        "wire_bits wire_elias_fano sparse_methods gradiveq klt egc learned_topk lgc_ps lgc_ring guard ages optax trees"
    ).split()
)
# Tests of these files that look at collectives between devices.
SEVERAL_DEVICES = frozenset(
    "test_step_has_two_all_reduces test_step_without_factored_layers_has_one_all_reduce test_qsgd_payload_has_its_bits "
    "test_random_k_sends_no_positions test_compression_overlaps_communication".split()
)


def set_platforms(on: str) -> None:
    """Set JAX's platforms; call it before JAX starts. Anything but "gpu" and "cpu" ends the run with a line."""
    if on not in PLATFORMS:
        raise SystemExit(f"JGC_TESTS_ON must be gpu (or cpu, one device, to try it out), got {on!r}")
    rocm = on == "gpu" and "rocm" in os.environ.get("JAX_PLATFORMS", "")
    os.environ["JAX_PLATFORMS"] = "rocm,cpu" if rocm else PLATFORMS[on]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the card


def begin(on: str, config: pytest.Config) -> None:
    """End the run with a line if there is no such device; take tests of all markers, unless the user gave -m."""
    import jax

    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:  # JAX's line on the platform that it did not get
        platform = str(error).splitlines()[0]
    if platform != on:
        pytest.exit(f"JGC_TESTS_ON=gpu needs a GPU, and JAX has none here: {platform}", returncode=2)
    if not any(word.startswith("-m") for word in config.invocation_params.args):
        config.option.markexpr = MARKERS


def leave_out_the_rest(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect other files, layouts of several devices, and tests that look at collectives between devices."""

    def fits(item: pytest.Item) -> bool:
        name = getattr(item, "originalname", item.name)
        several = name in SEVERAL_DEVICES or re.search(r"\b[2-9] devices\b", item.nodeid)
        return Path(item.path).name in FILES and not several

    config.hook.pytest_deselected(items=[item for item in items if not fits(item)])
    items[:] = [item for item in items if fits(item)]
