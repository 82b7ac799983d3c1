"""Loading checkpoints: exact values, by slices, within bounds of memory, on several devices."""

from __future__ import annotations

import collections
import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv41.checkpoint import (
    CheckpointReader,
    LoadProgress,
    RandomSource,
    TensorSpec,
    abstract_parameters,
    checkpoint_layout,
    copy_checkpoint,
    load_checkpoint,
    parameter_path,
    save_checkpoint,
)
from dsv41.checkpoint.decode import decode_rows
from dsv41.checkpoint.placement import flatten_tree, unflatten_tree
from dsv41.config import load_config
from tests.checkpoints import GOLDEN, MODELS, assert_same_tree, bits, float_config, golden_reader, quantized_config


def test_decoding_of_single_codes():
    spec = TensorSpec("x.weight", "I8", (2, 16), "text", (1, 32))
    codes = np.arange(32, dtype=np.uint8).reshape(2, 16) * 8 + 1
    values = decode_rows(spec, codes, np.array([[127], [0]], np.uint8), 0)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(2):
        for column in range(32):
            code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
            wanted = magnitudes[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (0 if row == 0 else -127)
            assert values[row, column] == wanted
            assert np.signbit(values[row, column]) == bool(code & 8)

    spec = TensorSpec("x.weight", "F8_E4M3", (64, 64), "text", (32, 32))
    codes = np.full((64, 64), 1.25, ml_dtypes.float8_e4m3fn)
    scales = np.array([[127, 128], [0, 254]], np.uint8)
    values = decode_rows(spec, codes[20:40], scales, 20)
    assert np.unique(values[:12, :32]) == [1.25]
    assert np.unique(values[:12, 32:]) == [2.5]
    assert np.unique(values[12:, :32]) == [np.ldexp(1.25, -127)]
    assert np.unique(values[12:, 32:]) == [np.float32(np.ldexp(1.25, 127))]
    assert np.isnan(decode_rows(spec, codes[:1], np.full((1, 2), 255, np.uint8), 0)).all()


def reference_values(reader: CheckpointReader, name: str) -> np.ndarray:
    """A dequantised tensor the plain way: one float64 product an element."""
    codes = reader.read(name)
    dtype, _ = reader.specs()[name]
    if dtype == "I8":
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        values = table[np.stack([codes % 16, codes // 16], axis=-1).reshape(len(codes), -1)]
    else:
        values = codes.astype(np.float64)
    scales = reader.read(name.removesuffix("weight") + "scale")
    tall = values.shape[0] // scales.shape[0]
    rows, columns = np.indices(values.shape)
    return (values * 2.0 ** (scales[rows // tall, columns // 32].astype(np.float64) - 127)).astype(np.float32)


@pytest.mark.parametrize("model", MODELS)
def test_quantised_tensors_load_as_their_exact_values(model):
    config, reader = float_config(model), golden_reader(model)
    target = abstract_parameters(config, storage="float32")
    params = flatten_tree(load_checkpoint(reader, config, target))
    for name, spec in checkpoint_layout(quantized_config(model)).items():
        if name.endswith(".scale"):
            continue
        path, index = parameter_path(config, name)
        wanted = reader.read(name).astype(np.float32) if spec.block is None else reference_values(reader, name)
        assert bits(np.asarray(params[path])[index]) == bits(wanted), name


def test_slicing_changes_nothing():
    config, reader = quantized_config("mini8"), golden_reader("mini8")
    # Not the whole tree, to compile little; dense, table, plain and stacked expert leaves are in these parts.
    for storage in ("packed", "float32", "bfloat16"):
        whole = abstract_parameters(config, storage=storage)
        target = {key: whole[key] for key in ("embed", "engram_table_1", "decoder")}
        seen: list[LoadProgress] = []
        sliced = load_checkpoint(reader, config, target, seen.append, slice_bytes=50_000)
        assert_same_tree(sliced, load_checkpoint(reader, config, target))
        assert seen[-1].tensors == seen[-1].total_tensors > 0
        assert max(p.peak_host_bytes for p in seen) <= 50_000


def test_a_table_can_go_to_pinned_host_memory():
    config, reader = quantized_config("mini8"), golden_reader("mini8")
    memory = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=memory),
        {"engram_table_1": abstract_parameters(config)["engram_table_1"]},
    )
    for slice_bytes in (20_000, 10_000_000):
        table = load_checkpoint(reader, config, target, slice_bytes=slice_bytes)["engram_table_1"]["weight"]
        assert table.sharding.memory_kind == "pinned_host"
        assert bits(table) == bits(reader.read("layers.1.engram.embed.weight"))


def test_bfloat16_target_rounds_matrices_and_keeps_float32_tensors():
    config, reader = quantized_config("mini8"), golden_reader("mini8")
    wide = flatten_tree(load_checkpoint(reader, config, abstract_parameters(config, storage="float32")))
    params = flatten_tree(load_checkpoint(reader, config, abstract_parameters(config, storage="bfloat16")))
    kinds = collections.Counter(leaf.dtype.name for leaf in params.values())
    assert set(kinds) == {"bfloat16", "float32"}
    for path, leaf in params.items():
        assert bits(leaf) == bits(np.asarray(wide[path]).astype(leaf.dtype)), path
    assert params["encoder", "groups_0", "runs_0", "hc_attn_fn"].dtype == jnp.float32


# Memory


@pytest.mark.parametrize("storage", ["packed", "float32", "bfloat16"])
def test_host_memory_is_one_slice(storage, tmp_path):
    config = quantized_config("mini8")
    rows = 2**17
    text = dataclasses.replace(config.text, engram_num_embeddings=(rows,))
    config = dataclasses.replace(config, text=text)
    source = RandomSource(config, seed=1)
    target = {"engram_table_1": abstract_parameters(config, storage=storage)["engram_table_1"]}
    table = rows * text.engram_head_dim
    limit = table // 8
    copy_checkpoint(source, config, tmp_path / "file", slice_bytes=limit)
    reader = CheckpointReader(tmp_path / "file")
    load_checkpoint(reader, config, target, slice_bytes=limit)  # compiled, so that only data is measured below
    seen: list[LoadProgress] = []
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        params = load_checkpoint(reader, config, target, seen.append, slice_bytes=limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen[-1].bytes_read >= table
    assert limit // 8 < seen[-1].peak_host_bytes <= limit
    assert peak - before < limit + 600_000  # the layout and the headers take the rest
    if storage == "packed":
        assert bits(params["engram_table_1"]["weight"]) == bits(source.read("layers.1.engram.embed.weight"))


# Several devices


def four_devices() -> Mesh:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def test_sharded_loading_and_saving(tmp_path):
    config, reader = load_config(GOLDEN / "mini8" / "fp8"), golden_reader("mini8")
    mesh = four_devices()

    def spec(path: tuple[str, ...], shape: tuple[int, ...]) -> P:
        if path[-3:-2] == ("experts",):
            return P(*[None] * (len(shape) - 3), "y", None, "x")
        if len(shape) > 1 and shape[-2] % 4 == 0 and "vision" not in path:
            return P(*[None] * (len(shape) - 2), ("x", "y"))
        if len(shape) > 1 and shape[-1] % 2 == 0:
            return P(*[None] * (len(shape) - 1), "x")
        return P()

    def shard(tree: dict) -> dict:
        return unflatten_tree(
            {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec(path, leaf.shape)))
                for path, leaf in flatten_tree(tree).items()
            }
        )

    for storage in ("packed", "float32"):
        whole = abstract_parameters(config, storage=storage)
        plain = flatten_tree(load_checkpoint(reader, config, whole))
        target = shard(whole)
        params = load_checkpoint(reader, config, target)
        for path, leaf in flatten_tree(params).items():
            assert leaf.sharding == flatten_tree(target)[path].sharding, path
            assert np.asarray(leaf).tobytes() == np.asarray(plain[path]).tobytes(), path
        some = {name: target[name] for name in ("embed", "engram_1", "engram_table_1")}
        for path, leaf in flatten_tree(load_checkpoint(reader, config, some, slice_bytes=30_000)).items():
            assert len({part.device for part in leaf.addressable_shards}) == 4
            assert np.asarray(leaf).tobytes() == np.asarray(plain[path]).tobytes(), path
        if storage == "packed":
            save_checkpoint(params, config, tmp_path / "saved")
    saved = CheckpointReader(tmp_path / "saved")
    for name in reader.specs():
        assert bits(saved.read(name)) == bits(reader.read(name)), name
