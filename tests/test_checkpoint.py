"""Checkpoints: their layout, places in the tree, and back to the same bytes."""

from __future__ import annotations

import collections
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from dsv41.checkpoint import (
    CheckpointError,
    CheckpointReader,
    abstract_parameters,
    checkpoint_layout,
    config_json,
    copy_checkpoint,
    load_checkpoint,
    parameter_path,
    save_checkpoint,
)
from dsv41.checkpoint.placement import flatten_tree, parameter_place
from dsv41.checkpoint.safetensors_io import INDEX_FILE
from dsv41.checkpoint.save import cut
from dsv41.config import load_config, parse_config
from tests.checkpoints import (
    MODELS,
    OFFICIAL,
    Edited,
    assert_same_tree,
    bits,
    float_config,
    golden_reader,
    quantized_config,
)


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
