"""train.py's command line: a method or a config file, a workload, options. Errors are one line and an exit code."""

import dataclasses
import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jgc.compress import METHODS
from jgc.compress.registry import FIRST
from jgc.training.data import MissingDataError
from jgc.training.data.dataset import reason
from jgc.training.errors import FAILED, UserError, briefly, did_you_mean, leave_stdout, say, values_of_the_user
from jgc.training.models import MODELS, make_model
from jgc.training.requirements import explain
from jgc.training.settings.config import Config, layers_of, method_name, resolve
from jgc.training.settings.field_types import wrong_value
from jgc.training.settings.options import read
from jgc.training.settings.workloads import workload_named
from jgc.training.steps.deterministic import set_flags

CONFIGS = Path("configs")
PROGRAM = "python train.py"
DEFAULT_METHOD = "lgc_ps"  # whose options --help shows if none is named


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run what the command line asks for and return the exit code; `program` is its name in messages."""
    argv = list(sys.argv[1:] if argv is None else argv)
    quiet()

    def run_it() -> int:
        config = parse(argv, program)
        if config.deterministic:
            set_flags()
        from jgc.training.run.loop import run

        return run(config, resume_command(argv, program))

    return in_company(run_it)


def in_company(action: Callable[[], int]) -> int:
    """`exit_code_of`, but a process of a team exits hard on failure: JAX's shutdown would wait for the others."""

    def started() -> bool:
        return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()

    try:
        code = exit_code_of(action)
    except Exception:
        if not started():
            raise
        say(traceback.format_exc())
        code = FAILED
    if code and started():
        briefly(sys.stdout.flush)
        os._exit(code)
    return code


def exit_code_of(action: Callable[[], int]) -> int:
    """Run `action`; on a known error print one line and return the error's exit code."""
    try:
        return action()
    except UserError as error:
        say(f"error: {error}")
        return error.exit_code
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        say("interrupted: what was saved before stays")
        return 130
    except MissingDataError as error:
        say(f"error: {error}")
    except ModuleNotFoundError as error:
        say(explain(error))
    except MemoryError as error:
        say(f"error: out of memory ({error}): fewer examples in a step, or a smaller model, may fit")
    except BrokenPipeError:
        leave_stdout()
        say("error: nobody reads standard output any more")
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        say(f"error: {where}{reason(error)}")
    return FAILED


def quiet() -> None:
    """Silence the logs of TensorFlow, gRPC, absl and Orbax."""
    import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("orbax").setLevel(logging.ERROR)
    sys.unraisablehook = _drop_closed_loops


