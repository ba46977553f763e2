"""`JGC_TESTS_PART`: parts of the slow and exhaustive tests."""

import re
from types import SimpleNamespace

import conftest
import pytest

NODE_IDS = [f"tests/training/test_runs.py::test_{i}" for i in range(40)] + [
    f"tests/library/test_contract.py::test_{name}[{variant}, {phase}-{devices} devices]"
    for name in ("bytes", "layouts") for variant in ("topk", "topk/chunks", "qsgd", "klt")
    for phase in ("dense", "last") for devices in (4, 8)
]  # fmt: skip


def items_of(part: str, marker: str | None) -> list[str]:
    def item(nodeid: str) -> SimpleNamespace:
        return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name == marker)

    left_out = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)))
    items = [item(nodeid) for nodeid in NODE_IDS]
    conftest.leave_out_other_parts(config, items, part)
    assert len(items) + len(left_out) == len(NODE_IDS)
    return [item.nodeid for item in items]


@pytest.mark.parametrize("marker", ["slow", "exhaustive", "targets"])
def test_parts_have_each_test_once(marker):
    parts = [items_of(f"{i}/12", marker) for i in range(1, 13)]
    assert sorted(nodeid for part in parts for nodeid in part) == sorted(NODE_IDS)
    assert len([part for part in parts if part]) > 8


def test_cases_of_a_variant_share_their_compiled_steps():
    of_variant: dict[str, set[int]] = {}
    for i in range(1, 13):
        for nodeid in items_of(f"{i}/12", "exhaustive"):
            if variant := re.search(r"\[(.+?),", nodeid):
                of_variant.setdefault(variant[1], set()).add(i)
    assert {len(parts) for parts in of_variant.values()} == {1}


def test_every_part_has_what_the_default_has():
    assert items_of("3/12", None) == NODE_IDS


@pytest.mark.parametrize("part", ["3", "0/12", "13/12", "a/b"])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(pytest.UsageError, match="as 3/12"):
        items_of(part, None)
