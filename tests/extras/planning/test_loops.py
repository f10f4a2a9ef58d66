"""What a pass of a loop moves, read from the text of a compiled program."""

from __future__ import annotations

import functools

import hlo
import jax
import jax.numpy as jnp
import pytest
import small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from loops import Loop, arrays, loops

TEXT = """HloModule m

%fused_slice (p0: bf16[4,64,128], p1: s32[]) -> bf16[1,64,128] {
  %p0 = bf16[4,64,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice.1 = bf16[1,64,128]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,128}
}

%fused_scatter (c: bf16[8,256,128], at: s32[8,2], new: bf16[8,1,128]) -> bf16[8,256,128] {
  %c = bf16[8,256,128]{2,1,0} parameter(0)
  %at = s32[8,2]{1,0} parameter(1)
  %new = bf16[8,1,128]{2,1,0} parameter(2)
  ROOT %scatter.1 = bf16[8,256,128]{2,1,0} scatter(%c, %at, %new), update_window_dims={1,2}, to_apply=%last
}

%fused_dot (x: bf16[8,128], w: bf16[1,64,128]) -> f32[8,64] {
  %x = bf16[8,128]{1,0} parameter(0)
  %w = bf16[1,64,128]{2,1,0} parameter(1)
  %flat = bf16[64,128]{1,0} bitcast(%w)
  ROOT %dot.1 = f32[8,64]{1,0} dot(%x, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%last (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  ROOT %b = bf16[] parameter(1)
}

%body (s: (s32[], bf16[4,64,128], bf16[8,256,128], bf16[8,128])) -> (s32[], bf16[4,64,128], bf16[8,256,128], bf16[8,128]) {
  %s = (s32[], bf16[4,64,128]{2,1,0}, /*index=2*/bf16[8,256,128]{2,1,0}, bf16[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = bf16[4,64,128]{2,1,0} get-tuple-element(%s), index=1
  %cache = bf16[8,256,128]{2,1,0} get-tuple-element(%s), index=2
  %x.1 = bf16[8,128]{1,0} get-tuple-element(%s), index=3
  %layer = bf16[1,64,128]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_slice
  %y = f32[8,64]{1,0} fusion(%x.1, %layer), kind=kCustom, calls=%fused_dot
  %sum = f32[8,64]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%last
  %places = s32[8,2]{1,0} custom-call(%sum), custom_call_target="somewhere"
  %news = bf16[8,1,128]{2,1,0} bitcast(%x.1)
  %written = bf16[8,256,128]{2,1,0} fusion(%cache, %places, %news), kind=kInput, calls=%fused_scatter
  ROOT %t = (s32[], bf16[4,64,128]{2,1,0}, bf16[8,256,128]{2,1,0}, bf16[8,128]{1,0}) tuple(%i, %stack, %written, %x.1)
}

%condition (s.1: (s32[], bf16[4,64,128], bf16[8,256,128], bf16[8,128])) -> pred[] {
  %s.1 = (s32[], bf16[4,64,128]{2,1,0}, bf16[8,256,128]{2,1,0}, bf16[8,128]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(16)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (a: (s32[], bf16[4,64,128], bf16[8,256,128], bf16[8,128])) -> bf16[8,128] {
  %start = (s32[], bf16[4,64,128]{2,1,0}, bf16[8,256,128]{2,1,0}, bf16[8,128]{1,0}) parameter(0)
  %while.1 = (s32[], bf16[4,64,128]{2,1,0}, bf16[8,256,128]{2,1,0}, bf16[8,128]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %out = bf16[8,128]{1,0} get-tuple-element(%while.1), index=3
}
"""  # noqa: E501
LAYER, ROWS, PRODUCT, PLACES, INDEX = 2 * 64 * 128, 2 * 8 * 128, 4 * 8 * 64, 4 * 8 * 2, 4


def only(text: str = TEXT, **how: float) -> Loop:
    [found] = loops(text, [0, 0], **how)
    return found


