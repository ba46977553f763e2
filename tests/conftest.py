"""Eight CPU devices, quick compilation and a kept cache of compiled programs, set before JAX starts; which tests share
a process."""

import functools
import gc
import importlib.metadata
import itertools
import os
import re
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import one_device

# "gpu": run what fits on one GPU, see one_device.py
ONE_DEVICE = os.environ.get("JGC_TESTS_ON", "")
if ONE_DEVICE:
    one_device.set_platforms(ONE_DEVICE)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Programs are kept between runs of the tests, also for the processes that tests start. JAX's key of a program is its
# code with all options, so a changed library asks for other entries. CI names a folder that outlives its machine.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgc" / "tests-programs"
_PROGRAMS = Path(os.environ.get("JGC_TESTS_PROGRAMS") or _CACHE)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_PROGRAMS / f"jax-{importlib.metadata.version('jax')}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # a tenth of the time of tracing
# Tracing makes objects that live long; Python's collector would walk them again and again, a tenth of a test's time.
gc.set_threshold(100_000, 50, 100)

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from quick import PAPER_FILTERS, XLA_FLAGS, autoencoder  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

_flags = {"--xla_force_host_platform_device_count": "1" if ONE_DEVICE else "8", **XLA_FLAGS}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _flags.items() if k not in _given)]).strip()

# "3/12": of the tests that the default leaves out, the third of twelve parts. CI takes a different part each day.
PART = os.environ.get("JGC_TESTS_PART", "")

collect_ignore = ["foreign_packages.py"]  # needs packages of its own
settings.register_profile("jgc", deadline=None, derandomize=True, max_examples=30)  # JAX compiles for every new shape
settings.load_profile("jgc")


@pytest.fixture
def paper_filters(monkeypatch):
    """LGC's autoencoder as wide as in the paper."""
    for name, filters in zip(("ENCODER_FILTERS", "DECODER_FILTERS"), PAPER_FILTERS, strict=True):
        monkeypatch.setattr(autoencoder, name, filters)


def scope_of(nodeid: str) -> str:
    """A file's tests go to one process, and of the contract suites those of one variant, which an id begins with."""
    path, _, test = nodeid.partition("::")
    variant = re.search(r"\[(.+?)(?:, |-\d device|\])", test)
    return f"{path} {variant[1]}" if path.endswith(("test_contract.py", "test_targets.py")) and variant else path


class Together(LoadScopeScheduling):
    """Written here, for `--dist loadgroup` of pytest-xdist 3.8 has no effect with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_configure(config):
    if ONE_DEVICE and not hasattr(config, "workerinput"):
        one_device.begin(ONE_DEVICE, config)


def pytest_collection_modifyitems(config, items):
    """What has slow tests comes first, then what has many: nothing long is left to run alone at the end."""
    if ONE_DEVICE:
        one_device.leave_out_the_rest(config, items)
    if PART:
        leave_out_other_parts(config, items, PART)
    slow = {scope_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    tests = Counter(scope_of(item.nodeid) for item in items)

    def place(item):
        scope = scope_of(item.nodeid)
        return scope not in slow, -tests[scope], scope

    items.sort(key=place)


def leave_out_other_parts(config, items, part):
    """Deselect slow and exhaustive tests, and those for targets, of other parts. A variant's tests share a part."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise pytest.UsageError(f"JGC_TESTS_PART={part!r} must name a part and how many there are, as 3/12")

    def is_left_out(item):
        if not any(map(item.get_closest_marker, ("slow", "exhaustive", "targets"))):
            return False
        scope = scope_of(item.nodeid)
        name = item.nodeid if scope == item.nodeid.partition("::")[0] else scope
        return zlib.crc32(name.encode()) % count != number - 1

    left_out, remaining = [], []
    for item in items:
        (left_out if is_left_out(item) else remaining).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = remaining


_ended = itertools.count(1)  # tests of this process


def pytest_runtest_teardown(item, nextitem):
    """Drop compiled programs before a process has too many, if possible those of tests that are done.

    A program's code lies in mappings of its own. Linux gives a process 65,530 of them (`vm.max_map_count`); XLA crashes
    at the next one, while it compiles or loads. Counting them takes as long as a short test.
    """
    done = nextitem is None or scope_of(nextitem.nodeid) != scope_of(item.nodeid)
    if (next(_ended) % 10 == 0 or done) and _mappings() > (20_000 if done else 45_000):
        for found in gc.get_objects():
            if isinstance(found, functools._lru_cache_wrapper) and _is_of_tests(found.__module__):
                found.cache_clear()
        jax.clear_caches()
        gc.collect()


def _mappings() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def _is_of_tests(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and Path(file).is_relative_to(Path(__file__).parent)


def pytest_sessionstart(session):
    """Programs of code that has changed since are never asked for again: a month old, they go."""
    if not hasattr(session.config, "workerinput"):
        for file in _PROGRAMS.glob("*/*"):
            if time.time() - file.stat().st_mtime > 30 * 86400:
                file.unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter):
    """How many programs were compiled for GPUs and TPUs that are not here, and audited."""
    passed = terminalreporter.getreports("passed")
    targets = Counter(value for report in passed for name, value in report.user_properties if name == "audited")
    if targets:
        each = ", ".join(f"{count} for {target}" for target, count in sorted(targets.items()))
        terminalreporter.write_line(f"{targets.total()} programs compiled for targets and audited: {each}")


def pytest_xdist_auto_num_workers(config):
    """One process more than cores for all tests: real processes wait for each other, and whole runs for files."""
    whole = config.option.markexpr in ("", "not targets") and not PART
    return (os.cpu_count() or 1) + whole


def pytest_xdist_make_scheduler(config, log):
    """What shares compiled steps and fixtures runs in one process."""
    return Together(config, log)
