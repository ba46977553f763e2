"""The audit of `jgc.lab.shared.hlo` counts what XLA really compiled, and fails on what it does not know.

First real programs over 8 CPU devices, then HLO text: what a GPU prints, and what must be refused.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jgc.lab.shared.hlo import Total, UnknownCollectiveError, UnknownCountError, bytes_sent, collectives, table

REPLICATED = P()
RING = [(i, (i + 1) % 8) for i in range(8)]
F32 = jax.ShapeDtypeStruct((8, 100), jnp.float32)  # f32[1,100], 400 bytes, on each device


def mesh(**axes):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)


def compiled(f, *args, out=REPLICATED, over=None):
    """`f` compiled under shard_map, the first dimension of each array split over all devices of the mesh."""
    over = over or mesh(x=8)
    specs = tuple(jax.tree.map(lambda a: P(over.axis_names) if a.shape else P(), arg) for arg in args)
    return jax.jit(jax.shard_map(f, mesh=over, in_specs=specs, out_specs=out)).lower(*args).compile()


def split(dtype, *shape):
    return jax.ShapeDtypeStruct((8, *shape), dtype)


def only(found):
    (c,) = found
    return c


@pytest.mark.parametrize(("f", "arg", "out", "kind", "dtype", "payload", "sent"), [
    (lambda x: lax.psum(x, "x"), F32, P(), "all-reduce", "f32", 400, 700),
    (lambda x: lax.psum(x, "x"), split(jnp.int8, 3), P(), "all-reduce", "s8", 3, Fraction(21, 4)),
    (lambda x: lax.pmax(x, "x"), split(bool, 3), P(), "all-reduce", "pred", 3, Fraction(21, 4)),
    (lambda x: lax.all_gather(x, "x"), F32, P("x"), "all-gather", "f32", 400, 2800),
    (lambda x: lax.all_gather(x, "x", tiled=True), split(jnp.uint8, 9), P("x"), "all-gather", "u8", 9, 63),
    (lambda x: lax.psum_scatter(x[0], "x", tiled=True), split(jnp.float32, 80), P("x"),
     "reduce-scatter", "f32", 320, 280),
    (lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), split(jnp.float32, 80), P("x"),
     "all-to-all", "f32", 320, 280),
    (lambda x: lax.ppermute(x, "x", RING), split(jnp.uint16, 5), P("x"), "collective-permute", "u16", 10, 10),
    (lambda x: lax.ppermute(x, "x", [(0, 1), (2, 2)]), F32, P("x"), "collective-permute", "f32", 400, 400),
])
def test_one_collective(f, arg, out, kind, dtype, payload, sent):
    c = only(collectives(compiled(f, arg, out=out)))
    assert (c.op, c.dtype, c.payload_bytes, c.sent_bytes, c.times) == (kind, dtype, payload, sent, 1)
    assert "shard_map" in c.op_name


@pytest.mark.parametrize("f", [
    lambda x: lax.psum(x, "x"), lambda x: lax.all_gather(x, "x"), lambda x: lax.ppermute(x, "x", RING)])
def test_bf16_travels_as_f32_on_cpu(f):
    out = P() if "psum" in f.__code__.co_names else P("x")
    c = only(collectives(compiled(f, split(jnp.bfloat16, 50), out=out)))
    assert (c.dtype, c.elements, c.payload_bytes) == ("f32", 50, 200)


def test_pmean_of_a_tree_is_one_combined_all_reduce():
    tree = {"a": split(jnp.float32, 100), "b": split(jnp.float32, 3, 5), "c": split(jnp.bfloat16, 2)}
    c = only(collectives(compiled(lambda t: jax.tree.map(lambda v: lax.pmean(v, "x"), t), tree)))
    assert (c.op, c.elements, c.payload_bytes) == ("all-reduce", 117, 468)


def test_psums_of_two_dtypes_stay_two_collectives():
    found = collectives(compiled(lambda x, y: lax.psum((x, y), "x"), F32, split(jnp.int32, 10)))
    assert sorted((c.dtype, c.sent_bytes) for c in found) == [("f32", 700), ("s32", 70)]


@pytest.mark.parametrize(("axes", "n"), [(("a",), 2), (("b",), 4), (("a", "b"), 8)])
def test_group_is_the_axes_reduced_over(axes, n):
    left = P(tuple({"a", "b"} - set(axes)) or None)
    c = only(collectives(compiled(lambda x: lax.psum(x, axes), F32, out=left, over=mesh(a=2, b=4))))
    assert (c.group_size, c.sent_bytes) == (n, Fraction(2 * (n - 1) * 400, n))


def test_ring_over_one_axis_of_two():
    ring = [(i, (i + 1) % 4) for i in range(4)]
    c = only(collectives(compiled(lambda x: lax.ppermute(x, "b", ring), F32, out=P(("a", "b")),
                                  over=mesh(a=2, b=4))))
    assert c.sent_bytes == 400


def test_all_to_all_over_one_axis_of_two():  # XLA prints it without use_global_device_ids
    c = only(collectives(compiled(lambda x: lax.all_to_all(x, "b", 1, 0, tiled=True), F32, out=P(("a", "b")),
                                  over=mesh(a=2, b=4))))
    assert (c.group_size, c.sent_bytes) == (4, 300)


def test_axis_index_groups():
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    found = collectives(compiled(lambda x: lax.all_gather(x, "x", axis_index_groups=pairs), F32, out=P("x")))
    assert only(found).group_size == 2


def test_one_device_sends_nothing():
    found = collectives(compiled(lambda x: lax.psum(x, "x"), F32, over=mesh(x=1)))
    assert sum(c.sent_bytes for c in found) == 0


def test_hand_made_ring_costs_what_all_reduce_costs():
    def ring(x):  # x: f32[1,80] on each device
        parts, me = x.reshape(8, 10), lax.axis_index("x")
        part = parts[me]
        for hop in range(7):
            part = lax.ppermute(part, "x", RING) + parts[(me - hop - 1) % 8]
        return lax.all_gather(part, "x")
    found = collectives(compiled(ring, split(jnp.float32, 80), out=P("x")))
    assert {kind: t.times for kind, t in table(found).items()} == {"collective-permute": 7, "all-gather": 1}
    assert sum(c.sent_bytes for c in found) == bytes_sent("all-reduce", 320, 8)


def test_collectives_that_sharding_alone_brings_are_counted():
    def sharding(*spec):
        return jax.NamedSharding(mesh(x=8), P(*spec))
    f = jax.jit(lambda x: x.sum(0), in_shardings=sharding("x"), out_shardings=sharding())
    assert only(collectives(f.lower(F32).compile())).sent_bytes == 700


def test_local_operations_and_custom_calls_pass():
    def f(x):
        q, _ = jnp.linalg.qr(x.reshape(10, 10))
        values, where = lax.top_k(x[0], 5)
        return q + jnp.sort(x)[0, :10] + jnp.zeros(10).at[where % 10].add(values) + jax.random.normal(
            jax.random.key(0), (10,))
    text = compiled(f, F32, out=P("x")).as_text()
    assert "custom-call(" in text and collectives(text) == ()


def shift(_, x):
    return lax.ppermute(x, "x", RING) + 1


@pytest.mark.parametrize(("f", "runs"), [
    (lambda x: lax.fori_loop(0, 5, shift, x), 5),
    (lambda x: lax.fori_loop(0, 5, lambda _, v: lax.fori_loop(0, 3, shift, v) * 2, x), 15),
    (lambda x: lax.scan(lambda v, _: (shift(0, v), None), x, None, length=7, unroll=2)[0], 7),
])
def test_loops_multiply(f, runs):
    t = table(collectives(compiled(f, F32, out=P("x"))))["collective-permute"]
    assert t == Total(times=runs, payload_bytes=400 * runs, sent_bytes=Fraction(400 * runs))


def test_scan_with_two_kinds():
    def f(x):
        return lax.scan(lambda v, _: (shift(0, v), lax.pmean(v, "x")), x, None, length=7)
    t = table(collectives(compiled(f, F32, out=(P("x"), P()))))
    assert (t["collective-permute"].sent_bytes, t["all-reduce"].sent_bytes) == (2800, 4900)


def test_loop_without_a_trip_count_raises_only_if_it_communicates():
    def loop(body):
        n = jax.ShapeDtypeStruct((), jnp.int32)
        return compiled(lambda n, x: lax.fori_loop(0, n, body, x), n, F32, out=P("x"))
    with pytest.raises(UnknownCountError, match=r"while\("):
        collectives(loop(shift))
    assert collectives(loop(lambda _, v: v * 2)) == ()


def test_branches_must_send_the_same():
    flag = jax.ShapeDtypeStruct((), jnp.bool_)

    def cond(other):
        return compiled(lambda p, x: lax.cond(p, lambda v: lax.psum(v * 2, "x"), other, x), flag, F32)
    assert only(collectives(cond(lambda v: lax.psum(v, "x")))).sent_bytes == 700
    with pytest.raises(UnknownCountError, match=r"conditional\("):
        collectives(cond(lambda v: jnp.zeros((1, 100))))


# HLO text. `module` puts one ENTRY of f32[8,4] (128 bytes) over 8 devices around the lines of a test.

HEAD = """HloModule m, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}, %s

