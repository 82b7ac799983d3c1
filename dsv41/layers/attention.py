"""CSA2 attention in its four modes: window only, Full, Reindex, Reuse (model.md, 'Attention, every layer')."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from dsv41.layer_table import LayerKind, Mode
from dsv41.layers.compressor import Compressor
from dsv41.layers.distillation import IndexScores, attention_mass, index_divergence
from dsv41.layers.flow import Flow, LayerInputs, RotaryTable, Step
from dsv41.layers.indexer import Indexer
from dsv41.layers.linear import Linear, RMSNorm, declare, declare_matrix, rounded_matrix
from dsv41.numerics.rotary import rotate
from dsv41.settings import Settings
from dsv41.sharding import context
from dsv41.state.memory import source_view
from dsv41.state.tail import Projections
from pallas_kernels.block_linear import block_linear
from pallas_kernels.formats import DenseFormat, Format, Packed
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.sparse_attention.partial import SINK_MARGIN


class AttentionOutput(NamedTuple):
    """Output ``[batch, query, d]`` of this device's columns; window entries ``[batch, query, width']`` of all."""

    y: jax.Array
    entries: Packed


class GroupedOutput(nn.Module):
    """W_oa: each of the ``o_groups`` groups of heads has its own block [o_lora, group width].

    Stored in FP8 like the dense linears, but multiplied out in the activation dtype, its input unrounded.
    """

    settings: Settings

    def setup(self):
        text = self.settings.text
        width = text.num_attention_heads // text.o_groups * text.head_dim
        shape = (text.o_groups * text.o_lora_rank, width)
        self.weight, self.scale = declare_matrix(self, self.settings, shape, ("o_groups", None), quantised=True)

    def __call__(self, heads: jax.Array) -> jax.Array:
        """``[batch, query, heads, head_dim]`` to ``[batch, query, o_groups · o_lora]``, of this device's heads."""
        x = rearrange(heads, "b s h d -> b s (h d)")
        unrounded = DenseFormat(x.dtype.name)
        groups = self.settings.parallel.part("o_groups", self.settings.text.o_groups)
        weight = rounded_matrix(self.settings, self.weight, self.scale)
        return block_linear(x, weight, self.scale, activation_fmt=unrounded, groups=groups)


