"""The number of kernels that a program compiled for a GPU launches, from its optimised HLO text.

Of small kernels the launch, 2 to 5 microseconds, costs more than the work. A loop or branch that the host decides
costs a copy to the host, and the GPU waits for it.
"""

import re
from typing import Any, NamedTuple

from jgc.lab.shared.hlo import Module, Op, parse, trip_count

# Instructions that launch nothing: they name, group or view buffers, or finish an operation that was started elsewhere.
_FREE = frozenset("""add-dependency after-all bitcast constant domain get-tuple-element opt-barrier parameter
    partition-id replica-id tuple""".split())
_BODIES = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")


class Kernels(NamedTuple):
    """Kernels and copies of one call of a program on one GPU. The larger of two branches counts.

    Attributes:
      launches: fusions, library calls, sorts, copies and collectives; an instruction that XLA runs as several kernels,
        such as a sort, counts as one.
      host_copies: predicates of branches, and of loops whose trip count the compiler does not know.
      is_complete: false if a loop's trip count is unknown: it then counts as one turn.
    """

    launches: int
    host_copies: int
    is_complete: bool = True


def kernels_of(compiled_or_text: Any) -> Kernels:
    """The kernels of a compiled program or its `as_text()`.

    Example:
      >>> text = '''HloModule m
      ... ENTRY %main (x: f32[8]) -> f32[8] {
      ...   %x = f32[8]{0} parameter(0)
      ...   %y = f32[8]{0} copy(%x)
      ...   ROOT %z = f32[8]{0} sort(%y), dimensions={0}, to_apply=%less
      ... }
      ... '''
      >>> kernels_of(text)
      Kernels(launches=2, host_copies=0, is_complete=True)
    """
    text = compiled_or_text if isinstance(compiled_or_text, str) else compiled_or_text.as_text()
    module = parse(text)
    return _of_computation(module, module.entry)


def _of_computation(module: Module, name: str) -> Kernels:
    return _sum(_of_instruction(module, op) for op in module.computations[name].values())


def _of_instruction(module: Module, op: Op) -> Kernels:
    if op.opcode in _FREE or op.stage in ("update", "done"):
        return Kernels(0, 0)
    if op.opcode == "while":
        body, condition = (_of_computation(module, pattern.findall(op.rest)[0]) for pattern in (_BODIES, _CONDITION))
        trips = trip_count(op)
        # XLA counts the turns of a loop of known length on the host, and does not run the condition
        if trips is not None:
            return Kernels(trips * body.launches, trips * body.host_copies, body.is_complete)
        return _sum([body, condition, condition, Kernels(0, 2, False)])
    if op.opcode == "conditional":
        names = [name for names in _BRANCHES.findall(op.rest) for name in re.findall(r"[\w.-]+", names)]
        branches = [_of_computation(module, name) for name in names or _BODIES.findall(op.rest)]
        return _sum([max(branches), Kernels(0, 1)])
    if op.opcode == "call" or (op.opcode == "async" and op.stage == "start"):
        return _of_computation(module, _BODIES.findall(op.rest)[0])
    return Kernels(1, 0)


def _sum(parts: Any) -> Kernels:
    every = list(parts)
    return Kernels(
        sum(x.launches for x in every), sum(x.host_copies for x in every), all(x.is_complete for x in every)
    )
