"""Engram's tables in every memory against a direct gather, and the mapped one at its true size."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv41.checkpoint import CheckpointError, CheckpointReader, RandomSource, copy_checkpoint
from dsv41.config import ModelConfig, load_config
from dsv41.engram.loading import TABLE_KINDS, mapped_table, open_tables, sharded_table
from dsv41.engram.tables import EngramTable, ShardedTable, pinned_memory
from pallas_kernels.formats import FP8_E8M0, Packed
from tests.conftest import GOLDEN

ROOT = pathlib.Path(__file__).parent.parent
OFFICIAL = load_config(ROOT / "configs" / "deepseek-v4.1-flash")
LAYER = 1
NAME = f"layers.{LAYER}.engram.embed"


def small_config(flavour: str) -> ModelConfig:
    return load_config(GOLDEN / "mini8" / flavour)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointReader]:
    """Random weights on disk: "fp8" with scales, "f32" (bfloat16 in the file) without."""
    readers = {}
    for flavour in ("fp8", "f32"):
        directory, config = tmp_path_factory.mktemp("tables") / flavour, small_config(flavour)
        copy_checkpoint(RandomSource(config, seed=5), config, directory)
        readers[flavour] = CheckpointReader(directory)
    return readers


def as_bytes(array) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape[:-1], -1)


def check(found: Packed, reader: CheckpointReader, ids: np.ndarray) -> None:
    """Equal to the bit to the rows of the whole tensor."""
    weight = as_bytes(reader.read(f"{NAME}.weight"))
    np.testing.assert_array_equal(as_bytes(found.payload), weight[ids])
    if f"{NAME}.scale" in reader.specs():
        np.testing.assert_array_equal(np.asarray(found.scales), reader.read(f"{NAME}.scale")[ids])
    else:
        assert found.scales is None


def some_ids(rows: int, *shape: int) -> np.ndarray:
    ids = np.random.default_rng(1).integers(0, rows, shape).astype(np.int32)
    ids.flat[:4] = (0, rows - 1, rows - 1, 0)
    return ids


@pytest.mark.parametrize("flavour", ["fp8", "f32"])
@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_every_table_equals_a_direct_gather(kind, flavour, checkpoints):
    config, reader = small_config(flavour), checkpoints[flavour]
    device = jax.local_devices()[0]
    (table,) = open_tables(kind, reader, config, device).values()
    assert table.rows == config.text.engram_num_embeddings[0]
    dtype, (_, width) = reader.specs()[f"{NAME}.weight"]
    assert table.row_bytes == (width + width // FP8_E8M0.block if dtype == "F8_E4M3" else 2 * width)
    for shape in ((7,), (2, 3, 6)):
        ids = some_ids(table.rows, *shape)
        found = table.lookup(ids)
        check(found, reader, ids)
        for leaf in jax.tree.leaves(found):
            assert leaf.devices() == {device}
            assert leaf.sharding.memory_kind == device.default_memory().kind
    values = found.payload.astype(np.float32) if found.scales is None else FP8_E8M0.decode(found)
    assert np.isfinite(values).all()
    assert np.std(values) > 0.5


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_ids_that_are_no_rows_are_refused_by_name(kind, checkpoints):
    (table,) = open_tables(kind, checkpoints["fp8"], small_config("fp8"), jax.local_devices()[0]).values()
    for bad in (-1, table.rows, 2**31 - 1, -(2**31)):
        with pytest.raises(IndexError, match=f"Engram row {bad} of a table of {table.rows} rows"):
            table.lookup(np.array([[0, 1], [bad, 2]], np.int32))


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_random_weights_can_stand_in_for_a_checkpoint(kind, checkpoints):
    config = small_config("fp8")
    (table,) = open_tables(kind, RandomSource(config, seed=5), config, jax.local_devices()[0]).values()
    ids = some_ids(table.rows, 9)
    check(table.lookup(ids), checkpoints["fp8"], ids)


def test_tables_that_do_not_fit_are_refused(checkpoints):
    reader, config, device = checkpoints["fp8"], small_config("fp8"), jax.local_devices()[0]
    with pytest.raises(ValueError, match="'disk' is none of device, pinned, mapped"):
        open_tables("disk", reader, config, device)
    with pytest.raises(CheckpointError, match=rf"{re.escape(NAME)}\.weight: only the table of a checkpoint on disk"):
        open_tables("mapped", RandomSource(config, seed=5), config, device)
    text = dataclasses.replace(config.text, engram_num_embeddings=(100,))
    with pytest.raises(CheckpointError, match=rf"{re.escape(NAME)}\.weight: F8_E4M3 .* \[100, 32\] are needed"):
        open_tables("device", reader, dataclasses.replace(config, text=text), device)

    class WithoutScales(RandomSource):
        def specs(self):
            return {name: spec for name, spec in super().specs().items() if not name.endswith(".scale")}

    with pytest.raises(CheckpointError, match=rf"{re.escape(NAME)}\.scale: None in the source"):
        open_tables("device", WithoutScales(config, seed=5), config, device)


def test_a_back_end_without_pinned_memory_is_named():
    device = SimpleNamespace(platform="abacus", addressable_memories=lambda: [SimpleNamespace(kind="beads")])
    with pytest.raises(ValueError, match=r"'abacus' has no 'pinned_host' memory, only \['beads'\]"):
        pinned_memory(device)


# Several devices


@pytest.fixture
def mesh() -> Mesh:
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "rows"))


@pytest.mark.parametrize("flavour", ["fp8", "f32"])
def test_rows_over_eight_devices(mesh, flavour, checkpoints):
    config, reader = load_config(GOLDEN / "mini8" / flavour), checkpoints[flavour]
    rows = config.text.engram_num_embeddings[0]
    assert rows % 4
    table = sharded_table(reader, config, 1, mesh, "rows")
    weight = reader.read("layers.1.engram.embed.weight")
    share = -(-rows // 4)
    ids = np.random.default_rng(0).integers(0, rows, (3, 5, 6)).astype(np.int32)
    ids.flat[:9] = [0, rows - 1, share - 1, share, 2 * share - 1, 2 * share, 3 * share - 1, 3 * share, 0]
    found = table.lookup(ids)
    assert len(found.payload.devices()) == 8
    for shard in found.payload.addressable_shards:
        assert np.asarray(shard.data).tobytes() == weight[ids].tobytes()
    if found.scales is not None:
        assert np.asarray(found.scales).tobytes() == reader.read("layers.1.engram.embed.scale")[ids].tobytes()
    with pytest.raises(IndexError, match=f"row {rows} of a table of {rows}"):
        table.lookup(np.array([rows], np.int32))  # a row of padding
    everywhere = NamedSharding(mesh, P())
    assert mapped_table(reader, config, 1, everywhere).lookup(ids).payload.sharding == everywhere


def test_every_bit_survives_the_sum_over_devices(mesh):
    """−0, and every bit of a NaN."""
    bits = np.array([[0x80000000, 0x7FC12345], [0xFFC00001, 0x00000001], [0, 0x3F800000], [1, 2]], np.uint32)
    whole = jax.device_put(bits.view(np.float32), NamedSharding(mesh, P("rows")))
    found = ShardedTable(Packed(whole, None), 4, mesh, "rows").lookup(np.arange(4, dtype=np.int32))
    assert np.asarray(found.payload).tobytes() == bits.tobytes()


# The true size


def sparse_checkpoint(directory: pathlib.Path, layer: int, rows: int, width: int) -> tuple[pathlib.Path, int, int]:
    """A file with a table of zeros that takes no disk; its path, and where weight and scale begin."""
    scales = FP8_E8M0.scale_width(width)
    header = {
        f"layers.{layer}.engram.embed.weight": {
            "dtype": "F8_E4M3",
            "shape": [rows, width],
            "data_offsets": [0, rows * width],
        },
        f"layers.{layer}.engram.embed.scale": {
            "dtype": "F8_E8M0",
            "shape": [rows, scales],
            "data_offsets": [rows * width, rows * (width + scales)],
        },
    }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    file, begin = directory / "model.safetensors", 8 + len(text)
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    try:
        os.truncate(file, begin + rows * (width + scales))
    except OSError as error:
        pytest.skip(f"the file system has no files of {rows * (width + scales)} bytes: {error}")
    if file.stat().st_blocks * 512 > 2**24:
        pytest.skip("the file system has no sparse files")
    return file, begin, begin + rows * width


def test_the_official_table_in_a_sparse_file(tmp_path):
    """384,016,682 rows × 264 bytes: rows on both sides of every place where 32-bit bytes, signed or not, run over."""
    text = OFFICIAL.text
    layer, rows, width = text.engram_layer_ids[-1], text.engram_num_embeddings[-1], text.engram_head_dim
    scales = FP8_E8M0.scale_width(width)
    file, weight_begin, scale_begin = sparse_checkpoint(tmp_path, layer, rows, width)
    edges = [0, 2**31 // width, 2**32 // width, 2**31 // scales, 2**33 // width, rows // 2, rows - 1]
    ids = np.array(sorted({i + d for i in edges for d in (-1, 0, 1) if 0 <= i + d < rows}), np.int32)
    rng = np.random.default_rng(3)
    payload = rng.integers(1, 256, (len(ids), width)).astype(np.uint8)
    steps = rng.integers(1, 255, (len(ids), scales)).astype(np.uint8)
    with file.open("r+b") as stream:
        for row, values, step in zip(ids.tolist(), payload, steps, strict=True):
            stream.seek(weight_begin + row * width)
            stream.write(values.tobytes())
            stream.seek(scale_begin + row * scales)
            stream.write(step.tobytes())

    table: EngramTable = mapped_table(CheckpointReader(tmp_path), OFFICIAL, layer, jax.local_devices()[0])
    assert (table.rows, table.row_bytes) == (384_016_682, 264)
    order = rng.permutation(len(ids))
    found = table.lookup(ids[order])
    np.testing.assert_array_equal(found.payload, payload[order])
    np.testing.assert_array_equal(found.scales, steps[order])
    between = table.lookup(np.array([[5, rows // 3], [rows - 5, 2**31 // width + 2]], np.int32))
    assert not between.payload.any()
    assert not between.scales.any()
    with pytest.raises(IndexError, match=f"row {rows} of a table of {rows} rows"):
        table.lookup(np.array([rows], np.int32))
    assert file.stat().st_size > 100 * 10**9
    assert file.stat().st_blocks * 512 < 2**24
    rows_on_device(file, weight_begin, (rows, width), ids, payload)


_ON_DEVICE = """
import mmap, resource, sys
import jax, numpy as np
from dsv41.engram.tables import DeviceTable
from pallas_kernels.formats import Packed

# Without the file's own memory the table would have to be copied: then this fails, and fills no memory.
resource.setrlimit(resource.RLIMIT_DATA, (2**33, 2**33))
path, begin, rows, width = sys.argv[1], *map(int, sys.argv[2:5])
with open(path, "rb") as file:
    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
table = np.frombuffer(whole, np.uint8, rows * width, begin).reshape(rows, width)
on_device = jax.device_put(table, jax.local_devices()[0], may_alias=True)
assert on_device.unsafe_buffer_pointer() == table.ctypes.data
ids = np.array(sys.argv[5:], np.int32)
sys.stdout.buffer.write(np.asarray(DeviceTable(Packed(on_device, None)).lookup(ids).payload).tobytes())
"""


def rows_on_device(file: pathlib.Path, begin: int, shape: tuple[int, int], ids: np.ndarray, wanted: np.ndarray) -> None:
    """The same file as the memory of a CPU device: the compiled gather, too, addresses beyond 32 bits."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _ON_DEVICE, str(file), *map(str, (begin, *shape)), *map(str, ids.tolist())]
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert result.stdout == wanted.tobytes(), result.stderr.decode()
