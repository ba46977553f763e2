"""`--deterministic`: flags for GPUs that are set before JAX starts."""

import subprocess
import sys

import pytest

from jgc.training.steps import deterministic
from jgc.training.steps.deterministic import FLAGS, note, set_flags

ALL = " ".join(f"{name}={value}" for name, value in FLAGS.items())


@pytest.mark.parametrize(
    ("platforms", "plugins", "given", "flags"),
    [
        ("", ["xla_cuda12"], "", ALL),
        ("cuda,cpu", [], "--xla_dump_to=x", f"--xla_dump_to=x {ALL}"),
        ("cuda", [], "--xla_gpu_autotune_level=1", "--xla_gpu_autotune_level=1 --xla_gpu_deterministic_ops=true"),
        ("", [], "--xla_dump_to=x", "--xla_dump_to=x"),  # no GPU: unchanged
        ("cpu", ["xla_cuda12"], "", ""),
        ("tpu", ["xla_cuda12"], "", ""),  # libtpu would end the process
        ("", ["xla_cuda12", "libtpu"], "", ""),  # JAX would start libtpu first
    ],
)
def test_flags_are_added_to_those_of_the_user(platforms, plugins, given, flags, monkeypatch):
    entries = [type("Plugin", (), {"name": name}) for name in plugins if name != "libtpu"]
    monkeypatch.setattr(deterministic, "entry_points", lambda group: entries)
    monkeypatch.setattr(deterministic, "find_spec", lambda name: "libtpu" if "libtpu" in plugins else None)
    environment = {"JAX_PLATFORMS": platforms, "XLA_FLAGS": given}
    set_flags(environment)
    assert environment["XLA_FLAGS"] == flags


def test_the_command_sets_flags_that_xla_knows_before_jax_starts():
    """An unknown flag ends the process."""
    code = f"""
import os
os.environ["JAX_PLATFORMS"] = "cuda"
from jgc.training.settings import cli
from jgc.training.run import loop
def run(config, command):
    from jax._src import xla_bridge
    assert config.deterministic and not xla_bridge.backends_are_initialized()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    jax.config.update("jax_platforms", "cpu")
    assert {ALL!r} in os.environ["XLA_FLAGS"] and float(jax.jit(lambda x: x + 1)(1.0)) == 2
    return 0
loop.run = run
raise SystemExit(cli.main(["--method", "topk", "--deterministic"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_run_says_what_its_bits_depend_on():
    assert note(True, False, "gpu", ALL) == note(True, True, "gpu", ALL) == note(False, False, "gpu", "") == ""
    assert note(False, True, "cpu", "") == ""
    assert note(True, False, "cpu", "") == "note: --deterministic does nothing on CPU: it sets flags for GPUs"
    assert "began with --deterministic" in note(False, True, "gpu", "")
    other = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=4"  # the user's, which stays
    assert "needs --xla_gpu_autotune_level=0 in XLA_FLAGS" in note(True, False, "gpu", other)
