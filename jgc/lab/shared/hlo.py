"""The collectives of a compiled program and their bytes, read from the optimised HLO text.

JAX has no structured way to ask for them, and XLA changes the traced program: it combines all-reduces, sends bf16
as f32 on CPU, starts collectives asynchronously. `collectives` raises for anything unknown and never counts it
as zero: an opcode outside `LOCAL`, a group format, a dtype, a loop without a trip count, branches that differ.

    compiled = jax.jit(step).lower(state, batch).compile()
    sum(c.sent_bytes for c in collectives(compiled))        # bytes that one device sends in one step

Bytes follow from each collective's algorithm (`bytes_sent`) and are exact Fractions, for the busiest device if devices
differ. A ring all-reduce of 10 bytes over 8 devices sends 35/2 bytes per device, on average over the devices.
Source: xla/hlo/ir/hlo_opcode.h and openxla.org/xla/operation_semantics, as of jax 0.10.2 and 0.12.
"""

import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import numpy as np

from jgc.comm.ledger import OPS, UnknownCollectiveError, bytes_sent
from jgc.lab.shared.mesh_groups import groups_of_axes

# Opcodes known not to communicate. A list of those that do would let an opcode pass that XLA adds tomorrow.
LOCAL = frozenset("""
    abs acos acosh add add-dependency after-all and asin asinh atan atan2 atanh batch-norm-grad batch-norm-inference
    batch-norm-training bitcast bitcast-convert broadcast cbrt ceil cholesky clamp compare complex concatenate
    constant convert convolution copy cosh cosine count-leading-zeros custom-call divide domain dot dynamic-reshape
    dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor gather get-dimension-size
    get-tuple-element imag iota is-finite log log-plus-one logistic map maximum minimum mulhi multiply negate not
    opt-barrier or pad parameter partition-id popcnt power ragged-dot real reduce reduce-precision reduce-window
    remainder replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz
    round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter set-dimension-size shift-left
    shift-right-arithmetic shift-right-logical sign sine sinh slice sort sqrt stochastic-convert subtract tan tanh
    topk transpose triangular-solve tuple xor""".split())
_CALLERS = frozenset({"call", "fusion", "async", "while", "conditional"})
# A custom call is opaque. One with such a name (NCCL, NVSHMEM, mpi4jax, ...) does not count as local.
_TALKS = re.compile(r'(?:replica_groups|channel_id)=|target="[^"]*(?:all.?(?:reduce|gather|to.?all)|permute'
                    r'|reduce.?scatter|collective|[nr]ccl|shmem|(?<![a-z])mpi|send|recv)', re.I)

# On TPU XLA spreads some collectives over several fusions that compute something else, too, and repeats them in each.
_IN_STEPS = re.compile(r'target="AsyncCollective(Start|Done)"')
_CHAIN = re.compile(r'channel_id=\d+|chain_id="\d+"')

_MEGASCALE = re.compile(r'_host_transfer_handler_name="xla_megascale_runtime"')  # between slices of TPUs

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4}
_BITS |= {f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)}
_BITS |= {f"f8{v}": 8 for v in ["e3m4", "e4m3", "e4m3fn", "e4m3b11fnuz", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\([^\n]*\) -> [^\n]* )?\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(  # name, shape, opcode, stage, the rest
    r"\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*?)(?:-(start|update|done))?(\(.*)")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|\w+_computations?)=(%?[\w.-]+|\{[^}]*\})")
_LISTED = r"=\{((?:\{[\d, ]*\}[, ]*)*)\}"  # {{0,1},{2,3}} or {}
_MESH_GROUPS = re.compile(  # mesh['a'=2,'b'=4] {'b'}, or {'b':(2)2} for a part of an axis
    r"replica_groups=mesh\[([^\]]+)\](, device_ids=\([^{]*\))? \{((?:'[^']*'(?::\(\d+\)\d+)?,?)+)\}")


class UnknownCountError(UnknownCollectiveError):
    """The number of times a collective runs is decided at run time: by a loop's trip count, or by branches."""


