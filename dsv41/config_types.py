"""The configuration's data: sizes, lists and storage as the official ``config.json`` states them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field and the value."""


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """``rope_scaling``: YaRN frequency interpolation of the CSA2 layers (no softmax factor)."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """``text_config``: the backbone, its Engram memory and the DSpark drafter."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: YarnConfig
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @property
    def engram_columns(self) -> int:
        """Table rows looked up for one position: (n-gram sizes) × (hash heads)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """``vision_config``: the picture encoder, its token budget and its resize limits."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """``quantization_config``: how the checkpoint stores its matrices (absent: plain float storage)."""

    quant_method: str
    activation_scheme: str
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    expert_dtype: str


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The whole ``config.json``.

    Attributes:
      dtype: activation dtype, "bfloat16" or "float32".
      quantization: None for a checkpoint of plain floats (no weight or activation rounding).
    """

    dtype: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    text: TextConfig
    vision: VisionConfig
    quantization: QuantizationConfig | None

    @property
    def activation_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)
