"""`JGC_TESTS_ON=gpu`: the tests that fit on one GPU, tried out on one CPU device."""

import os
import subprocess
import sys

import pytest


def pytest_on(device, *words):
    env = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, env=env | {"JGC_TESTS_ON": device}, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_layouts_of_several_devices_are_left_out(request):
    folder = request.config.rootpath / "tests" / "library"
    files = [str(folder / f"test_{name}.py") for name in ("contract", "quantizers", "nodes")]
    ids = pytest_on("cpu", "--co", *files, "-o", "addopts=", "-k", "cast or payload_has_its_bits or node_grads").stdout
    assert "cast/fp8, float8_e4m3, 1 device" in ids
    assert not any(name in ids for name in ("4 devices", "8 devices", "qsgd_payload", "test_nodes"))
    ran = pytest_on("cpu", files[0], "-v", "-k", "conserves and cast")
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("device, line", [("gpu", "needs a GPU, and JAX has none here"), ("gpux", "must be gpu")])
def test_without_a_gpu_the_command_ends_in_one_line(device, line, request):
    import jax

    if device == "gpu" and jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    done = pytest_on(device, str(request.config.rootpath / "tests" / "library" / "test_nodes.py"))
    lines = [x for x in (done.stdout + done.stderr).splitlines() if "JGC_TESTS_ON" in x]
    assert done.returncode != 0 and len(lines) == 1 and line in lines[0], done
