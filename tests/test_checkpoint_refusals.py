"""Checkpoints and targets that do not fit are refused by name, before anything is read or written."""

from __future__ import annotations

import json
import pathlib
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.checkpoint import (
    CheckpointError,
    CheckpointReader,
    RandomSource,
    abstract_parameters,
    checkpoint_layout,
    load_checkpoint,
    save_checkpoint,
)
from dsv41.checkpoint.safetensors_io import INDEX_FILE, TensorToWrite, write_checkpoint
from tests.checkpoints import Edited, bits, float_config, golden_reader, quantized_config


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
