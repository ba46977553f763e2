"""Decoded arrays kept between runs in the user's cache directory.

Decoding CIFAR's 60,000 PNG images takes 6 to 20 s on one core, reading the arrays back 0.1 to 1 s. An entry
is one uncompressed .npz file, never a pickle, that carries the fingerprint of what it was made from. A new
fingerprint replaces the entry, so stale ones do not pile up, and an entry that cannot be read is made again.
The cache is only ever a saving of time: whatever goes wrong with it is logged, and the arrays are returned
all the same.
"""

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray]

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/jgc`, or `~/.cache/jgc` where that is not set, or not absolute.

    Raises:
        RuntimeError: where this user has no home directory.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "jgc"


def place(folder: Path) -> str:
    """12 hexadecimal digits that stand for a folder in the name of an entry: two copies of a data set have two.

    Example:
        >>> place(Path("/data/tiny-imagenet-200"))
        '062f53565660'
    """
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def cached(entry: str, fingerprint: str, make: Callable[[], Arrays]) -> Arrays:
    """What `make()` returns, from the cache where it was made before from the same source.

    Args:
        entry: file name of the entry, without its suffix.
        fingerprint: text that changes whenever `make` would return something else.
        make: takes long; returns arrays by name, none of them called "fingerprint".

    Returns:
        The arrays by name, with their dtypes.

    Raises:
        TypeError: for an array of Python objects, which only pickle could store.

    Example:
        >>> cached("squares", "0 to 3", lambda: {"squares": np.arange(4) ** 2})["squares"]  # doctest: +SKIP
        array([0, 1, 4, 9])
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
    """The entry's arrays; None where there is none, it is of another source, or damaged (zip has a CRC)."""
    try:
        with np.load(path, allow_pickle=False) as entry:
            if str(entry["fingerprint"]) != fingerprint:
                return None
            return {name: entry[name] for name in entry.files if name != "fingerprint"}
    except FileNotFoundError:
        return None
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        _log.warning("cannot read the cache %s, making it again: %s", path, error)
        return None


def _write(path: Path, fingerprint: str, arrays: Arrays) -> None:
    """Write the entry beside its place and move it there, so that no other process ever sees half of one."""
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
            except BaseException:  # an interrupt too must not leave 180 MB behind
                os.unlink(file.name)
                raise
    except OSError as error:
        _log.warning("cannot write the cache %s, the next run decodes again: %s", path, error)
