"""Find and read data sets that TensorFlow Datasets (TFDS) has prepared as array_record, without TensorFlow.

Preparing (downloading) needs TensorFlow, once. Reading needs tensorflow-datasets, array_record, and two packages that
it does not declare, importlib_resources and pillow.
"""

import json
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from jgc.training.data.dataset import DamagedDataError, MissingDataError, errors_of, reason, unreadable


def find_prepared(name: str, data_dir: Path, splits: Collection[str]) -> Path:
    """The folder of a data set's newest version that is in array_record format and has all files of the splits."""
    with errors_of(name, fetch_command(name, data_dir)):
        files = sorted((data_dir / name).glob("*.*.*/dataset_info.json"), key=lambda file: _version(file.parent))
        problem = MissingDataError(f"no version of it is in {data_dir / name}")
        for file in reversed(files):
            try:
                _check(file, splits)
            except MissingDataError as error:
                problem = error
            else:
                return file.parent
        raise problem


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise any error inside the block as DamagedDataError: array_record and Pillow raise many types."""
    try:
        yield
    except Exception as error:
        raise DamagedDataError(f"cannot read {what} ({reason(error)})") from error


def fetch_command(name: str, data_dir: Path) -> str:
    """A shell command that downloads and prepares a data set in the expected folder."""
    code = (
        "import tensorflow_datasets as tfds; "
        f'tfds.builder("{name}", data_dir={json.dumps(str(data_dir))}, file_format="array_record")'
        ".download_and_prepare()"
    )
    return f"pip install tensorflow tensorflow-datasets && python -c {shlex.quote(code)}"


def _version(folder: Path) -> tuple[int, ...]:
    """(3, 0, 2) for a folder "3.0.2"; (), which sorts first, for a name that is no version."""
    parts = folder.name.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _check(file: Path, splits: Collection[str]) -> None:
    """Raise MissingDataError if the folder of a dataset_info.json lacks a file of the splits or is not readable."""
    folder, (form, shards) = file.parent, _contents(file)
    if form != "array_record":
        raise MissingDataError(f"{folder} holds {form} files, not array_record")
    for split in splits:
        if split not in shards:
            raise MissingDataError(f"{folder} has no {split} split")
        have = sum(shard.is_file() for shard in folder.glob(f"*-{split}.array_record-*"))
        if have != shards[split]:
            raise MissingDataError(f"{folder} has {have} of the {shards[split]} files of the {split} split")


def _contents(file: Path) -> tuple[str, dict[str, int]]:
    """The file format and the number of files of each split, from a dataset_info.json."""
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    try:
        return info.get("fileFormat", "tfrecord"), {x["name"]: len(x["shardLengths"]) for x in info["splits"]}
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedDataError(f"{file} must list `splits`, each with a `name` and its `shardLengths`") from error