%%add (a: f32[], b: f32[]) -> f32[] {
  %%a = f32[] parameter(0)
  %%b = f32[] parameter(1)
  ROOT %%sum = f32[] add(%%a, %%b)
}
"""
GLOBAL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"


def module(*lines, before="", devices="num_partitions=8"):
    body = "\n  ".join(["%p = f32[8,4]{1,0} parameter(0)", *lines, "ROOT %out = f32[8,4]{1,0} negate(%p)"])
    return f"{HEAD % devices}{before}\nENTRY %main (p: f32[8,4]) -> f32[8,4] {{\n  {body}\n}}\n"


def reduce_over(groups, **kwargs):
    attributes = f"channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add"
    return module(f"%r = f32[8,4]{{1,0}} all-reduce(%p), {attributes}", **kwargs)


ASYNC_PAIRS = {
    "all-reduce": f"""
      %s = f32[8,4]{{1,0}} all-reduce-start(%p), {GLOBAL}, to_apply=%add
      %d = f32[8,4]{{1,0}} all-reduce-done(%s)""",
    "all-gather": f"""
      %s = (f32[8,4]{{1,0}}, f32[64,4]{{1,0}}) all-gather-start(%p), {GLOBAL}, dimensions={{0}}
      %d = f32[64,4]{{1,0}} all-gather-done(%s)""",
    "reduce-scatter": f"""
      %s = ((f32[8,4]), f32[1,4]{{1,0}}) reduce-scatter-start(%p), {GLOBAL}, dimensions={{0}}, to_apply=%add
      %u = ((f32[8,4]{{1,0}}), f32[1,4]{{1,0}}) reduce-scatter-update(%s)
      %d = f32[1,4]{{1,0}} reduce-scatter-done(%u)""",
    "collective-permute": """
      %s = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%p), channel_id=1, \