class Collective(NamedTuple):
    """One collective instruction, seen from one device."""

    op: str  # one of OPS
    dtype: str  # XLA's name: 'f32', 'bf16', 'u8'; 'f32+s32' where one instruction carries both
    elements: int  # of the operands, in one execution
    payload_bytes: int  # of the operands, in one execution: all-gather: one device's part; reduce-scatter: all
    group_size: int  # devices that take part together; uneven groups: the largest; permute: all in its pairs
    sent_bytes: Fraction  # by the busiest device, in all executions: sum these
    op_name: str  # JAX's name stack, "" where XLA gives none
    times: int  # executions in one call of the program: the product of enclosing trip counts
    groups: tuple[tuple[int, ...], ...] = ()  # devices that take part together, or pairs of a permute; () if not listed
    between_slices: bool = False  # of TPUs: over the data-centre network, where whole tiles travel


class Total(NamedTuple):
    """Sums over collectives, for one device and one call of the program."""

    times: int
    payload_bytes: int
    sent_bytes: Fraction


class Op(NamedTuple):
    shape: str  # "f32[8,4]{1,0}" or "(f32[8], s32[])"
    opcode: str  # without -start, -update, -done
    stage: str  # "start", "update", "done" or ""
    rest: str  # "(operands), attributes" with quoted text removed: a user's name scope may hold anything
    line: str


class Module(NamedTuple):
    devices: int
    entry: str
    computations: dict[str, dict[str, Op]]


def collectives(compiled_or_text: Any) -> tuple[Collective, ...]:
    """Every collective that a compiled program runs; those in loops are multiplied by the trip counts.

    Takes `jax.jit(f).lower(...).compile()` or its `as_text()`. Start/done pairs count once. A fusion, call or async
    wrapper counts the collectives inside it; a conditional counts one branch, and all branches must send the same.
    Raises UnknownCollectiveError, or its subclass UnknownCountError, with the line that cannot be counted.
    """
    text = compiled_or_text if isinstance(compiled_or_text, str) else compiled_or_text.as_text()
    module = parse(text)
    return _walk(module, module.entry)


def table(found: Iterable[Collective]) -> dict[str, Total]:
    """Totals by op. Example: `table(collectives(compiled))["all-reduce"].sent_bytes`."""
    totals: dict[str, Total] = {}
    for c in found:
        times, payload, sent = totals.get(c.op, Total(0, 0, Fraction(0)))
        totals[c.op] = Total(times + c.times, payload + c.times * c.payload_bytes, sent + c.sent_bytes)
    return totals


def parse(text: str) -> Module:
    bodies = _COMPUTATION.findall(text)
    entries = [name for entry, name, _ in bodies if entry]
    if not text.startswith("HloModule ") or len(entries) != 1:
        raise UnknownCollectiveError(f"expected the text of one HLO module with one ENTRY, got {text[:80]!r}")
    sizes = re.findall(r", (?:num_partitions|replica_count)=(\d+)", text.splitlines()[0])
    computations: dict[str, dict[str, Op]] = {}
    for _, computation, body in bodies:
        ops = computations.setdefault(computation, {})
        for line in filter(str.strip, body.splitlines()):
            match = _INSTRUCTION.fullmatch(line)
            if not match:
                raise UnknownCollectiveError(f"cannot read this as an HLO instruction: {line.strip()!r}")
            name, shape, opcode, stage, rest = match.groups(default="")
            ops[name] = Op(shape, opcode, stage, re.sub(r'"(?:[^"\\]|\\.)*"', '""', rest), line.strip())
    return Module(prod(map(int, sizes)), entries[0], computations)


def _walk(module: Module, name: str) -> tuple[Collective, ...]:
    if name not in module.computations:
        raise UnknownCollectiveError(f"the module calls a computation that it does not contain: {name!r}")
    ops = module.computations[name]
    return tuple(c for op in ops.values() for c in _found(module, ops, op))


