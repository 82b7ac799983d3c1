"""The indexer: which global entries each query attends to (model.md, 'Indexer')."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from dsv41.layer_table import LayerKind, Mode
from dsv41.layers.distillation import IndexScores
from dsv41.layers.flow import Flow, LayerInputs, RotaryTable, Step
from dsv41.layers.linear import Linear, RMSNorm
from dsv41.numerics.rotary import rotate
from dsv41.settings import Settings
from dsv41.sharding import context
from dsv41.state.memory import source_view
from pallas_kernels.choice import choice
from pallas_kernels.index_select import BlockSelection


class Indexer(nn.Module):
    """Index queries of every index source; index keys too where the layer is a KV source."""

    settings: Settings
    kind: LayerKind

    def setup(self):
        settings, text = self.settings, self.settings.text
        heads, width = text.index_n_heads, text.index_head_dim
        self.wq_b = Linear(settings, heads * width, text.q_lora_rank, ("index_heads", "q_lora"))
        self.weights_proj = Linear(settings, heads, text.hidden_size, ("index_heads", "embed"), quantised=False)
        if self.kind.mode is Mode.FULL:
            self.wk = Linear(settings, width, text.head_dim, (None, "head_dim"), quantised=False)
            self.k_norm = RMSNorm(settings, width)

    def keys(self, latents: jax.Array, rope: RotaryTable) -> jax.Array:
        """Index keys ``[batch, groups, index_head_dim]`` of unrotated, unrounded latents, not yet rounded."""
        # Latents are shaped by what attends to their entries; what trains the indexer passes them by.
        return rotate(self.k_norm(self.wk(lax.stop_gradient(latents))), rope)

    def queries(self, x: jax.Array, low_rank: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Rounded index queries ``[batch, query, index_heads, index_head_dim]`` and head weights (float32)."""
        text, parallel = self.settings.text, self.settings.parallel
        x, low_rank = lax.stop_gradient((x, low_rank))
        q = rearrange(self.wq_b(low_rank), "b s (h d) -> b s h d", d=text.index_head_dim)
        q = rotate(q, jax.tree.map(lambda t: t[:, :, None], step.rope_csa))
        # A score is a sum over all heads: they come together before it is taken.
        q = parallel.gather(self.settings.formats.index_queries.round(q), "index_heads", axis=2)
        weights = parallel.gather(self.weights_proj(x).astype(jnp.float32), "index_heads", axis=2)
        return q, weights * (text.index_head_dim**-0.5 * text.index_n_heads**-0.5)

    def select(
        self, x: jax.Array, low_rank: jax.Array, flow: Flow, inputs: LayerInputs, step: Step
    ) -> tuple[Flow, IndexScores]:
        """Chooses the best visible entries (inside the pool, for a Reindex layer above the pool's source).

        Args:
          x: the layer's normalised input ``[batch, query, d]``; low_rank: its query latent [.., q_lora]; both of this
            device's columns.

        Returns:
          the flow with the new selection and, from the pool's source, the new candidate blocks; and what they were
          chosen by.
        """
        text, fmt = self.settings.text, self.settings.formats.index_keys
        queries, weights = self.queries(x, low_rank, step)
        pool, page_table = source_view(flow.memory[self.kind.ratio].index, step.read_table, inputs.source_slot)
        visible, first = step.visible(self.kind.ratio)
        common = (step.split, queries, weights, pool, fmt, page_table, visible)
        blocks = flow.blocks
        if self.kind.uses_pool:
            entries, _ = context.reselect(*common, blocks, text.candidate_block_size, text.index_topk, first)
        else:
            wanted = BlockSelection(text.candidate_block_size, text.candidate_topk_blocks)
            chosen = context.select(*common, text.index_topk, wanted if self.kind.makes_pool else None, first)
            entries = chosen.indices
            if self.kind.makes_pool:
                blocks = chosen.blocks
        entries = choice(step.split.whole(entries))
        if self.kind.makes_pool:
            blocks = choice(step.split.whole(blocks))
        self.sow("intermediates", "index_queries", queries)
        self.sow("intermediates", "index_weights", weights)
        self.sow("intermediates", "topk", entries)
        if self.kind.makes_pool:
            self.sow("intermediates", "candidate_blocks", blocks)
        if step.forced is not None:
            entries = jnp.where(step.forced.active, step.forced.entries[inputs.index_slot], entries)
            if self.kind.makes_pool:
                blocks = jnp.where(step.forced.active, step.forced.blocks, blocks)
        scores = IndexScores(queries, weights, pool, fmt, page_table, visible, first)
        return flow.replace(selection=entries, blocks=blocks), scores