source_target_pairs={{0,1},{1,2}}
      %d = f32[8,4]{1,0} collective-permute-done(%s)""",
}


@pytest.mark.parametrize("kind", ASYNC_PAIRS)
def test_start_and_done_count_once(kind):
    c = only(collectives(module(*ASYNC_PAIRS[kind].strip().splitlines())))
    assert (c.op, c.dtype, c.payload_bytes, c.sent_bytes) == (kind, "f32", 128, bytes_sent(kind, 128, 8))


def test_combined_start_of_two_dtypes():
    c = only(collectives(module(
        "%h = bf16[3]{0} constant({1, 2, 3})",
        f"%s = (f32[8,4]{{1,0}}, bf16[3]{{0}}) all-reduce-start(%p, /*index=1*/%h), {GLOBAL}, to_apply=%add",
        "%d = (f32[8,4]{1,0}, bf16[3]{0}) all-reduce-done(%s)",
        "%g = f32[8,4]{1,0} get-tuple-element(%d), index=0")))
    assert (c.dtype, c.elements, c.payload_bytes, c.sent_bytes) == ("f32+bf16", 35, 134, Fraction(7 * 134, 4))


WRAPPED = f"""
%wrapped (q: f32[8,4]) -> f32[1,4] {{
  %q = f32[8,4]{{1,0}} parameter(0)
  ROOT %rs = f32[1,4]{{1,0}} reduce-scatter(%q), {GLOBAL}, dimensions={{0}}, to_apply=%add
}}
"""


@pytest.mark.parametrize("lines", [
    ["%s = ((f32[8,4]{1,0}), f32[1,4]{1,0}) async-start(%p), calls=%wrapped",
     "%u = ((f32[8,4]{1,0}), f32[1,4]{1,0}) async-update(%s), calls=%wrapped",
     "%d = f32[1,4]{1,0} async-done(%u), calls=%wrapped"],
    ["%f = f32[1,4]{1,0} fusion(%p), kind=kCustom, calls=%wrapped"],
    ["%c = f32[1,4]{1,0} call(%p), to_apply=%wrapped"],
])
def test_wrappers_count_what_they_hold(lines):
    assert only(collectives(module(*lines, before=WRAPPED))).sent_bytes == 112


IN_STEPS = '%g = f32[64,4]{1,0} all-gather(%q), channel_id=CHANNEL, replica_groups={{0,1,2,3,4,5,6,7}}, \
dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}'


def in_steps(first=1, second=1, start="AsyncCollectiveStart"):
    """A gather as TPUs run it beside other work: started in one fusion, gone on with in the next."""
    fusions = (
        f"%first (q: f32[8,4]) -> f32[64,4] {{\n  %q = f32[8,4]{{1,0}} parameter(0)\n"
        f"  {IN_STEPS.replace('CHANNEL', str(first))}\n"
        f'  ROOT %r = (f32[64,4]{{1,0}}, u32[]) custom-call(%g), custom_call_target="{start}"\n}}\n',
        f"%second (q: f32[8,4]) -> f32[64,4] {{\n  %q = f32[8,4]{{1,0}} parameter(0)\n"
        f"  {IN_STEPS.replace('CHANNEL', str(second))}\n"
        '  ROOT %r = f32[64,4]{1,0} custom-call(%q, %g), custom_call_target="AsyncCollectiveDone"\n}\n',
    )
    calls = [f"%{name} = f32[64,4]{{1,0}} fusion(%p), kind=kCustom, calls=%{name}" for name in ("first", "second")]
    return module(*calls, before="\n".join(fusions))


def test_collective_in_steps_counts_once():
    assert only(collectives(in_steps())).sent_bytes == 7 * 128


@pytest.mark.parametrize("broken", [{"second": 2}, {"start": "AsyncCollectiveDone"}], ids=str)
def test_collective_in_steps_that_nothing_starts_raises(broken):
    with pytest.raises(UnknownCollectiveError, match="no computation starts"):
        collectives(in_steps(**broken))


def test_each_call_counts():
    call = "%%%s = f32[1,4]{1,0} call(%%p), to_apply=%%wrapped"
    assert len(collectives(module(call % "one", call % "two", before=WRAPPED))) == 2


@pytest.mark.parametrize("names", [
    "true_computation=%wrapped, false_computation=%{}", "branch_computations={{%wrapped, %{}}}"])
def test_branches_by_either_name(names):
    line = "%c = f32[1,4]{1,0} conditional(%i, %p, %p), "
    assert only(collectives(module(line + names.format("wrapped"), before=WRAPPED))).sent_bytes == 112
    with pytest.raises(UnknownCountError, match="branches"):
        collectives(module(line + names.format("add"), before=WRAPPED))


@pytest.mark.parametrize(("groups", "n"), [
    ("replica_groups={}", 8),
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
    ("replica_groups={{0,1,2},{3,4,5,6,7}}", 5),
    ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", 1),
    ("replica_groups=[2,4]<=[8]", 4),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
    ("replica_groups=mesh['x'=8] {'x'}", 8),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 4),
    ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", 4),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a'}", 2),
])
def test_replica_groups(groups, n):
    assert only(collectives(reduce_over(groups))).group_size == n


@pytest.mark.parametrize("groups", [
    "replica_groups=@later", "replica_groups=mesh['x'=8] {}", "replica_groups=mesh<x=8> {x}",
    "constrain_layout=true", "replica_groups={{0,1,2,3,4,5,6,7,8}}", "replica_groups=[1,16]<=[16]"])
def test_strange_replica_groups_raise(groups):
    with pytest.raises(UnknownCollectiveError, match="all-reduce"):
        collectives(reduce_over(groups))


def test_no_groups_means_all_replicas_and_partitions():
    assert only(collectives(reduce_over("replica_groups={}", devices="replica_count=3, num_partitions=4"))
                ).group_size == 12


def test_groups_of_replicas_that_stand_for_their_partitions_raise():
    line = "%r = f32[8,4]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0}}, to_apply=%add"
    with pytest.raises(UnknownCollectiveError, match="do not fit"):
        collectives(module(line))


def permute(shape):
    return module(f'%v = {shape} custom-call(), custom_call_target="values"',
                  f"%r = {shape} collective-permute(%v), channel_id=1, source_target_pairs={{{{0,1}}}}")


@pytest.mark.parametrize(("shape", "payload"), [
    ("pred[9]{0}", 9), ("u4[9]{0:E(4)}", 5), ("s4[9]{0}", 9), ("s2[9]{0:T(128)E(2)}", 3),
    ("f4e2m1fn[9]{0:E(4)}", 5), ("f8e4m3fn[9]{0}", 9), ("f8e5m2[9]", 9), ("bf16[3,3]{1,0}", 18), ("f16[]", 2),
    ("f64[2]", 16), ("c64[9]{0}", 72), ("c128[1]", 16), ("s64[0]", 0)])
def test_bytes_of_a_dtype(shape, payload):
    c = only(collectives(permute(shape)))
    assert (c.payload_bytes, c.sent_bytes) == (payload, payload)


@pytest.mark.parametrize("shape", ["f12[9]{0}", "token[]", "f32[<=9]{0}"])
def test_unknown_bytes_raise(shape):
    with pytest.raises(UnknownCollectiveError, match="cannot tell the bytes"):
        collectives(permute(shape))


@pytest.mark.parametrize(("pairs", "sent"), [
    ("{{0,1},{1,0}}", 128), ("{{0,1},{2,2}}", 128), ("{{0,0},{1,1}}", 0), ("{}", 0),
    ("{{0,1},{0,2},{1,3}}", 256)])
def test_permute_counts_its_busiest_sender(pairs, sent):
    line = f"%r = f32[8,4]{{1,0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
    assert only(collectives(module(line))).sent_bytes == sent


UNKNOWN = [
    "%u = f32[8,4]{1,0} collective-broadcast(%p), replica_groups={{0,1}}",
    "%u = f32[8,4]{1,0} ragged-all-to-all(%p, %p, %p, %p, %p, %p), replica_groups={{0,1}}",
    "%u = (f32[8,4]{1,0}, u32[], token[]) send(%p, %p), channel_id=3",
    "%u = token[] send-done(%p), channel_id=3",
    "%u = (f32[8,4]{1,0}, u32[], token[]) recv(%p), channel_id=3",
    "%u = f32[8,4]{1,0} collective-reduce(%p), replica_groups={{0,1}}",
    "%u = f32[8,4]{1,0} all-shuffle-start(%p)",
    '%u = f32[8,4]{1,0} custom-call(%p), custom_call_target="fast", replica_groups={{0,1}}',
    '%u = f32[8,4]{1,0} custom-call(%p), custom_call_target="ncclGroup"',
    '%u = f32[8,4]{1,0} custom-call(%p), custom_call_target="mpi_Allreduce_ffi"',
    "%u = f32[8,4] collective-permute(%p, %p, %p, %p), source_target_pairs={{0,1}}, slice_sizes={{1,4}}",
    f"%u = f32[8,4]{{1,0}} all-reduce(%elsewhere), {GLOBAL}, to_apply=%add",
    "%u = f32[1,4]{1,0} reduce(%p, %p), dimensions={0}, to_apply=%wrapped",
    '%u = f32[1,4]{1,0} custom-call(%p), custom_call_target="fast", called_computations={%wrapped}',
    "%u = f32[1,4]{1,0} call(%p), to_apply=%absent",
    "%u gibberish",
]


@pytest.mark.parametrize("line", UNKNOWN)
def test_unknown_collectives_raise(line):
    name = "absent" if "absent" in line else line[:20]
    with pytest.raises(UnknownCollectiveError) as error:
        collectives(module(line, before=WRAPPED))
    assert name in str(error.value)


def test_names_and_user_text_are_not_taken_for_collectives():
    text = module(
        '%all-reduce.1 = f32[8,4] negate(%p), metadata={op_name="all-reduce(%p), calls=%x \\"to_apply=%y"}',
        '%k = f32[5] custom-call(%p), custom_call_target="TopK", called_computations={%add}',
        '%l = f32[5] custom-call(%p), custom_call_target="compiled_lapack", metadata={op_name="send/recv"}')
    assert collectives(text) == ()


LOOP = f"""
%body (v: f32[8,4]) -> f32[8,4] {{
  %v = f32[8,4]{{1,0}} parameter(0)
  ROOT %r = f32[8,4]{{1,0}} all-reduce(%v), {GLOBAL}, to_apply=%add
}}

