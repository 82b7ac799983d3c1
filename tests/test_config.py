"""The configuration: what is read, what is derived from the lists, and everything that is refused by name."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from typing import Any

import pytest

from dsv41.config import ConfigError, load_config, parse_config
from dsv41.layer_table import Mode, layer_table
from dsv41.numerics.ngram_hash import ngram_hash
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings

ROOT = pathlib.Path(__file__).parent.parent
OFFICIAL = ROOT / "configs" / "deepseek-v4.1-flash"
GOLDEN = ROOT / "tests" / "data" / "golden"
EVERY_CONFIG = sorted(ROOT.glob("configs/*/config.json")) + sorted(GOLDEN.glob("*/*/config.json"))


def official() -> dict[str, Any]:
    return json.loads((OFFICIAL / "config.json").read_text())


def changed(field: str, value: Any) -> dict[str, Any]:
    """The official file with one field ("text_config.head_dim") set."""
    data = official()
    *sections, name = field.split(".")
    place = data
    for section in sections:
        place = place[section]
    assert name in place, field
    place[name] = value
    return data


def leaves(data: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in data.items():
        names += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return names


# Labels of the file that describe it to other software; nothing here depends on them.
UNUSED = {
    "architectures",
    "model_type",
    "text_config.model_type",
    "text_config.attention_dropout",
    "text_config.use_cache",
    "vision_config.model_type",
}


@pytest.mark.parametrize("path", EVERY_CONFIG, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_every_config_of_the_repository_is_read(path: pathlib.Path):
    config = load_config(path)
    assert load_config(path.parent) == config
    ngram_hash(config.text)  # the Engram tables are what the primes say
    data = json.loads(path.read_text())
    assert config.text.compress_ratios == tuple(data["text_config"]["compress_ratios"])
    assert (config.quantization is None) == ("quantization_config" not in data)
    assert Settings.default(config).packed_weights == ("quantization_config" in data)


def test_the_official_layer_table():
    """Row by row: ratio, mode, KV source, index source, candidate source."""
    table = layer_table(load_config(OFFICIAL).text)
    assert table.decoder_start == 20
    assert table.kv_sources == (2, 8, 14, 20)
    assert table.index_sources == (2, 8, 14, 20, 24, 28, 32, 36)
    assert table.ratios == (1, 2)
    assert table.sources_of_ratio(2) == (2, 8, 14)
    rows = [(0, Mode.WINDOW, None, None, None)] * 2
    for source in (2, 8, 14):
        rows += [(2, Mode.FULL, source, source, None)] + [(2, Mode.REUSE, source, source, None)] * 5
    rows += [(1, Mode.FULL, 20, 20, None)] + [(1, Mode.REUSE, 20, 20, None)] * 3
    for source in (24, 28, 32, 36):
        rows += [(1, Mode.REINDEX, 20, source, 20)] + [(1, Mode.REUSE, 20, source, None)] * 3
    ours = [(x.kind.ratio, x.kind.mode, x.kv_source, x.index_source, x.candidate_source) for x in table.layers]
    assert ours == rows
    assert [x.index for x in table.layers if x.kind.makes_pool] == [20]
    assert [x.index for x in table.layers if x.kind.uses_pool] == [24, 28, 32, 36]
    assert [table.source_slot(layer) for layer in (0, 2, 7, 8, 19, 20, 39)] == [0, 0, 0, 1, 2, 0, 0]


# Every inconsistency that the lists can contain: (field, value, what the message must say beside the field).
RATIOS = [0, 0] + [2] * 18 + [1] * 20 + [0] * 3


def ratios(**at: int) -> list[int]:
    out = list(RATIOS)
    for layer, ratio in at.items():
        out[int(layer[1:])] = ratio
    return out


LIST_REFUSALS = [
    ("kv_source_layer_ids", [2, 8, 14, 19, 20], "19", "KV source that is no index source"),
    ("index_source_layer_ids", [2, 8, 14, 24, 28, 32, 36], "20", "KV source dropped from the index sources"),
    ("kv_source_layer_ids", [8, 14, 20], "layer 2 .*ratio 2", "ratio without a source below"),
    ("compress_ratios", ratios(_1=2), "layer 1 .*ratio 2", "ratio below the first source"),
    ("compress_ratios", ratios(_5=3), "layer 5 .*ratio 3.* 2", "another ratio than its source's"),
    ("compress_ratios", ratios(_20=2), "layer 21 .*ratio 1.* 2", "the source has another ratio"),
    ("compress_ratios", ratios(_8=0), "layer 8 ", "a source without global entries"),
    ("compress_ratios", ratios(_24=0), "layer 24 ", "an index source without global entries"),
    ("compress_ratios", ratios(_7=-1), "layer 7 .*-1", "negative ratio"),
    ("compress_ratios", ratios(_41=1), "layer 41 .*1", "draft layer with global entries"),
    ("compress_ratios", RATIOS[:-1], "42 entries", "too short"),
    ("compress_ratios", [*RATIOS, 0], "44 entries", "too long"),
    ("candidate_source_layer_id", 21, "21", "candidate source that is no index source"),
    ("candidate_source_layer_id", 40, "40", "candidate source beyond the layers"),
    ("candidate_source_layer_id", 14, "layer 20 .*14", "Full layer above the candidate source"),
    ("candidate_source_layer_id", 8, "layer 14 .*8", "index source above it that reads other entries"),
    *(
        (field, value, number, reason)
        for field, value, number, reason in [
            ("kv_source_layer_ids", [2, 14, 8, 20], "8", "out of order"),
            ("kv_source_layer_ids", [2, 8, 8, 14, 20], "8", "twice"),
            ("kv_source_layer_ids", [2, 8, 14, 20, 40], "40", "out of range"),
            ("kv_source_layer_ids", [-1, 2, 8, 14, 20], "-1", "negative"),
            ("index_source_layer_ids", [2, 8, 14, 20, 28, 24, 32, 36], "24", "out of order"),
            ("index_source_layer_ids", [2, 8, 14, 20, 24, 28, 32, 36, 41], "41", "out of range"),
            ("engram_layer_ids", [14, 1], "1", "out of order"),
            ("engram_layer_ids", [1, 40], "40", "out of range"),
            ("dspark_target_layer_ids", [37, 39, 38], "38", "out of order"),
            ("dspark_target_layer_ids", [37, 38, 40], "40", "out of range"),
        ]
    ),
]


@pytest.mark.parametrize(
    ("field", "value", "says", "reason"), LIST_REFUSALS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_inconsistent_lists_are_refused_with_field_and_layer(field: str, value: Any, says: str, reason: str):
    with pytest.raises(ConfigError, match=rf"text_config\.\w+.*{says}") as error:
        parse_config(changed(f"text_config.{field}", value))
    # Two lists that contradict each other are named by either.
    contradictions = {"index_source_layer_ids", "kv_source_layer_ids", "compress_ratios", "candidate_source_layer_id"}
    named = re.search(r"text_config\.(\w+)", str(error.value))[1]
    assert named == field or {named, field} <= contradictions


SIZE_REFUSALS = [
    ("text_config.qk_rope_head_dim", 63, "63"),
    ("text_config.qk_rope_head_dim", 640, "640"),
    ("text_config.qk_rope_head_dim", 256, "256.*index_head_dim 128"),
    ("text_config.head_dim", 500, "500"),
    ("text_config.index_head_dim", 80, "80"),
    ("text_config.o_groups", 7, "7"),
    ("text_config.num_experts_per_tok", 385, "385"),
    ("text_config.dspark_num_experts_per_tok", 129, "129"),
    ("text_config.engram_max_ngram_size", 1, "1"),
    ("text_config.engram_num_embeddings", [384006168], "384006168"),
    ("text_config.engram_pad_token_id", 129280, "129280"),
    ("text_config.dspark_noise_token_id", 129280, "129280"),
    ("bos_token_id", 129280, "129280"),
    ("eos_token_id", 129281, "129281"),
    ("pad_token_id", 129282, "129282"),
    ("image_token_id", 129283, "129283"),
    ("vision_config.num_attention_heads", 15, "15"),
    ("text_config.hidden_size", 5130, "5130"),
    ("text_config.moe_intermediate_size", 2300, "2300"),
    ("text_config.q_lora_rank", 1270, "1270"),
    ("text_config.engram_head_dim", 250, "250"),
    ("text_config.o_lora_rank", 1023, "1023"),
    # One value is all that the architecture knows.
    ("text_config.num_key_value_heads", 2, "2"),
    ("text_config.hidden_act", "gelu", "gelu"),
    ("text_config.attention_bias", True, "True"),
    ("text_config.tie_word_embeddings", True, "True"),
    ("text_config.scoring_func", "softmax", "softmax"),
    ("text_config.topk_method", "greedy", "greedy"),
    ("text_config.norm_topk_prob", False, "False"),
    ("text_config.rope_scaling.rope_type", "linear", "linear"),
    ("quantization_config.quant_method", "int8", "int8"),
    ("quantization_config.activation_scheme", "static", "static"),
    ("quantization_config.weight_block_size", [128, 128], "128"),
    ("quantization_config.scale_fmt", "float", "float"),
    ("quantization_config.expert_dtype", "fp8", "fp8"),
    ("dtype", "float16", "float16"),
]


@pytest.mark.parametrize(("field", "value", "says"), SIZE_REFUSALS)
def test_impossible_values_are_refused_with_field_and_value(field: str, value: Any, says: str):
    with pytest.raises(ConfigError, match=rf"{re.escape(field)}: .*{says}"):
        parse_config(changed(field, value))


@pytest.mark.parametrize("field", [name for name in leaves(official()) if name not in UNUSED])
def test_a_missing_field_is_named(field: str):
    data = official()
    *sections, name = field.split(".")
    place = data
    for section in sections:
        place = place[section]
    del place[name]
    with pytest.raises(ConfigError, match=rf"missing.*{re.escape(field)}"):
        parse_config(data)


@pytest.mark.parametrize("field", [name for name in leaves(official()) if name not in UNUSED])
def test_a_value_of_another_type_is_refused(field: str):
    """A list where a scalar belongs, text in a list; and no number may pass as another kind."""
    value = official()
    for section in field.split("."):
        value = value[section]
    wrong = ["x"] if isinstance(value, list) else [value]
    with pytest.raises(ConfigError, match=re.escape(field)):
        parse_config(changed(field, wrong))
    if isinstance(value, int) and not isinstance(value, bool):
        for number in (True, "1", -3, value + 0.5):
            if number == value + 0.5 and field.split(".")[-1] in FLOAT_FIELDS:
                continue
            with pytest.raises(ConfigError, match=re.escape(field)):
                parse_config(changed(field, number))


FLOAT_FIELDS = {
    "swiglu_limit", "initializer_range", "rms_norm_eps", "rope_theta", "factor", "beta_fast", "beta_slow",
    "routed_scaling_factor", "compress_rope_theta", "hc_eps", "max_wh_ratio",
}  # fmt: skip


@pytest.mark.parametrize("field", ["text_config", "vision_config"])
def test_a_missing_section_is_named(field: str):
    data = official()
    del data[field]
    with pytest.raises(ConfigError, match=field):
        parse_config(data)
    with pytest.raises(ConfigError, match=f"{field}: 3"):
        parse_config(changed(field, 3))


def test_files_that_are_none(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_config(tmp_path)


def test_optional_values():
    """null where the layout has nothing; and zero where it counts."""
    assert parse_config(changed("text_config.candidate_source_layer_id", None)).text.candidate_source_layer_id is None
    data = changed("text_config.num_nextn_predict_layers", 0)
    data["text_config"]["compress_ratios"] = RATIOS[:40]
    assert parse_config(data).text.num_nextn_predict_layers == 0
    for field in ("hidden_size", "index_topk", "sliding_window"):
        with pytest.raises(ConfigError, match=f"{field}: 0"):
            parse_config(changed(f"text_config.{field}", 0))
    data = official()
    before = copy.deepcopy(data)
    parse_config(data)
    assert data == before


def test_settings_refuse_what_cannot_be_stored():
    config = load_config(OFFICIAL)
    with pytest.raises(ValueError, match=r"page_tokens: 63.*ratio 2"):
        Settings.default(config, page_tokens=63)
    plain = load_config(GOLDEN / "mini8" / "f32")
    with pytest.raises(ValueError, match="packed_weights"):
        Settings(plain, RoundingPolicy(), packed_weights=True, page_tokens=64)
    assert hash(Settings.default(config)) == hash(Settings.default(load_config(OFFICIAL)))
    assert Settings.default(config) == Settings.default(load_config(OFFICIAL))
    assert Settings.default(config) != Settings.default(config, cache_rounding=False)