class Attention(nn.Module):
    """One attention sub-layer; what it computes beyond the window depends on ``kind.mode``."""

    settings: Settings
    kind: LayerKind

    def setup(self):
        settings, text = self.settings, self.settings.text
        heads = text.num_attention_heads * text.head_dim
        self.wq_a = Linear(settings, text.q_lora_rank, text.hidden_size, ("q_lora", "embed"))
        self.q_norm = RMSNorm(settings, text.q_lora_rank, "q_lora")
        self.wq_b = Linear(settings, heads, text.q_lora_rank, ("heads", "q_lora"))
        self.wkv = Linear(settings, text.head_dim, text.hidden_size, ("head_dim", "embed"))
        self.kv_norm = RMSNorm(settings, text.head_dim, "head_dim")
        self.attn_sink = declare(self, "attn_sink", (text.num_attention_heads,), jnp.float32, ("heads",))
        self.wo_a = GroupedOutput(settings)
        self.wo_b = Linear(settings, text.hidden_size, text.o_groups * text.o_lora_rank, ("embed", "o_groups"))
        if self.kind.mode is Mode.FULL:
            self.compressor = Compressor(settings, self.kind.ratio)
        if self.kind.selects:
            self.indexer = Indexer(settings, self.kind)

    def write_memory(
        self, x: jax.Array, flow: Flow, inputs: LayerInputs, step: Step
    ) -> tuple[Flow, Projections | None]:
        """Full layers: appends the entries that the step's tokens complete.

        Args:
          x: the layer's normalised input ``[batch, query, d]``, of this device's columns.

        Returns:
          the flow with its memory extended, and the tokens' projections for the tail (None for ratio 1).
        """
        groups = self.compressor(x, inputs, step)
        keys = self.indexer.keys(groups.latents, groups.rope)
        memory = self.compressor.append(flow.memory[self.kind.ratio], groups, keys, inputs, step)
        return flow.replace(memory={**flow.memory, self.kind.ratio: memory}), groups.projections

    def __call__(self, x: jax.Array, flow: Flow, inputs: LayerInputs, step: Step) -> tuple[Flow, AttentionOutput]:
        """Attends from the step's tokens.

        Args:
          x: the layer's normalised input ``[batch, query, d]``, of this device's columns.
          flow: carries the memory and the selection of the last index source.

        Returns:
          the flow (with a new selection if this layer selects) and the output.
        """
        text, formats = self.settings.text, self.settings.formats
        rope = step.rope_window if self.kind.mode is Mode.WINDOW else step.rope_csa
        queries, low_rank = self.queries(x, rope)
        entries = step.split.whole(self.window_entries(x, rope))

        scores = None
        if self.kind.selects:
            flow, scores = self.indexer.select(x, low_rank, flow, inputs, step)
        pool, page_table, chosen = None, None, None
        if self.kind.mode is not Mode.WINDOW:
            pool, page_table = source_view(flow.memory[self.kind.ratio].main, step.read_table, inputs.source_slot)
            chosen = flow.selection

        arguments = (
            queries,
            step.local_entries(inputs.ring, entries),
            formats.window,
            step.local_valid,
            pool,
            formats.main_kv,
            page_table,
            chosen,
            self.attn_sink,
            step.rotation,
            step.reach,
        )
        static = {"window": text.sliding_window, "scale": text.head_dim**-0.5, "probability_dtype": self.settings.dtype}
        heads = context.attend(step.split, *arguments, **static)
        if scores is not None and self.is_mutable_collection("divergence"):
            self.sow("divergence", "total", self._divergence(scores, arguments, static))
        return flow, AttentionOutput(self.output(heads, rope), entries)

    def _divergence(self, scores: IndexScores, arguments: tuple, static: dict) -> jax.Array:
        """Σ over queries of how far the index scores are from where the heads look (rows that lie on one device)."""
        detached = [x if isinstance(x, Format) else lax.stop_gradient(x) for x in arguments]
        queries, _, _, _, pool, fmt, page_table, chosen, sink, *_ = detached
        part = sparse_attention(*detached, **static, return_partial=True)
        top = jnp.maximum(part.top, sink - SINK_MARGIN)
        log_sum = top + jnp.log(part.total * jnp.exp(part.top - top) + jnp.exp(sink - top))
        mass = attention_mass(queries, pool, fmt, page_table, chosen, log_sum, static["scale"])
        return index_divergence(scores, chosen, self.settings.parallel.sum(mass, "heads"))

    def queries(self, x: jax.Array, rope: RotaryTable) -> tuple[jax.Array, jax.Array]:
        """Rotated queries ``[batch, query, heads, head_dim]`` of ``[batch, query, d]``, and their low-rank form.

        The heads are this device's.
        """
        low_rank = self.q_norm(self.wq_a(x))
        queries = rearrange(self.wq_b(low_rank), "b s (h d) -> b s h d", d=self.settings.text.head_dim)
        return rotate(queries, _over_heads(rope)), low_rank

    def window_entries(self, x: jax.Array, rope: RotaryTable) -> Packed:
        """Rotated and packed window entries ``[batch, query, width']`` of ``[batch, query, d]``."""
        return self.settings.formats.window.encode(rotate(self.kv_norm(self.wkv(x)), rope))

    def output(self, heads: jax.Array, rope: RotaryTable) -> jax.Array:
        """The heads' outputs ``[batch, query, heads, head_dim]``, rotated back, to ``[batch, query, d]``."""
        y = self.wo_b(self.wo_a(rotate(heads, _over_heads(rope), inverse=True)))
        return self.settings.parallel.sum(y, "o_groups")


def _over_heads(rope: RotaryTable) -> RotaryTable:
    return jax.tree.map(lambda t: t[:, :, None], rope)
