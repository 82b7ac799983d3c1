"""Every tensor of the public checkpoint: name, storage dtype and shape, enumerated from the configuration.

Names carry no ``model.`` prefix. Matrices are ``[out, in]``. A quantised matrix ``X.weight`` has a sibling
``X.scale`` of E8M0 bytes: one for a 32×32 tile of a dense matrix, one for 32 consecutive inputs of a routed
expert or of an Engram row.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from dsv41.config import ModelConfig, QuantizationConfig, TextConfig, VisionConfig
from dsv41.layer_table import LayerKind, Mode, layer_table

PARTS = ("text", "dspark", "vision")

STORAGE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""Bytes of one element of each dtype that the public layout uses, by its safetensors name."""

PUBLIC_QUANTIZATION = QuantizationConfig(
    quant_method="fp8", activation_scheme="dynamic", weight_block_size=(32, 32), scale_fmt="ue8m0", expert_dtype="fp4"
)
"""The one quantisation that the architecture knows; also found in files that an unquantised model reads."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor as a file stores it.

    Attributes:
      name: public name.
      dtype: safetensors dtype, a key of :data:`STORAGE_BYTES`. "I8" is two E2M1 codes a byte.
      shape: stored shape (the last axis of an "I8" tensor counts bytes).
      part: "text" (backbone with its Engram), "dspark" or "vision".
      block: rows × columns of values that share one scale; None in a tensor without scale.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: str
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORAGE_BYTES[self.dtype]

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the values that the tensor stands for: the last axis of packed codes counts twice."""
        return (*self.shape[:-1], 2 * self.shape[-1]) if self.dtype == "I8" else self.shape

    @property
    def scale_name(self) -> str | None:
        """Name of the tensor with this one's scales, None where there is none."""
        return None if self.block is None else self.name.removesuffix("weight") + "scale"