def _found(module: Module, ops: dict[str, Op], op: Op) -> tuple[Collective, ...]:
    """The collectives of one instruction and of the computations that it calls."""
    sends = _MEGASCALE.search(op.line) if op.opcode in ("send", "recv") else None
    known = sends or op.opcode in LOCAL or op.opcode in _CALLERS or op.opcode in OPS
    a_step = _IN_STEPS.search(op.line) and any(ops[name].opcode in OPS for name in _operands(ops, op))
    if not known or (op.opcode == "custom-call" and _TALKS.search(op.line) and not a_step):
        raise UnknownCollectiveError(f"may communicate (jgc.lab.shared.hlo.LOCAL lists what does not): {op.line}")
    if op.stage in ("update", "done") or op.opcode == "recv":  # counted at its start, or at its send
        return ()
    if sends:
        return (_between_slices(ops, op),)
    if op.opcode in OPS:
        return () if _goes_on(module, op, _started(ops)) else (_collective(module, ops, op),)
    called = [(role, _walk(module, name)) for role, names in _CALLED.findall(op.rest)
              for name in re.findall(r"[\w.-]+", names)]
    inner = tuple(c for _, part in called for c in part)
    if inner and op.opcode == "while":
        return _loop(op, dict(called))
    if inner and op.opcode == "conditional":
        branches = [part for _, part in called]
        if len({tuple(sorted(c._replace(op_name="") for c in branch)) for branch in branches}) > 1:
            raise UnknownCountError(f"the branches of a conditional send different bytes: {op.line}")
        return branches[0]
    if inner and op.opcode in LOCAL:
        raise UnknownCollectiveError(f"a collective inside an operation that should be local: {op.line}")
    return inner


def _started(ops: dict[str, Op]) -> list[Op]:
    """The collectives that this computation starts and others finish."""
    calls = [op for op in ops.values() if 'target="AsyncCollectiveStart"' in op.line]
    return [ops[name] for op in calls for name in _operands(ops, op)]


def _goes_on(module: Module, op: Op, started: list[Op]) -> bool:
    """Whether a collective was started, and counted, in a different computation."""
    if "chain_id=" not in op.line or op in started:
        return False
    chain = _CHAIN.findall(op.line)
    if not any(chain == _CHAIN.findall(one.line) for ops in module.computations.values() for one in _started(ops)):
        raise UnknownCollectiveError(f"no computation starts this collective: {op.line}")
    return True


def _loop(op: Op, called: dict[str, tuple[Collective, ...]]) -> tuple[Collective, ...]:
    n = trip_count(op)
    if n is None:
        raise UnknownCountError(f"collectives in a loop without known_trip_count: {op.line}")
    # the condition runs once more than the body
    return tuple(c._replace(times=c.times * m, sent_bytes=c.sent_bytes * m)
                 for part, m in ((called["condition"], n + 1), (called["body"], n)) for c in part)


def trip_count(op: Op) -> int | None:
    """The number of turns of a `while`; None where the compiler does not know it."""
    trips = re.search(r'known_trip_count\\?":\s*\{\s*\\?"n\\?":\s*\\?"(\d+)', op.line)
    return int(trips[1]) if trips else None


def _collective(module: Module, ops: dict[str, Op], op: Op) -> Collective:
    arrays = [array for name in _operands(ops, op) for array in _arrays(op, ops[name])]
    if op.opcode == "collective-permute":
        (n, copies), groups = _pairs(op), _listed_pairs(op)
    else:
        n, copies, groups = _group_size(module, op), 1, _groups(module, op)
    return _counted(op, op.opcode, arrays, n, copies)._replace(groups=groups)


def _counted(op: Op, kind: str, arrays: list[tuple[str, int, int]], n: int, copies: int = 1) -> Collective:
    dtypes, elements, sizes = zip(*arrays, strict=True)
    sent = bytes_sent(kind, sum(sizes) * copies, n)
    op_name = "".join(re.findall(r'op_name="((?:[^"\\]|\\.)*)"', op.line)[:1])
    return Collective(kind, "+".join(dict.fromkeys(dtypes)), sum(elements), sum(sizes), n, sent, op_name, 1)


def _operands(ops: dict[str, Op], op: Op) -> list[str]:
    operands = re.sub(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}", "", op.rest[1:]).partition(")")[0]  # "%a, f32 %b"
    names = [operand.split()[-1].lstrip("%") for operand in operands.split(",") if operand.strip()]
    if not names or not ops.keys() >= set(names):
        raise UnknownCollectiveError(f"cannot find the operands: {op.line}")
    return names


