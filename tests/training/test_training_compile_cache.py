"""Compiled programs that a run keeps for its next start."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from jgc.training.steps.compile_cache import FOLDER, folder_of, kept_programs


@pytest.fixture(autouse=True)
def keep_all(monkeypatch):
    """Programs that compile in no time are kept too; no folder is known before."""
    ours = {"min_compile_time_secs": 0.0, "min_entry_size_bytes": -1}
    ours = {f"jax_persistent_cache_{name}": value for name, value in ours.items()}
    ours |= {"jax_compilation_cache_dir": None, "jax_enable_compilation_cache": True}
    before = {name: getattr(jax.config, name) for name in ours}
    for name, value in ours.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def compiled(setting, run_dir, writes=True):
    """The warnings of a compilation in a new process, as far as JAX's memory goes."""
    jax.clear_caches()
    with warnings.catch_warnings(record=True) as said, kept_programs(setting, run_dir, writes):
        warnings.simplefilter("always")
        jax.jit(lambda x: jnp.sin(x) + 1).lower(jnp.ones(3)).compile()
    return [str(warning.message) for warning in said]


def entries(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*-cache")}


@pytest.mark.slow
def test_half_written_program_is_written_anew(tmp_path):
    cache = tmp_path / "cache"
    assert compiled(str(cache), tmp_path) == []
    whole = entries(cache)
    for name, content in whole.items():
        (cache / name).write_bytes(content[: len(content) // 2])
    assert "persistent compilation cache entry" in compiled(str(cache), tmp_path, writes=False)[0]
    assert entries(cache) != whole  # JAX alone leaves it there for good
    assert compiled(str(cache), tmp_path) == []
    assert entries(cache).keys() == whole.keys() and compiled(str(cache), tmp_path, writes=False) == []


def test_folder_of_programs(tmp_path):
    assert compiled("none", tmp_path) == [] and list(tmp_path.iterdir()) == []
    assert compiled("", tmp_path) == [] and entries(tmp_path / FOLDER)
    assert jax.config.jax_compilation_cache_dir is None
    assert folder_of("none", tmp_path) is None


def test_known_folder_stays_but_for_a_setting(tmp_path):
    known, other = tmp_path / "known", tmp_path / "other"
    jax.config.update("jax_compilation_cache_dir", str(known))
    compiled("none", tmp_path)
    assert not known.exists()
    compiled(str(other), tmp_path)
    assert entries(other) and not known.exists()
    compiled("", tmp_path)
    assert entries(known) and jax.config.jax_compilation_cache_dir == str(known)
