"""Compiled programs that a run keeps for its next start (`--compile-cache`), in JAX's persistent cache.

JAX writes entries in place. A process that is killed meanwhile leaves a truncated entry that JAX rejects at every start
and never rewrites: such entries are deleted.
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
    """Keep the block's compiled programs, and use the ones that earlier starts kept.

    Without a `setting` (--compile-cache), a folder that JAX has already (JAX_COMPILATION_CACHE_DIR) stays in use.
    `writes`: whether this process may delete entries.
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
    """Delete truncated entries, except those compressed differently, by an environment with or without zstd."""
    from jax._src.compilation_cache import compress_executable, decompress_executable

    mark = compress_executable(b"")[:1]
    for entry in folder.glob("*-cache"):
        try:
            if (content := entry.read_bytes())[:1] in (mark, b""):
                decompress_executable(content)
        except Exception:  # zlib's or zstd's own
            entry.unlink(missing_ok=True)
