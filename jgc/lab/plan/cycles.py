"""The TPU compiler's estimate of a program's cycles, read from the text of the compiled program.

Every fusion carries `estimated_cycles`. Loops count as often as they run, and of a conditional the dearest branch.
What carries no estimate is listed: sorts, gathers and scatters, custom calls, collectives, copies between memories.
"""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

from jgc.lab.shared.hlo import Module, Op, parse

TILE = 8 * 128  # values of a register: an operation on fewer costs next to nothing
_FREE = frozenset("parameter constant bitcast tuple get-tuple-element after-all partition-id iota broadcast".split())
_ESTIMATE = re.compile(r'"estimated_cycles":"?(\d+)')
_CALLED = re.compile(r"\b(body|condition|to_apply|calls|\w+_computations?)=(%?[\w.-]+|\{[^}]*\})")


class Cycles(NamedTuple):
    """The estimate for one device and one call of a program.

    Attributes:
      total: the sum.
      left_out: how many operations on whole tiles carry no estimate, by kind.
    """

    total: int
    left_out: dict[str, int]


def cycles_of(text: str) -> Cycles | None:
    """The estimate in a compiled program's text; None if it has none, as on GPU.

    Example:
      >>> line = '  ROOT %a = f32[8]{0} add(%x, %x), backend_config={"estimated_cycles":"70"}'
      >>> cycles_of(f"HloModule m, num_partitions=2\\n\\nENTRY %main (x: f32[8]) -> f32[8] {{\\n{line}\\n}}\\n")
      Cycles(total=70, left_out={})
    """
    if not _ESTIMATE.search(text):
        return None
    module = parse(text)
    total, left_out = _sum(module, module.entry)
    return Cycles(total, dict(left_out.most_common()))


def _sum(module: Module, name: str) -> tuple[int, Counter[str]]:
    total, left_out = 0, Counter[str]()
    for op in module.computations[name].values():
        if estimate := _ESTIMATE.search(op.line):
            total += int(estimate[1])
            continue
        called = {
            role: [_sum(module, inner) for inner in re.findall(r"[\w.-]+", names)]
            for role, names in _CALLED.findall(op.rest)
            if op.opcode in ("while", "conditional", "call", "async")
        }
        if not called:
            left_out.update(_left_out(op))
            continue
        trips = _trips(module, op)
        if op.opcode == "while" and trips is None:
            left_out["loop of unknown length, counted once"] += 1
        inner = [part for parts in called.values() for part in parts]
        if op.opcode == "conditional":
            inner = [max(inner, key=lambda part: part[0])]
        total += (trips or 1) * sum(cycles for cycles, _ in inner)
        for _, of_inner in inner:
            left_out.update(of_inner)
    return total, left_out


def _trips(module: Module, op: Op) -> int | None:
    """Trip count of a loop whose counter starts at 0; 1 if it is no loop."""
    if op.opcode != "while":
        return 1
    if match := re.search(r'known_trip_count\\?":\s*\{\s*\\?"n\\?":\s*\\?"(\d+)', op.line):
        return int(match[1])
    condition = module.computations[re.findall(r"condition=%?([\w.-]+)", op.rest)[0]]
    last = list(condition.values())[-1]  # the root: compare(counter, bound), direction=LT
    bounds = [condition[name].line for name in re.findall(r"%([\w.-]+)", last.rest) if name in condition]
    match = re.search(r"constant\((\d+)\)", " ".join(bounds))
    return int(match[1]) if match and "direction=LT" in last.rest else None


def _left_out(op: Op) -> list[str]:
    """The kind of an operation without an estimate, if it works on a tile or more."""
    sizes = [prod(int(d) for d in dims.split(",") if d) for dims in re.findall(r"\w+\[([\d,]*)\]", op.shape)]
    if op.opcode in _FREE or op.stage in ("update", "done") or max(sizes, default=0) < TILE:
        return []
    if op.opcode == "custom-call":
        return ["custom call " + "".join(re.findall(r'custom_call_target="([^"]*)"', op.line)[:1])]
    if op.opcode == "fusion":
        named = re.search(r'op_name="[^"]*?/?(gather|scatter-?\w*|sort|cumsum|dynamic\w*)"', op.line)
        return [named[1] if named else "fusion"]
    return [op.opcode]