def _between_slices(ops: dict[str, Op], op: Op) -> Collective:
    """A collective over several slices of TPUs: the compiler hands its operand to the runtime by a `send`."""
    kind = "".join(re.findall(r'_xla_megascale_transfer_type="(\w+)"', op.line)).lower().replace("_", "-")
    pairs = {pair for pair in re.findall(r"(\d+)\d{5}->(\d+)\d{5}", op.line) if pair[0] != pair[1]}
    slices = re.search(r'_xla_megascale_target="?\{\{?([\d,]+)\}', op.line)  # "{1,2}x..", {{100000,200000},..}
    arrays = _arrays(op, ops[_operands(ops, op)[0]])  # the other operand is a token
    if kind in OPS and slices:
        found = _counted(op, kind, arrays, slices[1].count(",") + 1)
    elif kind == "one-to-one" and pairs:  # device 3 of slice 2 is 200003
        found = _counted(op, "collective-permute", arrays, len({i for pair in pairs for i in pair}))
    else:
        raise UnknownCollectiveError(f"unknown form of a transfer between slices: {op.line}")
    return found._replace(between_slices=True)


def _arrays(op: Op, operand: Op) -> list[tuple[str, int, int]]:
    """(dtype, elements, bytes) of each array in an operand. s4 takes a byte unless its layout has E(4)."""
    arrays = []
    for dtype, dims, layout in re.findall(r"(\w+)\[([^\]]*)\](\{[^}]*\})?", operand.shape):
        if dtype not in _BITS or not re.fullmatch(r"[\d,]*", dims):
            raise UnknownCollectiveError(f"cannot tell the bytes of {dtype}[{dims}]: {op.line}")
        packed = re.search(r"E\((\d+)\)", layout)
        bits = int(packed[1]) if packed else max(8, _BITS[dtype])
        elements = prod(int(d) for d in dims.split(",") if d)
        arrays.append((dtype, elements, -(-elements * bits // 8)))
    return arrays


def _group_size(module: Module, op: Op) -> int:
    if listed := re.search("replica_groups" + _LISTED, op.rest):
        groups = [group.count(",") + 1 for group in re.findall(r"\{([^}]*)\}", listed[1])]
        n = max(groups, default=module.devices)
    elif iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[", op.rest):  # [groups,size]<=[dims]
        n = int(iota[1])
    elif mesh := _MESH_GROUPS.search(op.rest):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[3])
        n = prod(int(part or sizes[axis]) for axis, part in axes)
    else:
        raise UnknownCollectiveError(f"unknown format of replica_groups: {op.line}")
    # Without use_global_device_ids the ids are replicas, and each replica stands for all of its partitions.
    replicas = "channel_id=" in op.rest and "use_global_device_ids=true" not in op.rest
    if n > module.devices or (replicas and op.opcode != "all-to-all" and n < module.devices):
        raise UnknownCollectiveError(f"groups of {n} do not fit the {module.devices} devices: {op.line}")
    return n


def _groups(module: Module, op: Op) -> tuple[tuple[int, ...], ...]:
    """The devices of each group; () where the devices of a mesh are not in the order 0, 1, 2, ..."""
    if listed := re.search("replica_groups" + _LISTED, op.rest):
        groups = re.findall(r"\{([^}]*)\}", listed[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups) or (tuple(range(module.devices)),)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", op.rest):
        dims = [int(d) for d in iota[3].split(",")]
        order = [int(d) for d in iota[4].split(",")] if iota[4] else range(len(dims))
        ids = np.arange(prod(dims)).reshape(dims).transpose(order).reshape(int(iota[1]), int(iota[2]))
        return tuple(map(tuple, ids.tolist()))
    mesh = _MESH_GROUPS.search(op.rest)
    return groups_of_axes(mesh[1], mesh[3]) if mesh and not mesh[2] else ()


def _listed_pairs(op: Op) -> tuple[tuple[int, ...], ...]:
    """The (source, target) pairs of a collective-permute."""
    listed = re.search("source_target_pairs" + _LISTED, op.rest)
    if not listed or "slice_sizes=" in op.rest:  # in place: the operand is larger than the payload
        raise UnknownCollectiveError(f"unknown form of collective-permute: {op.line}")
    return tuple((int(source), int(target)) for source, target in re.findall(r"(\d+), ?(\d+)", listed[1]))


def _pairs(op: Op) -> tuple[int, int]:
    """(devices that take part, copies that the busiest one sends to others) of a collective-permute."""
    pairs = _listed_pairs(op)
    sources = Counter(source for source, target in pairs if source != target)
    return max(1, len({device for pair in pairs for device in pair})), max(sources.values(), default=0)
