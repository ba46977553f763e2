"""The run folder: which run owns it, and atomic writes of its files."""

import io
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from PIL import Image

from jgc.training.errors import UserError, cannot_write
from jgc.training.settings.config import Config, as_json, method_name
from jgc.training.settings.saved_config import completed, differences

CONFIG, METRICS, SUMMARY, CURVES, MASKS = "config.json", "metrics.jsonl", "summary.json", "curves.png", "masks.png"
GRADIENTS, SAMPLE, ROUNDS = "gradients", "sample.txt", "rounds.jsonl"
_TRACES = (CONFIG, METRICS, SUMMARY, "checkpoints", GRADIENTS, ROUNDS)


def choose_run_dir(config: Config) -> Path:
    """The folder of this run. Writes nothing: a run that cannot start leaves nothing behind."""
    stem = f"{method_name(config.compressor)}-{config.workload}-{datetime.now():%Y%m%d-%H%M%S}"
    new = (Path("runs") / f"{stem}{f'-{i}' if i > 1 else ''}" for i in range(1, 1000))
    path = Path(config.run_dir) if config.run_dir else next(path for path in new if not path.exists())
    check_run_dir(path, config)
    return path


def check_run_dir(path: Path, config: Config) -> None:
    """Raise UserError if the folder holds a different run, or has none to resume."""
    found = [name for name in _TRACES if (path / name).exists()]
    if path.exists() and not path.is_dir():
        raise UserError(f"--run-dir {path} is not a folder")
    if not config.resume and found:
        raise UserError(f"{path} already holds a run ({', '.join(found)}): give a different --run-dir, or --resume it")
    if config.resume and not path.is_dir():
        raise UserError(f"nothing to resume: there is no folder {path}")
    if config.resume and found and CONFIG not in found:
        raise UserError(f"nothing to resume: {path} has no {CONFIG}")
    if config.resume and found:
        compare_configs(read_object(path / CONFIG), config, path)


def read_object(path: Path) -> dict[str, Any]:
    """The config.json or summary.json of a run."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"cannot read {path}: it should be an object in braces, and is a {type(found).__name__}")
    return found


def mark_run_dir(path: Path, config: Config) -> None:
    """Create the folder and write the resolved config into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    write_json(path / CONFIG, as_json(config))


def changes_since(old: dict[str, Any], config: Config) -> list[str]:
    """Differences from a run's config.json in settings that must not change; settings added since are no difference."""
    return differences(completed(old), as_json(config))


def compare_configs(old: dict[str, Any], config: Config, where: Path | str) -> None:
    """Raise UserError if a setting that must not change differs from the config that a run was started with."""
    if changed := changes_since(old, config):
        raise UserError(
            f"{where} was made with a different config: {'; '.join(changed)} "
            "(only steps, nodes, folders, intervals and logging may change on --resume)"
        )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader finds the old content or the new."""
    new = path.with_name(f".{path.name}.tmp")
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_figure(path: Path, figure: Any, dpi: int = 110) -> None:
    """Write a matplotlib figure as PNG, atomically, with 256 colours: a third of the bytes."""
    drawn, picture = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    with_palette(drawn).save(picture, format="png", optimize=True)
    write_whole(path, picture.getvalue())


def with_palette(picture: Any) -> Image.Image:
    """A picture, a file or a path, with the 256 colours that suit it."""
    colours = Image.open(picture).convert("RGB")
    return colours.quantize(256, Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE)


def write_json(path: Path, value: Any) -> None:
    """Write plain data as JSON, atomically."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())
