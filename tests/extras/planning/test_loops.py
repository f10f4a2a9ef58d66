"""What a program and a pass of its loops move, read from its text; test_compiled.py holds what is
read of large programs against what they need."""

from __future__ import annotations

import hlo
import jax
import jax.numpy as jnp
import pytest
import small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from loops import loops


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


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_groups_of_devices_are_read_in_every_spelling(text, groups):
    line = f"  %r = f32[8]{{0}} all-reduce(%x), channel_id=1, {text}, use_global_device_ids=true"
    assert hlo._groups(line, 4) == groups


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
