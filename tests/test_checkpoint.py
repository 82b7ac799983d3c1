"""Checkpoints: layout, places in the tree, reading and writing by slices, random weights."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import re
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv41.checkpoint import (
    CheckpointError,
    CheckpointReader,
    LoadProgress,
    RandomSource,
    TensorSpec,
    abstract_parameters,
    checkpoint_layout,
    config_json,
    copy_checkpoint,
    load_checkpoint,
    parameter_path,
    save_checkpoint,
)
from dsv41.checkpoint.decode import decode_rows
from dsv41.checkpoint.placement import flatten_tree, parameter_place, unflatten_tree
from dsv41.checkpoint.safetensors_io import INDEX_FILE, TensorToWrite, write_checkpoint
from dsv41.checkpoint.save import cut
from dsv41.config import ModelConfig, load_config, parse_config

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden"
OFFICIAL = ROOT / "configs" / "deepseek-v4.1-flash"
MODELS = ("mini8", "tiny40")


def quantized_config(model: str) -> ModelConfig:
    return load_config(GOLDEN / model / "fp8")


def float_config(model: str) -> ModelConfig:
    return load_config(GOLDEN / model / "f32")


def golden_reader(model: str) -> CheckpointReader:
    return CheckpointReader(GOLDEN / model / "fp8")


def bits(array) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def assert_same_tree(a, b) -> None:
    a, b = flatten_tree(a), flatten_tree(b)
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        assert leaf.dtype == b[path].dtype, path
        assert leaf.shape == b[path].shape, path
        assert bits(leaf) == bits(b[path]), path


class Edited:
    """A source with some headers changed, removed or added; counts the reads."""

    def __init__(self, source, **changes) -> None:
        self.source, self.changes, self.reads = source, changes, 0

    def specs(self):
        specs = self.source.specs() | self.changes.get("put", {})
        return {name: spec for name, spec in specs.items() if name not in self.changes.get("drop", ())}

    def read(self, name, rows=None):
        self.reads += 1
        return self.source.read(name, rows)


# Layout


def test_layout_has_the_official_totals():
    layout = checkpoint_layout(load_config(OFFICIAL))
    assert len(layout) == 96_085
    assert sum(spec.nbytes for spec in layout.values()) == 510_286_023_000
    elements = collections.Counter()
    for spec in layout.values():
        elements[spec.dtype] += math.prod(spec.shape)
    assert elements == {
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
        "F8_E4M3": 204_015_223_296,
        "I8": 278_585_671_680,
        "F8_E8M0": 23_563_015_184,
    }


@pytest.mark.parametrize("model", MODELS)
def test_layout_is_that_of_the_golden(model):
    layout = checkpoint_layout(quantized_config(model))
    assert golden_reader(model).specs() == {name: (spec.dtype, spec.shape) for name, spec in layout.items()}
    plain = checkpoint_layout(float_config(model))
    assert {name: spec.shape for name, spec in plain.items()} == {
        name: spec.value_shape for name, spec in layout.items() if not name.endswith(".scale")
    }
    assert {spec.dtype for spec in plain.values()} == {"F32", "BF16"}


# Places


@pytest.mark.parametrize("config", [quantized_config("mini8"), quantized_config("tiny40"), load_config(OFFICIAL)])
def test_every_place_of_the_tree_is_filled_exactly_once(config):
    filled = collections.defaultdict(list)
    stacks = {}
    for name in checkpoint_layout(config):
        place = parameter_place(config, name)
        filled[place.path].append(place.index)
        assert stacks.setdefault(place.path, place.stack) == place.stack
    for path, indices in filled.items():
        assert sorted(indices) == sorted(np.ndindex(stacks[path])), path
    assert filled.keys() == flatten_tree(abstract_parameters(config)).keys()


def test_places_of_the_official_model():
    config = load_config(OFFICIAL)
    for name, path, index in [
        ("embed.weight", "embed/weight", ()),
        ("layers.1.attn.wq_a.scale", "encoder/groups_1/runs_0/attn/wq_a/scale", ()),
        ("layers.8.attn.compressor.wgate.weight", "encoder/groups_2/runs_0/attn/compressor/wgate/weight", (1,)),
        ("layers.19.ffn.experts.7.w2.weight", "encoder/groups_2/runs_1/ffn/experts/w2/weight", (2, 4, 7)),
        ("layers.20.ffn.experts.7.w2.weight", "decoder/groups_0/runs_0/ffn/experts/w2/weight", (7,)),
        ("layers.36.attn.indexer.wq_b.weight", "decoder/groups_1/runs_0/attn/indexer/wq_b/weight", (3,)),
        ("layers.14.engram.wkv.scale", "engram_14/wkv/scale", ()),
        ("layers.14.engram.embed.scale", "engram_table_14/scale", ()),
        ("mtp.2.markov_head.embed.weight", "dspark/stages_2/markov_head/embed/weight", ()),
        ("mtp.1.ffn.experts.127.w1.scale", "dspark/stages_1/ffn/experts/w1/scale", (127,)),
        ("vision.blocks.31.attn.wqkv.bias", "vision/blocks/attn/wqkv/bias", (31,)),
        ("vision.patch_embed.proj.weight", "vision/patch_embed/proj/weight", ()),
        ("aligner.w2.bias", "aligner/w2/bias", ()),
        ("image_newline", "image_newline", ()),
    ]:
        assert parameter_path(config, name) == (tuple(path.split("/")), index), name


# Values


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


# Round trips


@pytest.mark.parametrize("model", MODELS)
def test_packed_round_trip_keeps_every_byte(model, tmp_path):
    config, reader = quantized_config(model), golden_reader(model)
    params = load_checkpoint(reader, config, abstract_parameters(config))
    save_checkpoint(params, config, tmp_path / "saved", shard_bytes=1_000_000, slice_bytes=5_000)
    saved = CheckpointReader(tmp_path / "saved")
    assert saved.specs() == reader.specs()
    for name in reader.specs():
        assert bits(saved.read(name)) == bits(reader.read(name)), name
    assert load_config(tmp_path / "saved") == config
    files = sorted(p.name for p in (tmp_path / "saved").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    index = json.loads((tmp_path / "saved" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(s.nbytes for s in checkpoint_layout(config).values())


@pytest.mark.parametrize("model", MODELS)
def test_float_round_trip_keeps_every_value(model, tmp_path):
    config, reader = float_config(model), golden_reader(model)
    target = abstract_parameters(config, storage="float32")
    params = load_checkpoint(reader, config, target)
    save_checkpoint(params, config, tmp_path / "saved")
    saved = CheckpointReader(tmp_path / "saved")
    assert {dtype for dtype, _ in saved.specs().values()} == {"F32"}
    assert_same_tree(load_checkpoint(saved, config, target), params)
    assert load_config(tmp_path / "saved") == config


def test_cut_is_a_slice():
    array = np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6)
    box = cut(jnp.asarray(array), (np.int32(1), np.int32(2), np.int32(0)), (2, 3, 6))
    np.testing.assert_array_equal(box, array[1:3, 2:5])


def test_public_reader_understands_the_files(tmp_path):
    config, reader = quantized_config("mini8"), golden_reader("mini8")
    copy_checkpoint(reader, config, tmp_path / "copy", shard_bytes=1_500_000)
    names = set()
    for file in (tmp_path / "copy").glob("*.safetensors"):
        with safetensors.safe_open(file, framework="np") as public:
            for name in public.keys():  # noqa: SIM118 (not a dict)
                view = public.get_slice(name)
                assert (view.get_dtype(), tuple(view.get_shape())) == reader.specs()[name]
                names.add(name)
                if reader.specs()[name][0] == "F32":
                    assert bits(public.get_tensor(name)) == bits(reader.read(name))
    assert names == reader.specs().keys()


@pytest.mark.parametrize("config", [quantized_config("mini8"), float_config("tiny40"), load_config(OFFICIAL)])
def test_config_json_reads_back(config):
    assert parse_config(json.loads(json.dumps(config_json(config)))) == config


def test_parts_can_be_absent(tmp_path):
    config, reader = quantized_config("mini8"), golden_reader("mini8")
    layout = checkpoint_layout(config)
    text_only = Edited(reader, drop=[n for n, s in layout.items() if s.part != "text"])
    params = load_checkpoint(text_only, config, abstract_parameters(config, parts=["text"]))
    save_checkpoint(params, config, tmp_path / "text")
    assert CheckpointReader(tmp_path / "text").specs() == text_only.specs()

    vision = load_checkpoint(reader, config, abstract_parameters(config, parts=["vision"]))
    assert set(vision) == {"vision", "aligner", "image_start", "image_end", "image_newline"}
    with pytest.raises(CheckpointError, match=r"missing: embed/weight of embed\.weight"):
        save_checkpoint(vision, config, tmp_path / "vision")
    assert not (tmp_path / "vision").exists()


# Refusals


def test_all_problems_are_reported_before_any_read():
    config, reader = quantized_config("mini8"), golden_reader("mini8")
    source = Edited(
        reader,
        drop=["norm.weight", "layers.3.ffn.experts.5.w1.weight"],
        put={
            "head.weight": ("BF16", (512, 127)),
            "layers.0.attn.attn_sink": ("I8", (4,)),
            "layers.9.attn.attn_sink": ("F32", (4,)),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(source, config, abstract_parameters(config))
    assert source.reads == 0
    message = str(caught.value)
    assert message.startswith("5 problem(s)")
    for line in (
        "missing: norm.weight: BF16 [128]",
        "missing: layers.3.ffn.experts.5.w1.weight: I8 [64, 64]",
        "shape: head.weight: [512, 127] in the source, [512, 128] in the layout",
        "dtype: layers.0.attn.attn_sink: I8 in the source, F32 in the layout",
        "unexpected: layers.9.attn.attn_sink",
    ):
        assert line in message


def test_floats_do_not_fill_a_packed_target(tmp_path):
    config = quantized_config("mini8")
    source = RandomSource(float_config("mini8"), seed=0)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(source, config, abstract_parameters(config))
    scales = sum(name.endswith(".scale") for name in checkpoint_layout(config))
    assert str(caught.value).startswith(f"{scales} problem(s)")
    assert "unscaled: layers.0.attn.wq_a.weight: BF16 without layers.0.attn.wq_a.scale" in str(caught.value)
    assert f"and {scales - 20} more" in str(caught.value)


def test_scales_must_belong_to_codes():
    config, reader = float_config("mini8"), golden_reader("mini8")
    target = abstract_parameters(config, storage="float32")
    name = "layers.0.attn.wkv"
    with pytest.raises(CheckpointError, match=rf"missing: {name}\.scale: the scales of F8_E4M3"):
        load_checkpoint(Edited(reader, drop=[f"{name}.scale"]), config, target)
    with pytest.raises(CheckpointError, match=rf"unexpected: {name}\.scale: scales beside a weight stored as BF16"):
        load_checkpoint(Edited(reader, put={f"{name}.weight": ("BF16", (64, 128))}), config, target)
    with pytest.raises(CheckpointError, match=rf"{name}\.scale: F8_E8M0 \[4, 4\] in the source, F8_E8M0 \[2, 4\]"):
        load_checkpoint(Edited(reader, put={f"{name}.scale": ("F8_E8M0", (4, 4))}), config, target)


def test_target_must_fit_the_configuration():
    config, reader = quantized_config("mini8"), golden_reader("mini8")

    def load_with(path: str, leaf) -> None:
        target = abstract_parameters(config)
        *parents, last = path.split("/")
        node = target
        for key in parents:
            node = node[key]
        if leaf is None:
            del node[last]
        else:
            node[last] = leaf
        load_checkpoint(reader, config, target)

    weight = "encoder/groups_0/runs_0/attn/wq_a/weight"
    with pytest.raises(CheckpointError, match=r"shape: embed/weight: target \[512, 64\], configuration \[512, 128\]"):
        load_with("embed/weight", jax.ShapeDtypeStruct((512, 64), jnp.bfloat16))
    with pytest.raises(CheckpointError, match="held as float8_e4m3fn, target bfloat16"):
        load_with(weight, jax.ShapeDtypeStruct((64, 128), jnp.bfloat16))
    with pytest.raises(CheckpointError, match=r"target uint8 without a scale"):
        load_with("head/weight", jax.ShapeDtypeStruct((512, 128), jnp.uint8))
    with pytest.raises(CheckpointError, match=r"unexpected: layers\.0\.attn\.attn_sink: the target has no"):
        load_with("encoder/groups_0/runs_0/attn/attn_sink", None)
    with pytest.raises(CheckpointError, match="unexpected: embed/bias: no tensor of this configuration"):
        load_with("embed/bias", jax.ShapeDtypeStruct((128,), jnp.bfloat16))


def test_saving_refuses_what_does_not_fit(tmp_path):
    config, reader = quantized_config("mini8"), golden_reader("mini8")
    params = load_checkpoint(reader, config, abstract_parameters(config))
    with pytest.raises(CheckpointError, match=r"dtype: encoder/groups_0/runs_0/attn/wq_a/weight: float8_e4m3fn"):
        save_checkpoint(params, float_config("mini8"), tmp_path / "x")
    floats = load_checkpoint(reader, config, abstract_parameters(config, storage="float32"))
    with pytest.raises(CheckpointError, match="missing: encoder/groups_0/runs_0/attn/wq_a/scale"):
        save_checkpoint(floats, config, tmp_path / "x")
    with pytest.raises(CheckpointError, match="unexpected: extra: float32"):
        save_checkpoint(params | {"extra": jnp.zeros(3)}, config, tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        save_checkpoint(params, config, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "note"]


def test_a_failing_write_leaves_nothing(tmp_path):
    def short():
        yield np.zeros((1, 4), np.float32)
        raise OSError("no more")

    good = TensorToWrite("a", "F32", (2, 4), lambda: [np.ones((2, 4), np.float32)])
    for bad, error in (
        (TensorToWrite("b", "F32", (2, 4), short), OSError),
        (TensorToWrite("b", "F32", (2, 4), lambda: [np.zeros((1, 4), np.float32)]), CheckpointError),
        (TensorToWrite("b", "F32", (2, 4), lambda: [np.zeros((2, 4), np.int32)]), CheckpointError),
        (good, CheckpointError),
    ):
        with pytest.raises(error):
            write_checkpoint(tmp_path / "x", [good, bad], {}, shard_bytes=32)
        assert list(tmp_path.iterdir()) == []


def write_file(file: pathlib.Path, header, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "header is not JSON"),
        (b'{"a":{},"a":{}}', b"", "'a' occurs twice"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "a: header entry"),
        ({"a": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 8]}}, b"", "a: dtype 'Q7'"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"", r"a: shape \[-2\]"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "a: byte range .* for 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234", "a: ends at byte .* truncated"),
    ],
)
def test_malformed_files_are_named(tmp_path, header, data, message):
    file = tmp_path / "model.safetensors"
    write_file(file, header, data)
    with pytest.raises(CheckpointError, match=re.escape(str(file)) + ": .*" + message):
        CheckpointReader(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    def shard(file: str, *names: str) -> None:
        header = {n: {"dtype": "I8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
        write_file(tmp_path / file, header, bytes(len(names)))

    def refuse(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            CheckpointReader(tmp_path)

    refuse("neither model.safetensors.index.json nor model.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one", "b": "two"}}))
    refuse("shard one is not there")
    shard("one", "a")
    shard("two")
    refuse("two: b: listed in the index but absent")
    shard("two", "a", "b")
    refuse("two: a: also in one")
    shard("two", "b", "c")
    refuse("two: c: the index puts it in None")
    shard("two", "b")
    assert set(CheckpointReader(tmp_path).specs()) == {"a", "b"}
    (tmp_path / "one").write_bytes(b"1234")
    refuse("one: 4 bytes are no safetensors file")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../one"}}))
    refuse("'../one' is not a plain file name")


def test_reads_of_rows():
    reader = golden_reader("mini8")
    whole = reader.read("embed.weight")
    assert bits(reader.read("embed.weight", slice(37, 41))) == bits(whole[37:41])
    assert bits(reader.read("embed.weight", slice(500, None))) == bits(whole[500:])
    for rows in (slice(500, 513), slice(-1, 5), slice(0, 8, 2), slice(5, 3)):
        with pytest.raises(CheckpointError, match=r"embed\.weight: rows slice.*\[512, 128\]"):
            reader.read("embed.weight", rows)
    with pytest.raises(CheckpointError, match=r"nothing\.weight: no such tensor"):
        reader.read("nothing.weight")


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


# Random weights


def test_random_values_do_not_depend_on_the_slicing():
    source = RandomSource(quantized_config("mini8"), seed=3)
    for name in ("embed.weight", "layers.1.engram.embed.weight", "layers.2.ffn.experts.1.w1.weight", "norm.weight"):
        whole = source.read(name)
        pieces = [source.read(name, slice(i, min(i + 7, len(whole)))) for i in range(0, len(whole), 7)]
        assert bits(np.concatenate(pieces)) == bits(whole)
    text = dataclasses.replace(quantized_config("mini8").text, vocab_size=10_007)
    large = RandomSource(dataclasses.replace(quantized_config("mini8"), text=text), seed=3)
    whole = large.read("embed.weight")
    assert bits(large.read("embed.weight", slice(2040, 4100))) == bits(whole[2040:4100])
    assert bits(large.read("embed.weight", slice(9_000, 10_007))) == bits(whole[9_000:])


def test_random_values_depend_on_seed_and_name():
    config = quantized_config("mini8")
    a, b = RandomSource(config, seed=3), RandomSource(config, seed=4)
    for name in a.specs():
        if math.prod(a.specs()[name][1]) > 64:
            assert bits(a.read(name)) == bits(RandomSource(config, seed=3).read(name)), name
            assert bits(a.read(name)) != bits(b.read(name)), name
    assert bits(a.read("layers.0.hc_attn_fn")) != bits(a.read("layers.1.hc_attn_fn"))


def test_random_values_are_pinned():
    """The same seed must give the same model in every version of the libraries."""
    source = RandomSource(quantized_config("mini8"), seed=0)
    assert source.read("norm.weight", slice(0, 4)).astype(np.float32).tolist() == [1.078125, 0.8125, 1.140625, 1.21875]
    assert source.read("layers.0.attn.wq_a.weight")[0, :4].astype(np.float32).tolist() == [-16.0, -22.0, 64.0, 16.0]
    assert source.read("layers.0.ffn.experts.0.w1.weight")[0, :4].tolist() == [17, 62, 49, 74]


def test_random_weights_have_the_golden_spread():
    """Of each kind of tensor, over all layers: mean and deviation near those of a model that is known to be lively."""
    config = float_config("tiny40")
    target = abstract_parameters(config, storage="float32")
    kinds: dict[str, list[list[np.ndarray]]] = {}
    for i, source in enumerate((golden_reader("tiny40"), RandomSource(quantized_config("tiny40"), seed=0))):
        for path, leaf in flatten_tree(load_checkpoint(source, config, target)).items():
            kind = "/".join(p for p in path if not re.match(r"(encoder|decoder|groups|runs|engram|stages|blocks)", p))
            kinds.setdefault(kind, [[], []])[i].append(np.asarray(leaf, np.float64).ravel())
    compared = 0
    for kind, pair in kinds.items():
        golden, ours = map(np.concatenate, pair)
        if golden.size < 100:  # too few to estimate a deviation from
            continue
        assert ours.std() == pytest.approx(golden.std(), rel=0.35), kind
        assert ours.mean() == pytest.approx(golden.mean(), abs=0.3 * float(golden.std()) + 0.05), kind
        compared += 1
    assert compared > 60


def test_random_scales_keep_the_intended_deviation():
    config = quantized_config("mini8")
    text = dataclasses.replace(config.text, hidden_size=1024, moe_intermediate_size=1024)
    config = dataclasses.replace(config, text=text)
    source = RandomSource(config, seed=0)
    for name in (
        "layers.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.shared_experts.w1.weight",
        "layers.1.engram.wkv.weight",
    ):
        spec = checkpoint_layout(config)[name]
        scales = source.read(spec.scale_name)
        assert len(np.unique(scales)) == 3
        quantised = decode_rows(spec, source.read(name), scales, 0)
        plain = RandomSource(dataclasses.replace(config, quantization=None), seed=0).read(name).astype(np.float32)
        assert quantised.std() == pytest.approx(plain.std(), rel=0.05), name
        assert abs(quantised.mean()) < 0.02 * quantised.std()


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