%condition (w: f32[8,4]) -> pred[] {{
  %w = f32[8,4]{{1,0}} parameter(0)
  %g = f32[64,4]{{1,0}} all-gather(%w), {GLOBAL}, dimensions={{0}}
  ROOT %t = pred[] constant(true)
}}
"""


@pytest.mark.parametrize("config", [
    '{"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}',
    '{"known_init_step":{"init":"0","step":"1"},"known_trip_count":{"n":"6"}}',
    r'"{\"known_trip_count\":{\"n\":\"6\"}}"'])
def test_condition_runs_once_more_than_the_body(config):
    line = f"%w = f32[8,4]{{1,0}} while(%p), condition=%condition, body=%body, backend_config={config}"
    assert {k: t.times for k, t in table(collectives(module(line, before=LOOP))).items()} == {
        "all-reduce": 6, "all-gather": 7}


def test_loop_text_without_trip_count_raises():
    line = "%w = f32[8,4]{1,0} while(%p), condition=%condition, body=%body"
    with pytest.raises(UnknownCountError, match="known_trip_count"):
        collectives(module(line, before=LOOP))


@pytest.mark.parametrize("text", [
    "", "module @jit_f { }", HEAD % "num_partitions=8", module("%n = f32[] negate(%p)")[:-3]])
def test_text_that_is_no_whole_module_raises(text):
    with pytest.raises(UnknownCollectiveError, match="HLO module"):
        collectives(text)


@pytest.mark.parametrize(("kind", "sent"), [
    ("all-reduce", Fraction(40, 3)), ("all-gather", 20), ("reduce-scatter", Fraction(20, 3)),
    ("all-to-all", Fraction(20, 3)), ("collective-permute", 10)])
def test_byte_rules(kind, sent):
    assert bytes_sent(kind, 10, 3) == sent
    assert bytes_sent(kind, 10, 1) == 0


def test_byte_rules_refuse():
    with pytest.raises(UnknownCollectiveError, match="gossip"):
        bytes_sent("gossip", 10, 3)
    for operand_bytes, n in ((10, 0), (-1, 2)):
        with pytest.raises(ValueError, match=f"got {n} and {operand_bytes}"):
            bytes_sent("all-reduce", operand_bytes, n)
