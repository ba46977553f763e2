"""Folders that TensorFlow Datasets has prepared as array_record, found and read without TensorFlow.

Preparing (downloading) needs TensorFlow, once; reading needs tensorflow-datasets, array_record, and the two packages
that it does not declare, importlib_resources and pillow. Nothing is ever downloaded here.
"""

import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jgc.data.dataset import MissingDataError


def find_prepared(name: str, data_dir: Path, splits: Collection[str]) -> Path:
    """The folder of the newest version of a data set that is in array_record format and has all of some splits.

    Args:
        name: TensorFlow Datasets' name of it.
        data_dir: the folder that holds `<name>/<version>`.
        splits: what will be read; a version need not have others.

    Raises:
        MissingDataError: there is none. The line says how to fetch it.
    """
    found = sorted((data_dir / name).glob("*.*.*/dataset_info.json"), key=lambda file: _version(file.parent))
    problem = f"no version of it is in {data_dir / name}"
    for file in reversed(found):
        problem_here = _problem(file.parent, json.loads(file.read_text()), splits)
        if not problem_here:
            return file.parent
        problem = f"{file.parent} {problem_here}"
    raise MissingDataError(f"{name} is missing: {problem}; to fetch it once: {fetch_command(name, data_dir)}")


def fetch_command(name: str, data_dir: Path) -> str:
    """A shell command that downloads and prepares a data set where it was looked for."""
    code = (
        "import tensorflow_datasets as tfds; "
        f'tfds.builder("{name}", data_dir={json.dumps(str(data_dir))}, file_format="array_record")'
        ".download_and_prepare()"
    )
    return f"pip install tensorflow tensorflow-datasets && python -c {shlex.quote(code)}"


def _version(folder: Path) -> tuple[int, ...]:
    """(3, 0, 2) of "3.0.2"; () of a name that is no version, which then sorts first."""
    parts = folder.name.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _problem(folder: Path, info: dict[str, Any], splits: Collection[str]) -> str:
    """Why a prepared folder cannot be read, or ""."""
    if info.get("fileFormat") != "array_record":
        return f"holds {info.get('fileFormat', 'tfrecord')} files, not array_record"
    shards = {split["name"]: len(split["shardLengths"]) for split in info["splits"]}
    for split in splits:
        if split not in shards:
            return f"has no {split} split"
        have = len(list(folder.glob(f"*-{split}.array_record-*")))
        if have != shards[split]:
            return f"has {have} of the {shards[split]} files of the {split} split"
    return ""