def _drop_closed_loops(unraisable: Any) -> None:
    """Ignore "Event loop is closed": after a failed write of Orbax, Python would print it for every callback."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def parse(argv: Sequence[str], program: str = PROGRAM) -> Config:
    """The resolved config for a command line."""
    path, rest = _take(argv, "--config")
    method, rest = _take(rest, "--method")
    wants_help = any(word in ("-h", "--help") for word in rest)
    if path is None and method is None:
        for name in (word.partition("=")[0] for word in rest):  # --method or --config with a typing error
            if hint := did_you_mean(name, ["--method", "--config"], cutoff=0.85):
                raise UserError(f"unknown option {name}{hint}")
        method = DEFAULT_METHOD if wants_help else None
    config = given_config(None if path is None else Path(path), method)
    workload, _ = _take(rest, "--workload")
    bucket, _ = _take(rest, "--rounds.bucket")
    of_file = config.layers.dense
    if workload is not None:
        config = dataclasses.replace(config, workload=workload)
    rounds: dict[str, Any] = {} if bucket is None else {"bucket": bucket}
    rounds |= {"overlap": True} if "--rounds.overlap" in rest else {}
    rounds |= {"outer": "adamw"} if _take(rest, "--rounds.outer")[0] == "adamw" else {}
    config = dataclasses.replace(config, rounds=dataclasses.replace(config.rounds, **rounds))
    several = any(word.startswith(("--distributed.coordinator", "--distributed.auto")) for word in rest)
    with values_of_the_user():
        config = resolve(config, several)
    return with_options(config, rest, of_file, program)


def with_options(config: Config, argv: Sequence[str], dense: str | None = None, program: str = PROGRAM) -> Config:
    """A resolved config changed by the options of a command line; `dense`: --layers.dense of a config file."""
    kind: Any = Config[type(config.compressor)]  # type: ignore[misc]
    about = ABOUT.format(program=program, methods=", ".join(METHODS), method=method_name(config.compressor))
    changed: Config = read(kind, argv, program, config, about)
    asked, model = _take(argv, "--layers.dense")[0], changed.model.name
    # as a method's default it passes
    if (dense if asked is None else asked) == FIRST and model in MODELS and not make_model(model, 1).first_layer:
        raise UserError(
            f"--layers.dense {FIRST} does nothing here: {model} begins with an embedding and has no first layer: "
            "give a pattern of layers, or leave the option out"
        )
    workload = workload_named(changed.workload)
    named = [name for name in ("optimizer", "schedule") if getattr(changed, name) == "workload"]  # given literally
    filled = {name: getattr(workload, name) for name in named}
    return dataclasses.replace(changed, layers=layers_of(changed, workload), **filled)


def _take(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The last value of an option, and the command line without it."""
    value, rest, words = None, [], iter(argv)
    for word in words:
        if word == name:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise UserError(f"{name} needs a value")
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def given_config(path: Path | None, method: str | None) -> Config:
    """The config of a file, or the default one of a method."""
    if path is not None and method is not None:
        raise UserError(f"give --config {path} or --method {method}, not both")
    if path is not None:
        return load_config(path)
    if method is None:
        raise UserError(f"give --method NAME or --config FILE; methods are {', '.join(METHODS)}")
    if method not in METHODS:
        raise UserError(f"unknown method {method!r}{did_you_mean(method, list(METHODS))} (one of {', '.join(METHODS)})")
    return Config(compressor=METHODS[method].settings())


def load_config(path: Path) -> Config:
    """The result of a config file's `get_config()`."""
    if not path.is_file():
        folder = path.parent if path.parent != Path() and path.parent.is_dir() else CONFIGS
        known = sorted(str(file) for file in folder.glob("*.py") if not file.name.startswith("_"))
        close = did_you_mean(path.stem, [Path(name).stem for name in known])
        raise UserError(f"no config file {path}{close} (there are {', '.join(known) or 'none'})")
    spec = importlib.util.spec_from_file_location(f"jgc_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config takes a Python file such as configs/diloco.py, got {path}")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit(0) would end the command without a word
        raise UserError(f"config file {path} does not work: {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise UserError(
            f"get_config() of {path} must return a jgc.training.settings.config.Config, got {type(config).__name__}"
        )
    if wrong := wrong_value(config):
        raise UserError(f"config file {path}: {wrong}")
    return config


ABOUT = """Train a network with compressed gradients; ends with a table of accuracy, time and bytes by phase.

--method NAME names the method, one of {methods}. Alternatively, --config FILE is a Python file whose get_config()
returns a Config. The defaults below are for {method} and its workload; --method NAME --help shows NAME's.

    {program} --method lgc_ps

                                               leader    worker   leader   worker
     phase        steps   accuracy   s/step        up        up    ratio    ratio
     dense           20    78.89 %    0.085   1.56 MB   1.56 MB       1x       1x
     top-k           40    95.28 %    0.063   3.29 kB   3.29 kB   473.4x   473.4x
     compressed     240    97.78 %    0.056   2.39 kB   1.99 kB   651.2x     782x

Settings, metrics, checkpoints and pictures go to --run-dir; --resume goes on with a run that was stopped."""


def resume_command(argv: Sequence[str], program: str = PROGRAM) -> str:
    """The command that resumes this run, with `{run_dir}` for its folder."""
    _, rest = _take(argv, "--run-dir")
    words = [word for word in rest if word not in ("--resume", "--no-resume")]
    return f"{program} {shlex.join(words)} --run-dir {{run_dir}} --resume".replace("  ", " ")