def test_a_pass_reads_slices_and_writes_in_place():
    loop = only()
    assert loop.passes == 16
    sliced, multiplied = LAYER + INDEX, ROWS + LAYER
    assert loop.read == sliced + multiplied + 2 * PRODUCT + PLACES + ROWS
    assert loop.written == LAYER + 2 * PRODUCT + PLACES + ROWS
    assert loop.moved == loop.read + loop.written


def test_what_is_only_moved_is_named():
    assert only().copies == {"bf16[1,64,128]": LAYER}


def test_kernels_and_collectives_are_counted():
    loop = only()
    assert loop.kernels == {"fusion": 3, "all-reduce": 1, "somewhere": 1}
    assert loop.collectives.kinds["all-reduce", False].runs == 1


def test_what_a_cache_holds_is_not_moved():
    """What the pass has computed, and what it reads of that; arguments are read all the same."""
    held = only(cache=4 * LAYER)
    assert held.read == LAYER + INDEX + ROWS + ROWS  # the scatter's rows are an argument's view
    assert held.written == ROWS  # in place, in what is larger than the cache holds


def test_what_lies_in_a_tpus_fast_memory_is_not_moved():
    here, there = (
        "%layer = bf16[1,64,128]{2,1,0}",
        "%layer = bf16[1,64,128]{2,1,0:T(8,128)(2,1)S(1)}",
    )
    loop = only(TEXT.replace(here, there))
    assert loop.read == only().read - LAYER and loop.written == only().written - LAYER
    assert not loop.copies


def test_arrays_of_a_tpu_are_padded_to_their_tiles():
    here, there = "%y = f32[8,64]{1,0}", "%y = f32[8,64]{1,0:T(8,128)}"
    assert only(TEXT.replace(here, there)).moved == only().moved + 2 * PRODUCT


def test_arrays_of_fusions_stay_inside_them():
    assert "f32[8,64]" in arrays(TEXT) and "bf16[64,128]" not in arrays(TEXT)


def compiled(function, *shapes) -> str:
    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_of_a_choice_the_least_counts_and_a_loop_within_counts_with_its_passes():
    def only_the_loop(_, y):
        return jax.lax.scan(lambda y, _: (jnp.sin(y @ y), None), y, length=3)[0]

    def steps(x, n):
        def inner(y, _):
            return jnp.sin(y @ y), None

        def step(_, carry):
            x, y = carry
            y = jax.lax.cond(n[0] > 0, lambda y: jax.lax.scan(inner, y, length=3)[0], jnp.cos, y)
            return x, y

        return jax.lax.fori_loop(0, 5, step, (x, x))

    outer, inner = loops(compiled(steps, (64, 64), (1,)), [0])
    assert (outer.passes, inner.passes) == (5, 3)
    assert outer.moved < 5 * 4 * 64 * 64 < 3 * inner.moved  # the cosine, and a copy
    taken = loops(compiled(lambda x: jax.lax.fori_loop(0, 5, only_the_loop, x), (64, 64)), [0])
    assert taken[0].moved >= 3 * taken[1].moved > 0


def test_a_text_without_loops_has_none():
    assert loops(compiled(lambda x: x + 1, (4,)), [0]) == []


@pytest.mark.parametrize("passes", [3, 9])
def test_passes_are_those_of_the_compiler(passes):
    def run(x):
        return jax.lax.scan(lambda y, _: (jnp.sin(y @ y), None), x, length=passes)[0]

    assert [loop.passes for loop in loops(compiled(run, (32, 32)), [0])] == [passes]


TWO_HOSTS = [0, 0, 0, 0, 1, 1, 1, 1]


# What a whole program moves.


def moved(function, *arguments, hosts=TWO_HOSTS) -> hlo.Traffic:
    return hlo.traffic(jax.jit(function).lower(*arguments).compile().as_text(), hosts)


def shaped(where, spec, *shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(where, spec))


