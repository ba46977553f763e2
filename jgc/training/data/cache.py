"""A cache of decoded arrays in the user's cache directory.

Decoding CIFAR's 60,000 PNG images takes 6 to 20 s on one core, reading the arrays back 0.1 to 1 s. An entry is one
uncompressed .npz file, never a pickle, with a fingerprint of its source. An entry with a different fingerprint, or one
that cannot be read, is replaced. Errors of the cache are logged and never raised.
"""

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray]

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/jgc`, or `~/.cache/jgc` if that is unset or not absolute. Raises RuntimeError without a home."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "jgc"


def folder_hash(folder: Path) -> str:
    """12 hexadecimal digits of a folder's path, for the name of an entry: two copies of a data set get two entries."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def fingerprint_of(folder: Path, files: Iterable[Path], *more: object) -> str:
    """A checksum of a folder's path, of path, size and modification time of files, and of further values."""
    digest = hashlib.sha256(f"{folder} {more}".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cached(entry: str, fingerprint: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays by name that `make()` returns, read from the cache if the entry has this fingerprint.

    Args:
        entry: file name of the entry, without suffix.
        fingerprint: text that changes whenever the result of `make` would.
        make: returns arrays of plain dtypes by name, none of them called "fingerprint".
    """
    try:
        path = cache_dir() / f"{entry}.npz"
    except RuntimeError as error:
        _log.warning("no cache for %s: %s", entry, error)
        return make()
    arrays = _read(path, fingerprint)
    if arrays is None:
        arrays = make()
        _write(path, fingerprint, arrays)
    return arrays


def _read(path: Path, fingerprint: str) -> Arrays | None:
    """The entry's arrays; None if it is absent, damaged (zip has a CRC) or has a different fingerprint."""
    try:
        with np.load(path, allow_pickle=False) as entry:
            if str(entry["fingerprint"]) != fingerprint:
                return None
            return {name: entry[name] for name in entry.files if name != "fingerprint"}
    except FileNotFoundError:
        return None
    except (OSError, EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        _log.warning("cannot read the cache %s, making it again: %s", path, error)
        return None


def _write(path: Path, fingerprint: str, arrays: Arrays) -> None:
    """Write the entry atomically: a different process sees all of it or nothing."""
    objects = [name for name, array in arrays.items() if array.dtype.hasobject]
    if objects:
        raise TypeError(f"arrays in the cache must have a plain dtype, got objects in {', '.join(objects)}")
    entry: dict[str, Any] = {"fingerprint": np.array(fingerprint), **arrays}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}.", delete=False) as file:
            try:
                np.savez(file, **entry)
                file.close()
                os.replace(file.name, path)
            except BaseException:  # also on Ctrl-C: an entry has 180 MB and more
                os.unlink(file.name)
                raise
    except OSError as error:
        _log.warning("cannot write the cache %s, the next run decodes again: %s", path, error)
