"""`jgc plan --target` as far as it needs no compiler: names, messages, and what is read from compiled programs."""

import csv
import json

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType

from jgc.lab.commands import main
from jgc.lab.plan import command, programs, targets
from jgc.lab.plan.cycles import cycles_of
from jgc.lab.plan.kernels import Kernels, kernels_of
from jgc.lab.plan.programs import Program, Refusal, by_link, leaves_group, rows_of
from jgc.lab.plan.shapes import divided, number, transformer
from jgc.lab.plan.target_files import known_of, write_csv, write_json
from jgc.lab.plan.target_page import TargetPlan, cells, draw, markdown, slow_ms
from jgc.lab.plan.targets import CHIPS, Target, spec_of, target_of
from jgc.lab.shared.hlo import UnknownCollectiveError, collectives
from jgc.training.errors import UserError

HERE = Target("h100:4x2", CHIPS["h100"], 4, tuple(jax.devices()))  # CPU devices in the place of four hosts' GPUs
ONE = HERE._replace(name="h100:8", groups=1)


@pytest.mark.parametrize("name", ["h100", "h100:", "h200:8", "h100:8x", "v5e:2x4,h1:8", "v5e2x4", "v5e:2x4x2slice"])
def test_unknown_target_lists_known_ones(name, monkeypatch, capsys):
    monkeypatch.setattr(targets, "missing_packages", lambda kind: [])
    assert main(["plan", "--target", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: unknown target '{name.split(',')[-1]}'") and said.count("\n") == 1
    assert all(known in said for known in ("h100:8", "h100:4x8", "v5e:2x4", "v5e:2x4x2slices", "v5p:2x2x1"))


@pytest.mark.parametrize(("name", "known"), [
    ("h100:4x8x2", "h100:8, h100:4x8"), ("h100:8x2slices", "h100:8"), ("h100:0", "h100:8"), ("v5e:8", "v5e:2x4"),
    ("v5e:2x4slices", "v5e:2x4"), ("v5e:2x4x0slices", "v5e:2x4"), ("v5p:4x4", "v5p:2x2x1"),
])  # fmt: skip
def test_wrong_grid_lists_those_of_the_chip(name, known):
    with pytest.raises(UserError, match="unknown target") as raised:
        spec_of(name)
    assert known in str(raised.value)


@pytest.mark.parametrize(("name", "command"), [
    ("v5e:2x4", "needs libtpu: pip install 'jgc[targets]', or in a clone of jgc: pip install -e '.[targets]'"),
    ("h100:8", f"pip install --no-deps jax-cuda12-pjrt=={jax.__version__} jax-cuda12-plugin=={jax.__version__} "
               "nvidia-cuda-nvcc-cu12"),
])  # fmt: skip
def test_missing_compiler_says_how_to_install_it(name, command, monkeypatch, capsys):
    monkeypatch.setattr(targets, "_is_installed", lambda module: False)
    assert main(["plan", "--target", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the target '{name}' needs ") and command in said and said.count("\n") == 1


def test_topology_that_compiler_refuses_is_one_line(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise RuntimeError('INVALID_ARGUMENT: Topology layout "v5e:3x5"\nis not divisible')

    monkeypatch.setattr(targets, "_is_installed", lambda module: True)
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    assert main(["plan", "--target", "v5e:3x5"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "refuses the target 'v5e:3x5': INVALID_ARGUMENT: Topology layout \"v5e:3x5\" is not divisible" in said


def test_installed_packages_are_found():
    assert targets._is_installed("jax") and not targets._is_installed("jax.no_such_module.inside")
    assert not targets._is_installed("no_such_package.inside")


@pytest.mark.parametrize(("words", "message"), [
    (["--params", "25M"], "--params goes with --target only"),
    (["--shard"], "--shard goes with --target only"),
    (["--phases", "last"], "--phases goes with --target only"),
    (["--target", "h100:8", "--nodes", "4"], "--nodes does not go with --target"),
    (["--target", "h100:8", "--measure", "step"], "--measure does not go with --target"),
    (["--set", "devices_per_node=2", "--set", "layers.shard=true"], "--set devices_per_node: a plan for nodes of "),
    (["--target", "h100:8", "--set", "local.every=30"], "--set local.every does nothing with --target"),
    (["--target", "h100:8", "--set", "nodes=2"], "--set nodes does nothing with --target"),
    (["--target", "h100:8", "--params", "1M", "--set", "layers.dense=qkv"], "--set layers.dense does nothing with"),
    (["--target", "h100:8", "--output", "plan.csv"], "--output must be a Markdown file, got plan.csv"),
    (["--target", "h100:8", "--set", "layers.shard=true"], "instead of --set layers.shard and devices_per_node give"),
    (["--target", "h100:4x8", "--measure", "nothing", "--shard"], "--measure nothing does not go with --shard"),
    (["--target", ","], "--target names none: known are h100:8"),
    (["--target", "h100:8", "--bandwidth", "100"], "a rate must be written as 100mbit or 1gbit, got '100'"),
])  # fmt: skip
def test_options_that_do_nothing_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "target_of", lambda name: ONE)
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["many", "", "M", "nanM"])
def test_number_of_parameters_must_be_one(text):
    with pytest.raises(UserError, match="--params must be a number such as 25M"):
        number(text)


def test_transformer_has_exactly_that_many_parameters():
    for count in (10**6, 1_234_567, 25_000_000, 12 * 12 * 768**2, 10**8):  # the blocks' matrices alone among them
        shapes = jax.tree.leaves(transformer(count))
        assert sum(x.size for x in shapes) == count and all(size > 0 for x in shapes for size in x.shape)
    for count in (5_000, -5_000_000):
        with pytest.raises(UserError, match=f"must be at least 1,000,000, got {count:,}"):
            transformer(count)


def test_parameters_are_divided_inside_a_host():
    shapes = divided({"w": jax.ShapeDtypeStruct((6, 8), "float32"), "b": jax.ShapeDtypeStruct((8,), "float32")},
                     HERE.nodes())  # fmt: skip
    assert shapes["w"].sharding.shard_shape((6, 8)) == (6, 4) and shapes["b"].sharding.is_fully_replicated
    with pytest.raises(UserError, match="give a target of several hosts"):
        divided(shapes, ONE.nodes())
    with pytest.raises(UserError, match="no parameter has a dimension that the 2 devices divide"):
        divided({"w": jax.ShapeDtypeStruct((3, 5), "float32")}, HERE.nodes())


# --- what is read from programs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    """Two methods compiled for CPU devices that stand in for GPUs of four hosts."""
    from jgc import compress

    shapes = {"w": jax.ShapeDtypeStruct((64, 40), "float32")}
    methods = {"dense": compress.dense(), "topk": compress.topk(alpha=0.1, warmup_steps=5)}
    told: list[str] = []
    rows = rows_of(methods, shapes, HERE, told.append)
    assert [line.split(",")[0] for line in told] == ["[1/3", "[2/3", "[3/3] h100:4x2: topk"]
    return TargetPlan(HERE, "a matrix", False, 2560, 1, tuple(rows), gbits=0.001)


def test_rows_have_every_phase_with_bytes_by_link(plan):
    read, dense, warm, topk = plan.rows
    assert [(row.method, row.phase) for row in plan.rows[1:]] == [("dense", "dense"), ("topk", "dense"),
                                                                 ("topk", "top-k")]  # fmt: skip
    assert read.across == read.inside == {} and not dense.inside
    # 2(n - 1)/n of the gradient over four hosts, and n - 1 messages and flags (a byte each on CPU)
    assert dense.across == warm.across == {"all-reduce": 1.5 * 4 * 2560, "all-to-all": 3}
    assert topk.across["all-to-all"] == 3 and topk.across["all-gather"] % 12 == 0
    assert dense.arguments == 4 * 2560 and topk.arguments == 2 * 4 * 2560 and topk.cycles is None
    assert slow_ms(dense, plan) == pytest.approx(1e3 * 2 * 8 * 15363 / 1e6)
    assert slow_ms(dense, plan._replace(gbits=0)) is None
    slow = plan._replace(gbits=1e-6)
    assert f"{slow_ms(dense, slow):,.0f}" in cells(dense, slow)  # not 2.46e+05


def test_pages_and_json_hold_the_figures(plan, tmp_path):
    refused = plan._replace(rows=(*plan.rows, Refusal("gradiveq", "cannot compress shards")))
    page = markdown([refused])
    assert "4 nodes, each a host of 2 devices, which hold copies; a matrix, 2,560 parameters" in page
    assert "| between hosts | of dense | between hosts, ms |" in page and "cycles" not in page
    assert "| 1 all-to-all, 1 all-gather |" in page or "| 1 all-gather, 1 all-to-all |" in page
    assert "| gradiveq | refused: cannot compress shards |" in page
    assert "| method | h100:4x2, between hosts | h100:4x2, between hosts |" in (both := markdown([refused, plan]))
    assert "| topk | 3.58 kB, 0.23 of dense | 3.58 kB, 0.23 of dense |" in both
    # the program of an earlier phase is not what a refused method sends
    late = plan._replace(rows=(*plan.rows, Refusal("topk", "no room")))
    assert "| topk | 3.58 kB, 0.23 of dense | refused |" in markdown([plan, late])
    write_csv(tmp_path / "plan.csv", [refused])
    lines = list(csv.DictReader((tmp_path / "plan.csv").open()))
    assert [line["across_bytes"] for line in lines] == ["", "15363", "15363", "3579", ""]
    assert lines[-1]["refused"] == "cannot compress shards" and lines[1]["collectives"] == "1 all-reduce; 1 all-to-all"
    write_json(tmp_path / "plan.json", [refused], "python -m jgc plan")
    (found,) = json.loads((tmp_path / "plan.json").read_text())["targets"]
    assert found["nodes"] == 4 and found["devices"] == 8 and len(found["programs"]) == 5
    assert found["programs"][1]["across"] == {"all-reduce": 15360.0, "all-to-all": 3.0}
    assert found["programs"][1]["slow_link_ms"] > 0
    draw(tmp_path / "plan.png", [refused])
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_programs_of_an_earlier_call_are_not_compiled_again(plan, tmp_path, monkeypatch):
    from jgc import compress
    from jgc.lab.plan import programs

    path, told, seen = tmp_path / "plan.json", [], []
    part = plan._replace(rows=plan.rows[:3])  # a call that was stopped
    write_json(path, [part], "python -m jgc plan", {plan.rows[3].key: plan.rows[3]})  # and the one before it
    known = known_of(path)
    assert known == {row.key: row for row in plan.rows}
    monkeypatch.setattr(programs, "compiled_for", lambda lowered: pytest.fail("compiled again"))
    methods = {"dense": compress.dense(), "topk": compress.topk(alpha=0.1, warmup_steps=5)}
    shapes = {"w": jax.ShapeDtypeStruct((64, 40), "float32")}
    rows = rows_of(methods, shapes, HERE, told.append, known=known, compiled=seen.append)
    assert tuple(rows) == plan.rows and not seen
    assert told[1].startswith("[2/3") and told[1].endswith("] h100:4x2: topk, dense: compiled in an earlier call")
    monkeypatch.undo()
    other = {"topk": compress.topk(alpha=0.2, warmup_steps=5)}
    rows = rows_of(other, shapes, HERE, told.append, last=True, known=known, compiled=seen.append)
    assert len(seen) == 1 and rows[1].key not in known and rows[1].phase == "top-k"
    assert rows_of(other, shapes, HERE._replace(name="h100:2x4"), known=known)[0].key not in known


def test_traced_steps_send_what_compiled_ones_send(plan, tmp_path):
    from jgc import compress

    methods = {"dense": compress.dense(), "topk": compress.topk(alpha=0.1, warmup_steps=5)}
    rows = rows_of(methods, {"w": jax.ShapeDtypeStruct((64, 40), "float32")}, HERE, traced=True)
    assert [(row.phase, row.inside, row.across) for row in rows] == [
        (row.phase, row.inside, row.across) for row in plan.rows[1:]
    ]
    traced = plan._replace(rows=tuple(rows))
    page = markdown([traced])
    assert "Traced, not run" in page and "nothing was compiled" in page and "temporary |" not in page
    write_json(tmp_path / "plan.json", [traced], "python -m jgc plan")
    write_csv(tmp_path / "plan.csv", [traced])
    assert known_of(tmp_path / "plan.json") == {}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"targets": [{"programs": [{"key": "a"}]}]}'])
def test_file_that_is_no_plan_is_refused(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=r"plan.json is no plan of an earlier call: name a new file by --json"):
        known_of(tmp_path / "plan.json")
    assert known_of(tmp_path / "none.json") == {}


def test_method_that_refuses_shards_is_a_row_with_its_reason():
    from jgc import compress

    shapes = divided({"w": jax.ShapeDtypeStruct((64, 40), "float32")}, HERE.nodes())
    _, refusal, dense = rows_of({"gradiveq": compress.gradiveq(), "dense": compress.dense()}, shapes, HERE)
    assert isinstance(refusal, Refusal) and "cannot compress shards" in refusal.reason
    # half of the matrix over four hosts, and the flag over all devices
    assert isinstance(dense, Program) and dense.across == {"all-reduce": 1.5 * 4 * 32 * 40 + 7}


def test_program_that_does_not_fit_is_a_row_and_other_errors_are_raised(monkeypatch):
    from jgc import compress

    shapes, methods = {"w": jax.ShapeDtypeStruct((64, 40), "float32")}, {"dense": compress.dense()}
    compiled_for, message = programs.compiled_for, "RESOURCE_EXHAUSTED: no room"

    def compile_or_fail(lowered):
        if "all_reduce" in lowered.as_text():  # not the program that only reads
            raise jax.errors.JaxRuntimeError(message)
        return compiled_for(lowered)

    monkeypatch.setattr(programs, "compiled_for", compile_or_fail)
    assert rows_of(methods, shapes, HERE)[-1] == Refusal("dense", "needs more memory than a device has: no room")
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        rows_of(methods, shapes, HERE)


def test_collectives_inside_and_across_hosts():
    mesh = jax.make_mesh((4, 2), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)

    def f(x):
        return jax.lax.psum(x, "slow"), jax.lax.all_gather(x, "fast"), jax.lax.ppermute(x, "slow", [(0, 1), (1, 0)])

    spec = jax.sharding.PartitionSpec(("slow", "fast"))
    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    found = collectives(run.lower(jax.ShapeDtypeStruct((80,), "float32")).compile())
    inside, across = by_link(found, HERE)
    assert inside == {"all-gather": 40} and across == {"all-reduce": 60, "collective-permute": 40}
    assert not any(leaves_group(one, per_group=8) for one in found)


IOTA = """HloModule m, num_partitions=8

ENTRY %main (x: f32[10]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  ROOT %all-reduce.1 = f32[10]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), \
use_global_device_ids=true, to_apply=%add
}
"""


def test_groups_in_iota_format():
    (one,) = collectives(IOTA)
    assert one.groups == ((0, 2, 4, 6), (1, 3, 5, 7)) and one.group_size == 4


# What libtpu 0.0.52 makes of collectives over slices, shortened.
SLICES = """HloModule m, is_scheduled=true, num_partitions=24

ENTRY %main (x: u32[1,1,11530]) -> u32[3,1,11530] {{
  %bitcast = {shape}{{2,1,0:T(1,128)}} parameter(0)
  %after-all = token[] after-all()
  %send = ({shape}{{2,1,0:T(1,128)}}, u32[], token[]) send(%bitcast, %after-all), channel_id=2, is_host_transfer=true, \
frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="x_0",\
_xla_megascale_target={to},_xla_megascale_transfer_type="{kind}"}}, backend_config={{"flag_configs":[]}}
  %recv = (u32[3,1,11530]{{2,1,0:T(1,128)}}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, \
frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="{kind}"}}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true, \
frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime"}}
  ROOT %recv-done = (u32[3,1,11530]{{2,1,0:T(1,128)}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true, \
frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime"}}
}}
"""
ALL = '"{1,2,3}x{0:7}"'
RING = "{{100000->200000},{200000->300000},{300000->100000},{100001->200001}}"


@pytest.mark.parametrize(("shape", "to", "kind", "op", "sent"), [
    ("u32[1,1,11530]", ALL, "ALL_GATHER", "all-gather", 2 * 46120),
    ("bf16[12,8,128]", ALL, "ALL_REDUCE", "all-reduce", 32768),
    ("f32[96,1,128]", ALL, "REDUCE_SCATTER", "reduce-scatter", 32768),
    ("f32[1,1,128]", RING, "ONE_TO_ONE", "collective-permute", 512),
])  # fmt: skip
def test_transfers_between_slices_are_collectives(shape, to, kind, op, sent):
    (one,) = collectives(SLICES.format(shape=shape, to=to, kind=kind))
    assert (one.op, one.sent_bytes, one.group_size, one.between_slices) == (op, sent, 3, True)
    assert leaves_group(one, per_group=8)


def test_unknown_transfers_fail_the_audit():
    text = SLICES.format(shape="f32[1,1,128]", to="{{100000,200000}}", kind="BROADCAST")
    with pytest.raises(UnknownCollectiveError, match="unknown form of a transfer between slices"):
        collectives(text)
    with pytest.raises(UnknownCollectiveError, match="may communicate"):
        collectives(text.replace("xla_megascale_runtime", "something_else"))


CYCLES = """HloModule m, num_partitions=1

%body (p: (s32[], f32[4096])) -> (s32[], f32[4096]) {
  %p = (s32[], f32[4096]{0}) parameter(0)
  %f = f32[4096]{0} fusion(%p), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"10","iteration_bounds":["2"]}
  %s = f32[4096]{0} sort(%f), dimensions={0}, to_apply=%less
  ROOT %t = (s32[], f32[4096]{0}) tuple(%p, %s)
}

%condition (p: (s32[], f32[4096])) -> pred[] {
  %p = (s32[], f32[4096]{0}) parameter(0)
  %bound = s32[] constant(7)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%cheap (x: f32[4096]) -> f32[4096] {
  ROOT %x = f32[4096]{0} parameter(0)
}

%dear (x: f32[4096]) -> f32[4096] {
  %x = f32[4096]{0} parameter(0)
  ROOT %y = f32[4096]{0} negate(%x), backend_config={"estimated_cycles":"100"}
}

ENTRY %main (x: (s32[], f32[4096])) -> f32[4096] {
  %x = (s32[], f32[4096]{0}) parameter(0)
  %w = (s32[], f32[4096]{0}) while(%x), condition=%condition, body=%body
  %v = f32[4096]{0} get-tuple-element(%w), index=1
  %few = f32[8]{0} copy(%v)
  %k = (f32[64]{0}, s32[4096]{0}) custom-call(%v), custom_call_target="TopK"
  ROOT %c = f32[4096]{0} conditional(%few, %v, %v), branch_computations={%cheap, %dear}
}
"""


def test_cycles_of_loops_and_branches_and_what_is_left_out():
    found = cycles_of(CYCLES)
    assert found.total == 7 * 10 + 100
    assert found.left_out == {"sort": 1, "custom call TopK": 1}
    endless = cycles_of(CYCLES.replace("direction=LT", "direction=NE"))
    assert endless.total == 10 + 100 and endless.left_out["loop of unknown length, counted once"] == 1
    assert cycles_of(IOTA) is None


# --- with the compilers themselves ----------------------------------------------------------------------------------


@pytest.mark.targets
@pytest.mark.parametrize("name", ["v5e:3x5", "v5e:3x4x2slices"])
def test_real_compiler_refuses_a_topology_in_one_line(name):
    if targets.missing_packages(targets.TPU):
        pytest.skip("libtpu is not installed")
    with pytest.raises(UserError, match=f"^the compiler refuses the target '{name}': .+"):
        target_of(name)


KERNELS = """HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %j = s32[] fusion(%i), kind=kLoop, calls=%fused
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8]{0}) tuple(%j, %y)
}

%condition (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] fusion(%p.1), kind=kLoop, calls=%fused
}

%small (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}

%large (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  %s = f32[8]{0} sort(%b), dimensions={0}, to_apply=%fused
  ROOT %c = f32[8]{0} copy(%s)
}

ENTRY %main (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %t.1 = (s32[], f32[8]{0}) tuple(%zero, %x.1)
  %w = (s32[], f32[8]{0}) while(%t.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %z = f32[8]{0} get-tuple-element(%w), index=1
  %yes = pred[] fusion(%z), kind=kLoop, calls=%fused
  %d = f32[8]{0} conditional(%yes, %z, %z), true_computation=%small, false_computation=%large
  %start = (f32[8]{0}, f32[8]{0}) copy-start(%d)
  ROOT %done = f32[8]{0} copy-done(%start)
}
"""


def test_kernels_of_loops_and_branches():
    assert kernels_of(KERNELS) == Kernels(5 * 2 + 1 + 2 + 1, 1)
    endless = KERNELS.replace("known_trip_count", "unknown")
    assert kernels_of(endless) == Kernels(2 + 2 * 1 + 1 + 2 + 1, 1 + 2, False)  # a turn, its condition twice
