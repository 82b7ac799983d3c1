"""Meshes: presets, the rule table, and what does not fit."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest
from jax.sharding import PartitionSpec

from dsv41.config import load_config
from dsv41.declared import parameter_partitions
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.sharding.mesh import PRESETS, load_preset, parse_preset
from dsv41.sharding.parameters import device_bytes
from dsv41.sharding.rules import AXES, DEFAULT_RULES, MeshError, part_shape, partition

OFFICIAL = pathlib.Path(__file__).parents[1] / "configs" / "deepseek-v4.1-flash"
NAMES = sorted(path.stem for path in PRESETS.glob("*.json"))


@pytest.fixture(scope="module")
def official() -> Model:
    return Model(Settings.default(load_config(OFFICIAL)))


def test_presets_are_the_chips_they_are_for():
    assert {"gpu-1", "gpu-2", "gpu-4", "gpu-8", "v6e-16x16", "v5p-4x4x8", "tpu7x-4x4x4"} <= set(NAMES)
    devices = {name: load_preset(name).devices for name in NAMES}
    assert (devices["gpu-8"], devices["v6e-16x16"], devices["v5p-4x4x8"]) == (8, 256, 128)
    # Two devices a chip.
    assert devices["tpu7x-4x4x4"] == 128
    assert (pathlib.Path(__file__).parents[1] / "configs" / "meshes").resolve() == PRESETS.resolve()


def test_every_parameter_of_the_official_model_fits_every_preset(official):
    whole = sum(device_bytes(official, load_preset("gpu-1").sizes).values())
    for name in NAMES:
        preset = load_preset(name)
        sizes = device_bytes(official, preset.sizes)
        # What is replicated makes the parts larger than a fair share, but never smaller.
        assert whole / preset.devices <= sum(sizes.values()) <= whole
        experts = device_bytes(official, load_preset("gpu-1").sizes)["experts"]
        assert sizes["experts"] * preset.axes["expert"] * preset.axes["tensor"] == experts


def test_parameters_lie_where_the_rules_say(official):
    specs = parameter_partitions(official, load_preset("v6e-16x16").sizes)
    assert specs["head"]["weight"] == PartitionSpec("tensor", None)
    assert specs["engram_table_1"]["weight"] == PartitionSpec(("expert", "tensor"), None)
    block = specs["encoder"]["groups_0"]["runs_0"]
    assert block["ffn"]["experts"]["w1"]["weight"] == PartitionSpec("expert", "tensor", None)
    assert block["ffn"]["experts"]["w2"]["scale"] == PartitionSpec("expert", None, "tensor")
    assert block["attn"]["wq_b"]["weight"] == PartitionSpec("tensor", None)
    # The loops' own axes are nobody's.
    looped = specs["encoder"]["groups_2"]["runs_1"]["ffn"]["experts"]["w1"]["weight"]
    assert looped == PartitionSpec(None, None, "expert", "tensor", None)


def test_what_does_not_fit_is_refused_with_both_names(official):
    with pytest.raises(MeshError, match=r"experts of 384 is not divisible by mesh axes expert 5"):
        parameter_partitions(official, parse_preset("five", {"axes": {"expert": 5}}).sizes)
    both = {"axes": {"tensor": 2}, "rules": {"experts": ["tensor"]}}
    with pytest.raises(MeshError, match="'experts' and 'expert_mlp' both lie on mesh axis 'tensor'"):
        parameter_partitions(official, parse_preset("both", both).sizes)
    with pytest.raises(MeshError, match=r"o_groups of 8 .* tensor 16"):
        partition("wo", ["o_groups"], [8], {"tensor": 16}, DEFAULT_RULES)
    with pytest.raises(MeshError, match="logical axis 'nobody' has no rule"):
        partition("w", ["nobody"], [8], {"tensor": 2}, DEFAULT_RULES)


def test_axes_of_size_one_are_absent():
    assert partition("w", ["experts", "embed"], [7, 5], dict.fromkeys(AXES, 1), DEFAULT_RULES) == PartitionSpec(
        None, None
    )
    spec = partition("p", ["pages", None], [12, 3], {"data": 2, "expert": 1, "context": 3, "tensor": 1}, DEFAULT_RULES)
    assert spec == PartitionSpec(("data", "context"), None)
    assert part_shape((12, 3), spec, {"data": 2, "context": 3}) == (2, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"axes": {"experts": 2}}, "unknown axis 'experts'"),
        ({"axes": {"expert": 0}}, "axis expert has size 0"),
        ({"axis": {}}, "unknown key 'axis'"),
        ({"rules": {"head": []}}, "unknown logical axis 'head'"),
        ({"rules": {"heads": ["model"]}}, "rule 'heads' names axis 'model'"),
    ],
)
def test_a_wrong_preset_is_refused(data: dict, message: str):
    with pytest.raises(MeshError, match=message):
        parse_preset("wrong", data)


def test_a_preset_may_be_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"axes": {"expert": 2, "data": 2}, "rules": {"vocab": []}}))
    preset = load_preset(str(path))
    assert (preset.name, preset.devices, preset.rules["vocab"]) == ("mine", 4, ())
    with pytest.raises(MeshError, match="expert 2 × context 1 × tensor 1 needs 4 devices, there are 1"):
        preset.mesh(jax.devices()[:1])
    with pytest.raises(MeshError, match="no such preset or file; there are gpu-1, "):
        load_preset("gpu-3")
    path.write_text("{")
    with pytest.raises(MeshError, match="not JSON"):
        load_preset(str(path))
