"""Reading the model's configuration from the official ``config.json`` layout.

The file nests the text, vision and quantisation settings; every size that the code uses comes from here.
A field that is missing, of the wrong type, or outside what the architecture computes is refused with its
name and value (:class:`ConfigError`); nothing has a silent default.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import types
import typing
from typing import Any

from dsv41.config_types import ConfigError, ModelConfig, QuantizationConfig, TextConfig, VisionConfig, YarnConfig
from dsv41.layer_table import layer_table

__all__ = [
    "ConfigError",
    "ModelConfig",
    "QuantizationConfig",
    "TextConfig",
    "VisionConfig",
    "YarnConfig",
    "load_config",
    "parse_config",
]


# Settings of which the architecture knows exactly one value: (section, field) -> value.
_FIXED: dict[tuple[str, str], Any] = {
    ("text_config", "num_key_value_heads"): 1,
    ("text_config", "hidden_act"): "silu",
    ("text_config", "attention_bias"): False,
    ("text_config", "tie_word_embeddings"): False,
    ("text_config", "scoring_func"): "sqrtsoftplus",
    ("text_config", "topk_method"): "noaux_tc",
    ("text_config", "norm_topk_prob"): True,
    ("text_config.rope_scaling", "rope_type"): "yarn",
    ("quantization_config", "quant_method"): "fp8",
    ("quantization_config", "activation_scheme"): "dynamic",
    ("quantization_config", "weight_block_size"): (32, 32),
    ("quantization_config", "scale_fmt"): "ue8m0",
    ("quantization_config", "expert_dtype"): "fp4",
}
# Integer fields that may be zero; every other number in the file must be positive.
_MAY_BE_ZERO = {"bos_token_id", "eos_token_id", "pad_token_id", "num_nextn_predict_layers", "candidate_source_layer_id"}


def _convert(section: str, field: str, kind: Any, value: Any) -> Any:
    """Checks one JSON value against the annotated type and converts lists to tuples, ints to floats."""
    where = f"{section}.{field}" if section else field
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None:
        if types.NoneType in options:
            return None
        raise ConfigError(f"{where}: null where {kind} is needed")
    kind = next(k for k in options if k is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(f"{where}: {value!r} is not a list of integers")
        return tuple(value)
    if dataclasses.is_dataclass(kind):
        return _read(kind, where, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}: {value!r} is not of type {kind.__name__}")
    if kind in (int, float) and (value < 0 or (value == 0 and field not in _MAY_BE_ZERO)):
        raise ConfigError(f"{where}: {value!r} must be positive")
    return value


def _read(cls: type, section: str, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{section}: {data!r} is not an object")
    hints = typing.get_type_hints(cls)
    missing = [f"{section}.{name}" for name in hints if name not in data]
    if missing:
        raise ConfigError(f"missing field(s): {', '.join(missing)}")
    values = {name: _convert(section, name, kind, data[name]) for name, kind in hints.items()}
    for name, value in values.items():
        wanted = _FIXED.get((section, name), value)
        if value != wanted:
            raise ConfigError(f"{section}.{name}: {value!r} is not supported; the architecture has {wanted!r}")
    return cls(**values)


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """Builds a :class:`ModelConfig` from the parsed JSON and checks it.

    Raises:
      ConfigError: a field is missing, of the wrong type, or inconsistent with another one.
    """
    top = {}
    for name in ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if name not in data:
            raise ConfigError(f"missing field(s): {name}")
        top[name] = _convert("", name, str if name == "dtype" else int, data[name])
    if top["dtype"] not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype: {top['dtype']!r} is neither 'bfloat16' nor 'float32'")
    for name in ("text_config", "vision_config"):
        if name not in data:
            raise ConfigError(f"missing field(s): {name}")
    quantization = data.get("quantization_config")
    config = ModelConfig(
        **top,
        text=_read(TextConfig, "text_config", data["text_config"]),
        vision=_read(VisionConfig, "vision_config", data["vision_config"]),
        quantization=None if quantization is None else _read(QuantizationConfig, "quantization_config", quantization),
    )
    _check_sizes(config)
    # The layer lists are checked by building the table that everything else reads.
    layer_table(config.text)
    return config


def load_config(path: str | pathlib.Path) -> ModelConfig:
    """Reads ``config.json``, given as the file or as the directory that holds it.

    Raises:
      ConfigError: see :func:`parse_config`; also when the file is not JSON.
      FileNotFoundError: there is no such file.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    return parse_config(data)


def _check_sizes(config: ModelConfig) -> None:
    """Relations between fields that no single field shows."""
    text, vision = config.text, config.vision

    def need(ok: bool, field: str, reason: str, section: str = "text_config") -> None:
        if not ok:
            value = getattr(text if section == "text_config" else vision, field)
            raise ConfigError(f"{section}.{field}: {value!r} {reason}")

    rope = text.qk_rope_head_dim
    need(rope % 2 == 0, "qk_rope_head_dim", "is odd; the rotary part is made of pairs")
    need(rope <= text.head_dim, "qk_rope_head_dim", f"exceeds head_dim {text.head_dim}")
    need(rope <= text.index_head_dim, "qk_rope_head_dim", f"exceeds index_head_dim {text.index_head_dim}")
    need(text.head_dim % 32 == 0, "head_dim", "is not a multiple of 32, the FP8 block of window entries")
    need(text.index_head_dim % 32 == 0, "index_head_dim", "is not a multiple of 32, the FP4 block of index keys")
    need(
        text.num_attention_heads % text.o_groups == 0,
        "o_groups",
        f"does not divide num_attention_heads {text.num_attention_heads}",
    )
    need(
        text.num_experts_per_tok <= text.n_routed_experts,
        "num_experts_per_tok",
        f"exceeds n_routed_experts {text.n_routed_experts}",
    )
    need(
        text.dspark_num_experts_per_tok <= text.dspark_n_routed_experts,
        "dspark_num_experts_per_tok",
        f"exceeds dspark_n_routed_experts {text.dspark_n_routed_experts}",
    )
    need(text.engram_max_ngram_size >= 2, "engram_max_ngram_size", "leaves no n-gram to hash")
    need(
        len(text.engram_num_embeddings) == len(text.engram_layer_ids),
        "engram_num_embeddings",
        f"has not one entry for each of engram_layer_ids {list(text.engram_layer_ids)}",
    )
    for field in ("engram_pad_token_id", "dspark_noise_token_id"):
        need(getattr(text, field) < text.vocab_size, field, f"is not below vocab_size {text.vocab_size}")
    for field in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(config, field)
        if value >= text.vocab_size:
            raise ConfigError(f"{field}: {value} is not below text_config.vocab_size {text.vocab_size}")
    need(
        vision.hidden_size % vision.num_attention_heads == 0,
        "num_attention_heads",
        f"does not divide hidden_size {vision.hidden_size}",
        "vision_config",
    )
    if config.quantization is not None:
        for field in ("hidden_size", "moe_intermediate_size", "q_lora_rank", "engram_head_dim"):
            need(getattr(text, field) % 32 == 0, field, "is not a multiple of 32, the block of quantised weights")
        group_width = text.num_attention_heads // text.o_groups * text.head_dim
        need(
            group_width % 32 == 0 and text.o_groups * text.o_lora_rank % 32 == 0,
            "o_lora_rank",
            "does not fit 32×32 weight blocks",
        )