@pytest.mark.parametrize("axis, across", [("data", True), ("tensor", False)])
def test_a_sum_in_a_loop_counts_once_per_pass_and_by_where_it_goes(axis, across):
    where = small.mesh_of(2, 1, 4)

    def summed(x):
        def body(total, _):
            return jnp.cos(jax.lax.psum(total, axis)), None

        return jax.lax.scan(body, x, length=5)[0]

    mapped = jax.shard_map(summed, mesh=where, in_specs=P(), out_specs=P(), check_vma=False)
    found = moved(mapped, shaped(where, P(), 16, 4))
    payload, group = 5 * 16 * 4 * 4, where.shape[axis]
    sent = 2 * payload * (group - 1) / group
    assert found == hlo.Traffic({("all-reduce", across): hlo.Moved(payload, sent, 5)}, 0)
    assert found.moved(not across) == hlo.Moved()


def test_nested_loops_multiply_and_branches_count():
    where = small.mesh_of(8)

    def branch(x):
        return jax.lax.psum(x, "data")

    def summed(x, flag):
        def inner(total, _):
            return jnp.sin(jax.lax.cond(flag[0] > 0, branch, jnp.cos, total)), None

        def outer(total, _):
            return jax.lax.scan(inner, total, length=3)[0], None

        return jax.lax.scan(outer, x, length=4)[0]

    mapped = jax.shard_map(summed, mesh=where, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    found = moved(mapped, shaped(where, P(), 8), shaped(where, P(), 1))
    assert found.moved(across=True)[::2] == (4 * 3 * 8 * 4, 12)


def test_a_loop_without_a_known_end_is_told():
    where = small.mesh_of(8)

    def summed(x):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) > 1, lambda x: 0.1 * jax.lax.psum(x, "data"), x
        )

    mapped = jax.shard_map(summed, mesh=where, in_specs=P(), out_specs=P(), check_vma=False)
    found = moved(mapped, shaped(where, P(), 8))
    assert found.endless == 1 and found.moved(across=True).runs == 1


def test_a_gather_counts_all_that_a_chip_then_has():
    where = small.mesh_of(2, 1, 4)
    whole = NamedSharding(where, P())
    found = moved(
        lambda x: jax.lax.with_sharding_constraint(2 * x, whole), shaped(where, P("tensor"), 16, 8)
    )
    assert found.kinds == {("all-gather", False): hlo.Moved(512, 512 * 3 / 4, 1)}


def test_a_permutation_that_leaves_the_host_is_seen():
    where = small.mesh_of(8)

    def shifted(x, by):
        return jax.lax.ppermute(x, "data", [(i, i ^ by) for i in range(8)])

    for by, across in ((1, False), (4, True)):
        mapped = jax.shard_map(
            functools.partial(shifted, by=by), mesh=where, in_specs=P("data"), out_specs=P("data")
        )
        found = moved(mapped, shaped(where, P("data"), 16))
        assert found.kinds == {("collective-permute", across): hlo.Moved(8, 8, 1)}


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_groups_of_devices_are_read_in_every_spelling(text, groups):
    line = f"  %r = f32[8]{{0}} all-reduce(%x), channel_id=1, {text}, use_global_device_ids=true"
    assert hlo._groups(line, 4) == groups


def test_a_spelling_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="cannot be read"):
        hlo._groups("  %r = f32[8]{0} all-reduce(%x), replica_groups=@mine", 4)


def test_a_loop_of_the_tpu_compiler_is_counted_by_its_condition():
    """It writes tiled shapes, and no trip count."""
    text = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[]{:T(128)} add(%a, %b)
}

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %r = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-reduce(%g), replica_groups=[2,4]<=[8], to_apply=%add
}

%condition (p: (s32[], bf16[8,128])) -> pred[] {
  %seven = s32[]{:T(128)} constant(7)
  %other = s32[]{:T(128)} constant(3)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %seven), direction=LT
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %w = (s32[], /*index=1*/bf16[8,128]{1,0}) while(%t), condition=%condition, body=%body
}
"""
    found = hlo.traffic(text, TWO_HOSTS)
    assert found.kinds == {("all-reduce", False): hlo.Moved(7 * 2048, 7 * 2048 * 1.5, 7)}
