"""Compiled programs that a run keeps for its next start (`--compile-cache`), in JAX's own persistent cache.

JAX writes entries in place. A process that is killed meanwhile leaves a part of one, which JAX would complain of at
every later start and never write anew: such entries go.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

NONE = "none"
FOLDER = "programs"  # in the run folder


@contextmanager
def kept_programs(setting: str, run_dir: Path, writes: bool) -> Iterator[None]:
    """Keep what is compiled in the block, and take what an earlier start has compiled.

    A folder that JAX has already been told of, as by JAX_COMPILATION_CACHE_DIR, stays where there is no setting.

    Args:
      setting: --compile-cache.
      run_dir: of the run.
      writes: whether this process may delete entries.
    """
    before: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if before is not None and not setting:
        yield
        return
    folder = folder_of(setting, run_dir)
    if folder is not None and writes:
        drop_damaged(Path(folder))
    _set(folder)
    try:
        yield
    finally:
        _set(before)


def _set(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    reset_cache()  # JAX opens its cache once, and would go on with the folder of an earlier run


def folder_of(setting: str, run_dir: Path) -> str | None:
    """Where programs are kept; None for nowhere."""
    if setting:
        return None if setting == NONE else setting
    return str(run_dir / FOLDER)


def drop_damaged(folder: Path) -> None:
    """Delete the entries that a killed process has left half-written.

    Entries of another compression stay: another environment, with zstd or without, may have made them.
    """
    from jax._src.compilation_cache import compress_executable, decompress_executable

    mark = compress_executable(b"")[:1]
    for entry in folder.glob("*-cache"):
        try:
            if (content := entry.read_bytes())[:1] in (mark, b""):
                decompress_executable(content)
        except Exception:  # zlib's or zstd's own
            entry.unlink(missing_ok=True)