class _Builder:
    """Collects the tensors in order; ``prefix`` is put before every name."""

    def __init__(self, quantization: QuantizationConfig | None) -> None:
        self.quantization = quantization
        self.tensors: dict[str, TensorSpec] = {}
        self.prefix = ""
        self.part = "text"

    def _put(self, name: str, dtype: str, shape: tuple[int, ...], block: tuple[int, int] | None = None) -> None:
        name = self.prefix + name
        self.tensors[name] = TensorSpec(name, dtype, shape, self.part, block)

    def plain(self, name: str, *shape: int, dtype: str = "BF16") -> None:
        self._put(name, dtype, shape)

    def _scaled(self, name: str, rows: int, columns: int, dtype: str, tile_rows: int | None) -> None:
        if self.quantization is None:
            return self.plain(f"{name}.weight", rows, columns)
        block = (tile_rows or self.quantization.weight_block_size[0], self.quantization.weight_block_size[1])
        stored = columns // 2 if dtype == "I8" else columns
        self._put(f"{name}.weight", dtype, (rows, stored), block)
        self._put(f"{name}.scale", "F8_E8M0", (-(-rows // block[0]), -(-columns // block[1])))

    def dense(self, name: str, rows: int, columns: int) -> None:
        """An FP8 matrix with one scale a tile."""
        self._scaled(name, rows, columns, "F8_E4M3", None)

    def table(self, name: str, rows: int, columns: int) -> None:
        """An FP8 table with scales along each row."""
        self._scaled(name, rows, columns, "F8_E4M3", 1)

    def expert(self, name: str, rows: int, columns: int) -> None:
        """An FP4 matrix, two codes a byte, with scales along each row."""
        self._scaled(name, rows, columns, "I8", 1)


def _attention(out: _Builder, text: TextConfig, kind: LayerKind) -> None:
    d, heads, width = text.hidden_size, text.num_attention_heads, text.head_dim
    out.dense("attn.wq_a", text.q_lora_rank, d)
    out.dense("attn.wq_b", heads * width, text.q_lora_rank)
    out.dense("attn.wkv", width, d)
    out.dense("attn.wo_a", text.o_groups * text.o_lora_rank, heads // text.o_groups * width)
    out.dense("attn.wo_b", d, text.o_groups * text.o_lora_rank)
    out.plain("attn.q_norm.weight", text.q_lora_rank)
    out.plain("attn.kv_norm.weight", width)
    out.plain("attn.attn_sink", heads, dtype="F32")
    if kind.mode is Mode.FULL:
        out.plain("attn.compressor.wkv.weight", width, d)
        if kind.ratio >= 2:  # a group of one token has nothing to weigh
            out.plain("attn.compressor.wgate.weight", width, d)
        out.plain("attn.compressor.norm.weight", width)
        out.plain("attn.indexer.wk.weight", text.index_head_dim, width)
        out.plain("attn.indexer.k_norm.weight", text.index_head_dim)
    if kind.selects:
        out.dense("attn.indexer.wq_b", text.index_n_heads * text.index_head_dim, text.q_lora_rank)
        out.plain("attn.indexer.weights_proj.weight", text.index_n_heads, d)


def _block(out: _Builder, text: TextConfig, kind: LayerKind, experts: int) -> None:
    """One transformer block: attention, experts, norms and the stream mixing of both."""
    d, inner, copies = text.hidden_size, text.moe_intermediate_size, text.hc_mult
    _attention(out, text, kind)
    out.plain("attn_norm.weight", d)
    out.plain("ffn_norm.weight", d)
    for sublayer in ("attn", "ffn"):
        out.plain(f"hc_{sublayer}_fn", (2 + copies) * copies, copies * d, dtype="F32")
        out.plain(f"hc_{sublayer}_base", (2 + copies) * copies, dtype="F32")
        out.plain(f"hc_{sublayer}_scale", 3, dtype="F32")
    out.plain("ffn.gate.weight", experts, d)
    out.plain("ffn.gate.bias", experts, dtype="F32")
    out.plain("ffn.gate.bias_vl", experts, dtype="F32")
    for expert in range(experts):
        out.expert(f"ffn.experts.{expert}.w1", inner, d)
        out.expert(f"ffn.experts.{expert}.w2", d, inner)
        out.expert(f"ffn.experts.{expert}.w3", inner, d)
    shared = text.n_shared_experts * inner
    out.dense("ffn.shared_experts.w1", shared, d)
    out.dense("ffn.shared_experts.w2", d, shared)
    out.dense("ffn.shared_experts.w3", shared, d)


def _engram(out: _Builder, text: TextConfig, rows: int) -> None:
    out.table("engram.embed", rows, text.engram_head_dim)
    out.dense("engram.wkv", (text.hc_mult + 1) * text.hidden_size, text.engram_columns * text.engram_head_dim)
    out.plain("engram.q_weight", text.hc_mult, text.hidden_size)
    out.plain("engram.k_weight", text.hc_mult, text.hidden_size)


def _dspark(out: _Builder, text: TextConfig) -> None:
    d, rank, stages = text.hidden_size, text.dspark_markov_rank, text.num_nextn_predict_layers
    for stage in range(stages):
        out.prefix = f"mtp.{stage}."
        if stage == 0:
            out.dense("main_proj", d, len(text.dspark_target_layer_ids) * d)
            out.plain("main_norm.weight", d)
        _block(out, text, LayerKind(Mode.WINDOW, 0), text.dspark_n_routed_experts)
        if stage == stages - 1:
            out.plain("norm.weight", d)
            out.plain("markov_head.embed.weight", text.vocab_size, rank)
            out.plain("markov_head.head.weight", text.vocab_size, rank)
            out.plain("confidence_head.proj.weight", 1, d + rank)


def _vision(out: _Builder, text: TextConfig, vision: VisionConfig) -> None:
    d, width, inner = text.hidden_size, vision.hidden_size, vision.intermediate_size
    out.prefix = "vision."
    out.plain("patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    out.plain("patch_embed.proj.bias", width)
    for block in range(vision.num_hidden_layers):
        out.prefix = f"vision.blocks.{block}."
        out.plain("norm1.weight", width)
        out.plain("attn.wqkv.weight", 3 * width, width)
        out.plain("attn.wqkv.bias", 3 * width)
        out.plain("attn.wo.weight", width, width)
        out.plain("attn.wo.bias", width)
        out.plain("norm2.weight", width)
        out.plain("mlp.w1.weight", 2 * inner, width)
        out.plain("mlp.w2.weight", width, inner)
    out.prefix = ""
    out.plain("vision.norm.weight", width)
    out.plain("aligner.w1.weight", d, width * vision.downsample_ratio**2)
    out.plain("aligner.w1.bias", d)
    out.plain("aligner.w2.weight", d, d)
    out.plain("aligner.w2.bias", d)
    for name in ("image_start", "image_end", "image_newline"):
        out.plain(name, d)


@functools.lru_cache(maxsize=4)
def _layout(config: ModelConfig) -> dict[str, TensorSpec]:
    text = config.text
    out = _Builder(config.quantization)
    out.plain("embed.weight", text.vocab_size, text.hidden_size)
    engram_rows = dict(zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True))
    for layer in layer_table(text).layers:
        out.prefix = f"layers.{layer.index}."
        _block(out, text, layer.kind, text.n_routed_experts)
        if layer.index in engram_rows:
            _engram(out, text, engram_rows[layer.index])
    out.prefix = ""
    out.plain("norm.weight", text.hidden_size)
    out.plain("head.weight", text.vocab_size, text.hidden_size)
    out.part = "dspark"
    _dspark(out, text)
    out.part = "vision"
    _vision(out, text, config.vision)
    return out.tensors


def checkpoint_layout(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of the public checkpoint of ``config``, by name, in a fixed order.

    With ``config.quantization`` the dtypes are the official ones. Without it the same matrices have no scale and
    are listed as BF16; a file of such a model may hold F32 in place of any BF16 and the reverse.
    """
    return dict(_layout(config))


def quantized_layout(config: ModelConfig) -> dict[str, TensorSpec]:
    """:func:`checkpoint_layout` with the official quantisation, whatever the configuration says of its own."""
    return checkpoint_layout(dataclasses.replace(config, quantization=PUBLIC_QUANTIZATION))
