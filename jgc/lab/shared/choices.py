"""Methods, seeds and settings by the names that users type."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jgc.compress import METHODS, Dense, Silent, method_of
from jgc.training.errors import UserError, did_you_mean
from jgc.training.settings.config import GROUPS, Config

CONFIGS: dict[str, type] = {"baseline": Dense, "control": Silent}
"""Methods that go by their part in a comparison as well, which is the name of their config."""
NAMES = {method_of(settings()).name: name for name, settings in CONFIGS.items()}
"""Name of a run's folder by the method's registered name."""
ALL = "all"
FIXED = ("workload", "seed", "run_dir", "resume", "compressor", "distributed", "rounds")


def known_methods() -> dict[str, type]:
    """Settings classes by each name that `--methods` takes."""
    return CONFIGS | {name: method.settings for name, method in METHODS.items()}


def words(values: Sequence[str]) -> list[str]:
    """The entries of a list that is separated by commas, by spaces or by both, each once.

    Example:
      >>> words(["a,b", "c,", "a"])
      ['a', 'b', 'c']
    """
    return list(dict.fromkeys(word.strip() for value in values for word in value.split(",") if word.strip()))


def refuse_given(command: Any, names: Collection[str], why: str) -> None:
    """Raise UserError for an option that was given to a command, a dataclass, and would do nothing there."""
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    for name in names:
        if getattr(command, name) != defaults[name]:
            raise UserError(f"--{name.replace('_', '-')} {why}")


def variants_of(methods: Sequence[str]) -> dict[str, Any]:
    """Each method's default settings by its name; every registered method for the name all.

    Raises:
      UserError: an unknown method, none, or one under two names.
    """
    known = known_methods()
    variants: dict[str, Any] = {}
    for name in METHODS if list(methods) == [ALL] else methods:
        check_method(name, list(known))
        twin = next((other for other in variants if type(variants[other]) is known[name]), None)
        if twin:
            raise UserError(f"{twin} and {name} are the same method: give one of them")
        variants[name] = known[name]()
    if not variants:
        raise UserError(f"--methods names none (one or more of {', '.join(known)})")
    return variants


def check_method(name: str, known: Sequence[str]) -> None:
    """Raise UserError for a name that is not known."""
    if name not in known:
        if name.partition(":")[0] in known and ":" in name:
            raise UserError(f"unknown method {name!r}: only bench network and experiments codecs take settings after "
                            "a colon")  # fmt: skip
        raise UserError(f"unknown method {name!r}{did_you_mean(name, list(known))} (one of {', '.join(known)})")


def settings_from(text: str, others: Sequence[str] = ()) -> Any:
    """The settings of a method from its name, with changes after colons.

    Args:
      text: such as "topk:alpha=0.01:momentum_correction=true".
      others: further names that an error lists.

    Raises:
      UserError: an unknown method or setting, or a value that does not fit.

    Example:
      >>> settings_from("topk:alpha=0.01").alpha
      0.01
    """
    method, *changes = text.split(":")
    if method not in METHODS:
        check_method(method, [*METHODS, *others])
    default = METHODS[method].settings()
    return dataclasses.replace(default, **dict(_change(default, change) for change in changes))


def _change(default: Any, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    fields = [field.name for field in dataclasses.fields(default)]
    if not equals or name not in fields:
        known = f"{did_you_mean(name, fields)}; write one of {', '.join(fields)} as name=value"
        raise UserError(f"unknown setting {text!r}{known}")
    kind = type(getattr(default, name))
    if kind is bool:
        if value not in ("true", "false"):
            raise UserError(f"{name} must be true or false, got {value!r}")
        return name, value == "true"
    try:
        return name, kind(value) if kind in (int, float) else value
    except ValueError:
        raise UserError(f"{name} must be a number such as {getattr(default, name)}, got {value!r}") from None


def registered_name(name: str) -> str:
    """The registry's name of a method, from any name that `--methods` takes.

    Example:
      >>> registered_name("baseline"), registered_name("dgc")
      ('dense', 'dgc')
    """
    return method_of(known_methods()[name]()).name


def seeds_of(values: Sequence[str]) -> list[int]:
    """Seeds as whole numbers.

    Raises:
      UserError: one of them is no whole number, or there are none.
    """
    seeds = words(values)
    bad = next((word for word in seeds if not word.isdecimal()), None)
    if bad is not None or not seeds:
        raise UserError(f"--seeds must be whole numbers such as 0,1,2, got {bad or 'none'}")
    return list(dict.fromkeys(int(word) for word in seeds))  # 0 and 00 are one seed


def fields_of_runs() -> set[str]:
    """The settings of train.py that a command may set, groups' by dotted names; not the methods' settings."""
    plain = {f.name for f in dataclasses.fields(Config)} - {*FIXED, *GROUPS}
    return plain | {f"{group}.{f.name}" for group, kind in GROUPS.items() for f in dataclasses.fields(kind)}


def options_of(settings: Sequence[str], methods: Collection[str]) -> dict[str, list[str]]:
    """Command lines of the methods' runs from entries of `--set`.

    Args:
      settings: FIELD=VALUE for all methods (data.FIELD and the like too), METHOD.FIELD=VALUE for one method:
        a setting of it, or if it has none of that name an option of its run.
      methods: names of the methods that run.

    Raises:
      UserError: an entry is neither of these, or names a method that does not run, or a field that there is not.

    Example:
      >>> options_of(["learning_rate=0.1", "dgc.clip_norm=1"], ["baseline", "dgc"])
      {'baseline': ['--learning-rate=0.1'], 'dgc': ['--learning-rate=0.1', '--compressor.clip-norm=1']}
    """
    out: dict[str, list[str]] = {name: [] for name in methods}
    for entry in settings:
        field, equals, value = entry.partition("=")
        method, dot, setting_name = field.partition(".") if field.split(".")[0] not in GROUPS else (field, "", "")
        if not equals or not field:
            raise UserError(f"--set takes FIELD=VALUE or METHOD.FIELD=VALUE, got {entry!r}")
        fixed = next((part for part in (field, setting_name) if part.split(".")[0].replace("-", "_") in FIXED), None)
        if fixed and method == "compressor" and setting_name:
            raise UserError(f"--set {entry}: name the method, METHOD.{setting_name}={value}")
        if fixed:
            raise UserError(f"--set {entry}: {fixed} is not to be set: the command sets it, and is one process")
        if dot and method not in out:
            raise UserError(f"--set {entry}: {method} is none of --methods{did_you_mean(method, list(out))}")
        setting = (setting_name if dot else field).replace("-", "_")
        having = [name for name in methods if setting in {f.name for f in dataclasses.fields(known_methods()[name])}]
        is_own = dot and method in having
        if not is_own and setting not in fields_of_runs():
            near = f"; did you mean {having[0]}.{setting}?" if having else did_you_mean(setting, [*fields_of_runs()])
            raise UserError(f"--set {entry}: no setting of train.py{f' or {method}' if dot else ''}{near}")
        for name in [method] if dot else out:
            out[name].append(option_word("compressor." if is_own else "", setting_name if dot else field, value))
    return out


def option_word(prefix: str, field: str, value: str) -> str:
    """One word of `train.py`'s command line, where booleans are flags.

    Example:
      >>> option_word("compressor.", "error_feedback", "false"), option_word("", "record.residuals", "False")
      ('--compressor.no-error-feedback', '--record.no-residuals')
    """
    parts, dot, name = (prefix + field.replace("_", "-")).rpartition(".")
    flags = {"true": f"--{parts}{dot}{name}", "false": f"--{parts}{dot}no-{name}"}
    return flags.get(value.lower(), f"--{parts}{dot}{name}={value}")
