"""Devices to a mesh."""

from __future__ import annotations

import operator
import threading
import time

import bounds
import jax
import numpy as np
import pytest
import small

from marft_jax.errors import BadInput
from marft_jax.models import decoder
from marft_jax.models.weights import load
from marft_jax.parallel import mesh
from marft_jax.settings import config as config_lib


@pytest.mark.parametrize("asked, got", [((-1, 1, 1), (8, 1, 1)), ((2, -1, 2), (2, 2, 2))])
def test_minus_one_fills_the_mesh(asked, got):
    assert tuple(mesh.make_mesh(config_lib.Mesh(*asked)).shape.values()) == got


@pytest.mark.parametrize("asked", [(3, 1, 1), (-1, -1, 1), (-1, 3, 1), (4, 4, 1)])
def test_an_impossible_mesh_is_refused_with_the_possible_ones(asked):
    with pytest.raises(BadInput, match=r"expected .* = 8 devices, got .*\(2, 2, 2\)"):
        mesh.make_mesh(config_lib.Mesh(*asked))


@pytest.mark.parametrize("asked, learning, playing", [
    ({"rollout": (2,)}, (6, 1, 1), (2, 1, 1)),
    ({"rollout": (1, 2, 2), "tensor": 2}, (2, 1, 2), (1, 2, 2)),
])  # fmt: skip
def test_devices_that_only_play_have_a_mesh_of_their_own(asked, learning, playing):
    pair = mesh.make_meshes(config_lib.Mesh(**asked))
    assert [tuple(where.shape.values()) for where in pair] == [learning, playing]
    assert [d.id for where in pair for d in where.devices.flat] == list(range(8))
    assert len(set(mesh.make_meshes(config_lib.Mesh(tensor=2)))) == 1


def test_every_process_has_a_share_of_both_meshes():
    pair = mesh.make_meshes(config_lib.Mesh(rollout=(2,), tensor=3), per_process=4)
    assert [[d.id for d in where.devices.flat] for where in pair] == [[0, 1, 2, 4, 5, 6], [3, 7]]


@pytest.mark.parametrize("asked, message", [
    ({"rollout": (8,)}, "--mesh.rollout: expected .* and fewer than its 4, got 8"),
    ({"rollout": (3,)}, "--mesh.rollout: expected .* each of 2 processes .* got 3"),
    ({"rollout": (1, 1, 1, 2)}, "--mesh.rollout: expected data, or data, .* got 1 1 1 2"),
    ({"rollout": (1, 1, 4)}, "--mesh.rollout: fsdp x tensor = 4 .* divisor of the 2 devices"),
    ({"rollout": (4,), "data": 8}, "expected .* = 4 devices that --mesh.rollout leaves, got"),
])  # fmt: skip
def test_devices_that_cannot_be_divided_are_refused(asked, message):
    with pytest.raises(BadInput, match=message):
        mesh.make_meshes(config_lib.Mesh(**asked), per_process=4)


def test_a_base_and_adapters_get_to_the_mesh_that_plays():
    learning, playing = mesh.make_meshes(config_lib.Mesh(fsdp=2, rollout=(1, 1, 2)))
    base = small.base_on(learning, 1)
    copy = load.copy_base(base.params, mesh.placer(playing))
    for there, here in zip(jax.tree.leaves(copy), jax.tree.leaves(base.params), strict=True):
        np.testing.assert_array_equal(there, here)
    table = copy["embed"]["embedding"][...]
    assert table.sharding.shard_shape(table.shape) == (264 // 2, 32)
    adapters = jax.device_put(small.adapters(layers=1), mesh.replicated(learning))
    placed = mesh.placed(adapters, playing)
    for there, here in zip(jax.tree.leaves(placed), jax.tree.leaves(adapters), strict=True):
        np.testing.assert_array_equal(there, here)
        assert there.sharding == mesh.replicated(playing)
    assert all(map(operator.is_, *map(jax.tree.leaves, (mesh.placed(placed, playing), placed))))


def test_bases_that_play_apart_take_their_weights_from_the_mesh_without_a_copy():
    whole = small.mesh_of(4, 1, 2)
    large, other = mesh.parts(whole, (3, 1), 2)
    assert (large.devices.shape, other.devices.shape) == ((3, 1, 2), (1, 1, 2))
    assert mesh.parts(whole, (), 2) == [whole, whole]
    params = small.base_on(whole, 1).params
    for part, own in [(large, mesh.placed(params, large)), (other, mesh.placed(params, other))]:
        for there, here in zip(jax.tree.leaves(params), jax.tree.leaves(own), strict=True):
            np.testing.assert_array_equal(there, here)
            assert here.sharding.device_set == {*part.devices.flat}
    with pytest.raises(BadInput, match="--mesh.bases: expected 2 numbers, .* is 4 .* got 2 1"):
        mesh.parts(whole, (2, 1), 2)


def test_matrices_are_split_and_what_does_not_divide_is_not():
    where = mesh.make_mesh(config_lib.Mesh(2, 2, 2))
    split = mesh.base_sharding(where, ("heads", "model"), (64, 32))
    assert split.shard_shape((64, 32)) == (32, 16)
    assert mesh.base_sharding(where, ("model", "hidden"), (63, 32)).spec[0] is None
    assert mesh.base_sharding(where, (None,), (64,)).is_fully_replicated
    assert mesh.row_shards(where) == 4


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_a_forward_pass_is_the_same_on_every_mesh(shape):
    """Each axis works, and takes its share of the matrices (the embedding is 264 x 32)."""
    tokens = np.random.default_rng(0).integers(0, 256, (8, 16)).astype(np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16))
    where = small.mesh_of(*shape)
    model, one = small.base_on(where, 1), small.base(1)
    rows = jax.device_put((tokens, positions, positions * 0 + 15), mesh.rows(where))
    run = jax.jit(lambda params, rows: decoder.forward(one.graphdef, params, *rows)[0])
    expected = run(one.params, (tokens, positions, positions * 0 + 15))
    bounds.close(run(model.params, rows), expected, bounds.forward(layers=1))
    table = model.params["embed"]["embedding"][...]
    assert table.sharding.shard_shape(table.shape) == (264 // shape[2], 32 // shape[1])
    assert rows[0].sharding.shard_shape((8, 16)) == (8 // (shape[0] * shape[1]), 16)


def test_programs_on_several_devices_are_launched_one_after_another():
    """Whichever thread launches them; on one device they need not be."""
    inside, most = [], []

    def program():
        inside.append(True)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    launched = mesh.serialised(small.mesh_of(2, 1, 1), program)
    threads = [threading.Thread(target=launched) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1] and launched.__name__ == "program"
    assert mesh.serialised(small.one_device(), program) is program
