"""Weights on meshes: each device holds its slice and no more, drawn, read from a checkpoint or from Orbax's files."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.checkpoint import CheckpointError, RandomSource, load_checkpoint, random_parameters
from dsv41.checkpoint.orbax import restore_variables, save_variables
from dsv41.checkpoint.placement import flatten_tree, unflatten_tree
from dsv41.config import load_config
from dsv41.declared import abstract_variables, padded_leaves
from dsv41.layers.dspark import Drafter
from dsv41.loading import checkpoint_variables, load_drafter, random_variables
from dsv41.model import Model
from dsv41.settings import Settings
from tests.conftest import GOLDEN, PAGE_TOKENS
from tests.helpers import SMALL_LAYOUT, TWO_LAYERS, with_text
from tests.test_sharded_steps import meshed

AXES = {"expert": 4, "tensor": 2}
TABLE = ("engram_table_0", "weight")


@pytest.fixture(scope="module")
def small() -> Model:
    """A small model with packed weights, on one device."""
    config = with_text(load_config(GOLDEN / "mini8" / "fp8"), **SMALL_LAYOUT | TWO_LAYERS)
    return Model(Settings.default(config, page_tokens=PAGE_TOKENS))


@pytest.fixture(scope="module")
def weights(small) -> dict:
    return random_variables(small, 3, None)


def bits(array: jax.Array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_slices(tree: dict, whole: dict, model: Model) -> None:
    """Each device of the mesh holds its slice of the whole tree, with zeros behind it, and nothing else."""
    mesh, whole = model.settings.parallel.mesh, flatten_tree(whole)
    assert flatten_tree(tree).keys() == whole.keys()
    for path, leaf in flatten_tree(tree).items():
        assert leaf.sharding.mesh == mesh, path
        assert leaf.dtype == whole[path].dtype, path
        wanted = bits(whole[path])
        wanted = np.pad(wanted, [(0, new - old) for old, new in zip(wanted.shape, leaf.shape, strict=True)])
        assert {shard.device for shard in leaf.addressable_shards} == set(mesh.devices.flat), path
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(bits(shard.data), wanted[shard.index], err_msg="/".join(path))


def test_each_device_loads_exactly_its_slice(small, weights):
    model = meshed(small, AXES)
    variables = random_variables(model, 3, None)
    assert_slices(variables, weights, model)
    params = variables["params"]
    rows, experts = small.settings.text.engram_num_embeddings[0], small.settings.text.n_routed_experts
    assert rows % 8
    table = params[TABLE[0]][TABLE[1]]
    assert {shard.data.shape[0] for shard in table.addressable_shards} == {-(-rows // 8)}
    # Written in place slice by slice, as large tables are.
    target = {TABLE[0]: abstract_variables(model)[TABLE[0]]}
    source, padded = RandomSource(small.settings.config, 3), padded_leaves(model)
    sliced = load_checkpoint(source, small.settings.config, target, slice_bytes=10_000, padded=padded)
    assert_slices(sliced, {TABLE[0]: weights["params"][TABLE[0]]}, model)
    stacked = params["decoder"]["groups_0"]["runs_0"]["ffn"]["experts"]["w1"]["weight"]
    assert stacked.addressable_shards[0].data.shape[-3:-1] == (experts // 4, stacked.shape[-2] // 2)


def test_a_checkpoint_and_its_drafter_load_onto_a_mesh():
    directory = GOLDEN / "mini8" / "fp8"
    whole = Settings.default(load_config(directory), page_tokens=PAGE_TOKENS)
    model = meshed(Model(whole), AXES)
    assert_slices(
        checkpoint_variables(model, directory, None), checkpoint_variables(Model(whole), directory, None), model
    )
    source = RandomSource(whole.config, 1)
    drafter = Drafter(model.settings)
    assert_slices(load_drafter(drafter, source), load_drafter(Drafter(whole), source), model)


def test_only_tables_may_be_longer_than_their_tensors(small):
    model = meshed(small, AXES)
    assert {path[0] for path in padded_leaves(model)} == {"engram_table_0"}
    leaves = flatten_tree(abstract_variables(model))
    source, config = RandomSource(small.settings.config, 3), small.settings.config
    with pytest.raises(CheckpointError, match=r"engram_table_0/weight: target \[\d+, 32\], configuration"):
        load_checkpoint(source, config, {TABLE[0]: {"weight": leaves[TABLE], "scale": leaves[TABLE[0], "scale"]}})

    def longer(path: tuple[str, ...], by: tuple[int, int]) -> dict:
        leaf = leaves[path]
        shape = tuple(a + b for a, b in zip(leaf.shape, by, strict=True))
        return unflatten_tree({path: jax.ShapeDtypeStruct(shape, leaf.dtype)})

    for path, by in ((("embed", "weight"), (8, 0)), (TABLE, (0, 8)), (TABLE, (-16, 0))):
        with pytest.raises(CheckpointError, match=f"shape: {'/'.join(path)}"):
            load_checkpoint(source, config, longer(path, by), padded=padded_leaves(model))


def test_parts_are_drawn_on_their_devices(small):
    model = meshed(small, {"expert": 2, "data": 4})
    rows = small.settings.text.engram_num_embeddings[0]
    experts = ("decoder", "groups_0", "runs_0", "ffn", "experts", "w1", "weight")
    leaves = flatten_tree(abstract_variables(model))
    names = (TABLE, experts, ("norm", "weight"))
    target = unflatten_tree({path: leaves[path] for path in names})
    drawn = flatten_tree(random_parameters(small.settings.config, target, 5, padded_leaves(model)))
    for path in names:
        assert (drawn[path].shape, drawn[path].dtype) == (leaves[path].shape, leaves[path].dtype)
        assert drawn[path].sharding.is_equivalent_to(leaves[path].sharding, leaves[path].ndim)
    table = np.asarray(drawn[TABLE]).view(np.uint8)
    assert len(table) == -(-rows // 8) * 8 > rows
    assert not table[rows:].any()
    assert len(np.unique(table[:rows], axis=0)) == rows
    # Devices that hold the same experts hold the same values; others do not.
    parts = {}
    for shard in drawn[experts].addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert len(parts) == 2
    assert all(len(values) == 1 for values in parts.values())
    assert len(set.union(*parts.values())) == 2


def test_orbax_files_go_from_mesh_to_mesh(small, weights, tmp_path):
    """4 → 2 × 2 → 1, and to 5 with other padding: equal to the bit."""
    four, two_by_two = meshed(small, {"expert": 4}), meshed(small, {"data": 2, "expert": 2})
    save_variables(tmp_path / "four", four, random_variables(four, 3, None))
    restored = restore_variables(tmp_path / "four", two_by_two)
    assert_slices(restored, weights, two_by_two)
    save_variables(tmp_path / "two", two_by_two, restored)
    single = flatten_tree(restore_variables(tmp_path / "two", small))
    for path, leaf in flatten_tree(weights).items():
        assert (single[path].shape, single[path].dtype) == (leaf.shape, leaf.dtype)
        assert single[path].sharding == leaf.sharding
        assert np.asarray(single[path]).tobytes() == np.asarray(leaf).tobytes(), path
    five = meshed(small, {"data": 5})
    assert_slices(restore_variables(tmp_path / "two", five), weights, five)


def test_orbax_files_of_another_model_are_refused(small, weights, tmp_path):
    save_variables(tmp_path / "saved", small, weights)
    model = meshed(small, AXES)
    assert_slices(restore_variables(tmp_path / "saved", model), weights, model)
    with pytest.raises(CheckpointError, match="saved: is there already"):
        save_variables(tmp_path / "saved", small, weights)
    with pytest.raises(CheckpointError, match="nothing: no variables"):
        restore_variables(tmp_path / "nothing", small)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: no variables"):
        restore_variables(tmp_path / "empty", small)
    other = Model(Settings.default(with_text(small.settings.config, vocab_size=520), page_tokens=PAGE_TOKENS))
    message = r"params/embed/weight: bfloat16 \[512, 128\], the model has bfloat16 \[520, 128\]"
    with pytest.raises(CheckpointError, match=message):
        restore_variables(tmp_path / "saved", other)
    plain = Model(dataclasses.replace(small.settings, packed_weights=False))
    with pytest.raises(CheckpointError, match=r"unexpected: .*/scale"):
        restore_variables(tmp_path / "saved", plain)
    more = with_text(small.settings.config, engram_vocab_size=220, engram_num_embeddings=(1392,))
    with pytest.raises(
        CheckpointError, match=r"engram_table_0/weight: float8_e4m3fn \[1362, 32\], the model has .*1392"
    ):
        restore_variables(tmp_path / "saved", meshed(Model(Settings.default(more, page_tokens=PAGE_TOKENS)), AXES))
    less = {**weights, "params": {k: v for k, v in weights["params"].items() if k != "embed"}}
    with pytest.raises(CheckpointError, match="missing: params/embed/weight"):
        save_variables(tmp_path / "other", small, less)
    wrong = {**weights, "constants": {"token_map": jnp.zeros(3, jnp.int32)}}
    with pytest.raises(CheckpointError, match=r"constants/token_map: int32 \[3\], the model has int32 \[512\]"):
        save_variables(tmp_path / "other", small, wrong)
    assert not (tmp_path / "other").exists()
