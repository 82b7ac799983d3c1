"""DSpark: the drafter, extra layers that propose a block of tokens for the backbone to verify (model.md, 'DSpark').

Its memory is one window ring a stage, filled with what the backbone's target layers read at committed positions. A
draft passes [next token, noise, …] through the stages at once; then tokens are drawn one after the other, as a
low-rank Markov head adds what the previous token says about the next. Nothing here changes what the backbone
accepts.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from dsv41.layer_table import LayerKind, Mode
from dsv41.layers.attention import Attention
from dsv41.layers.flow import RotaryTable
from dsv41.layers.linear import Linear, RMSNorm, WideLinear, declare, declare_parts
from dsv41.layers.mhc import cross, declare_hyper_connection, first_mix, mix_streams, update_streams
from dsv41.layers.moe import MixtureOfExperts
from dsv41.numerics.rotary import rotary_table, window_frequencies
from dsv41.settings import Settings
from dsv41.state.ring import Ring
from pallas_kernels.formats import Packed
from pallas_kernels.mhc import Update
from pallas_kernels.products import einsum, narrow, operand_dtype
from pallas_kernels.sparse_attention.partial import SINK_MARGIN


class Bias(NamedTuple):
    """What the Markov head makes of a token: logits ``[..., vocab]`` float32 and its embedding ``[..., rank]``."""

    logits: jax.Array
    embedding: jax.Array


class MarkovEmbedding(nn.Module):
    """Low-rank embeddings ``[vocab, rank]``."""

    settings: Settings

    def setup(self):
        text = self.settings.text
        shape = (text.vocab_size, text.dspark_markov_rank)
        self.weight = declare(self, "weight", shape, self.settings.dtype, ("vocab", None))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.settings.parallel.rows(self.weight, tokens, "vocab")


class MarkovHead(nn.Module):
    """What a token adds to the logits of the next."""

    settings: Settings

    def setup(self):
        text = self.settings.text
        self.embed = MarkovEmbedding(self.settings)
        self.head = WideLinear(self.settings, text.vocab_size, text.dspark_markov_rank, ("vocab", None))

    def __call__(self, tokens: jax.Array) -> Bias:
        """Tokens int32 ``[...]``."""
        embedding = self.embed(tokens)
        return Bias(self.settings.parallel.gather(self.head(embedding), "vocab", axis=-1), embedding)


class ConfidenceHead(nn.Module):
    """Logit of the chance that the backbone accepts a position's draft."""

    settings: Settings

    def setup(self):
        text = self.settings.text
        self.proj = WideLinear(self.settings, 1, text.hidden_size + text.dspark_markov_rank, (None, "embed"))

    def __call__(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """``[..., d]`` before the norm and the previous token's ``[..., rank]`` to ``[...]`` float32, no sigmoid."""
        wide = (x.astype(jnp.float32), embedding.astype(jnp.float32))
        return self.proj(jnp.concatenate(wide, axis=-1))[..., 0]


class DraftStage(nn.Module):
    """One drafter layer: window attention and a mixture of experts of its own.

    Attributes:
      is_first: it also reads the backbone's taps.
      is_last: it also holds the heads.
    """

    settings: Settings
    is_first: bool
    is_last: bool

    def setup(self):
        settings, text = self.settings, self.settings.text
        d = text.hidden_size
        if self.is_first:
            self.main_proj = Linear(settings, d, len(text.dspark_target_layer_ids) * d, ("embed", None))
            self.main_norm = RMSNorm(settings, d, "embed")
        self.attn = Attention(settings, LayerKind(Mode.WINDOW, 0))
        self.attn_norm = RMSNorm(settings, d, "embed")
        self.ffn = MixtureOfExperts(settings, text.dspark_n_routed_experts, text.dspark_num_experts_per_tok)
        self.ffn_norm = RMSNorm(settings, d, "embed")
        self.hc_attn = declare_hyper_connection(self, settings, "attn")
        self.hc_ffn = declare_hyper_connection(self, settings, "ffn")
        if self.is_last:
            self.norm = RMSNorm(settings, d, "embed")
            self.markov_head = MarkovHead(settings)
            self.confidence_head = ConfidenceHead(settings)

    def main(self, taps: jax.Array) -> jax.Array:
        """What all stages remember of backbone positions: taps ``[targets, batch, query, d]`` to one ``d``."""
        return self.main_norm(self.main_proj(rearrange(taps, "t b s d -> b s (t d)")))

    def entries(self, main: jax.Array, rope: RotaryTable) -> Packed:
        """This stage's window entries of backbone positions, from :meth:`main`."""
        return self.attn.window_entries(main, rope)

    def __call__(
        self, streams: jax.Array, mix: jax.Array, ring: Packed, held: jax.Array, rope: RotaryTable
    ) -> tuple[jax.Array, jax.Array]:
        """Passes a block through the stage.

        Args:
          streams: ``[batch, block, C, d]``; mix: ``[batch, block, C]`` float32.
          ring: ``[batch, W, width']``; held: bool ``[batch, W]``, which slots hold an entry.

        Returns:
          streams and mix after the stage.
        """
        _, x, c = cross(streams, mix, self.hc_attn, self.attn_norm)
        update = Update(self._attend(x, ring, held, rope), c.post, c.comb)
        streams, x, c = cross(streams, c.pre, self.hc_ffn, self.ffn_norm, update)
        everywhere = jnp.ones(x.shape[:2], bool)
        # The image bias is a backbone matter: drafts are text, wherever they stand.
        y, _ = self.ffn(x, ~everywhere, everywhere)
        return update_streams(streams, y, c), c.pre

    def _attend(self, x: jax.Array, ring: Packed, held: jax.Array, rope: RotaryTable) -> jax.Array:
        """Every position of the block sees the whole ring and the whole block, later positions included."""
        settings = self.settings
        queries, _ = self.attn.queries(x, rope)
        local = ring.map(lambda old, new: jnp.concatenate([old, new], axis=1), self.attn.window_entries(x, rope))
        seen = jnp.pad(held, ((0, 0), (0, x.shape[1])), constant_values=True)
        dtype = operand_dtype(x.dtype, settings.formats.window)
        values = jnp.where(seen[..., None], settings.formats.window.decode(local, dtype), 0)
        logits = einsum("bshd,bnd->bshn", queries.astype(dtype), values) * settings.text.head_dim**-0.5
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
        sink = self.attn.attn_sink
        top = jax.lax.stop_gradient(jnp.maximum(logits.max(axis=-1), sink - SINK_MARGIN))
        p = jnp.exp(logits - top[..., None])
        denominator = jnp.exp(sink - top) + p.sum(axis=-1)
        wide = jnp.promote_types(settings.dtype, dtype)
        heads = einsum("bshn,bnd->bshd", narrow(p, settings.dtype).astype(wide), values.astype(wide))
        heads = heads / denominator[..., None]
        return self.attn.output(narrow(heads, x.dtype), rope)


class Drafter(nn.Module):
    """The drafter's stages. Embedding and head are the backbone's; the caller hands over what they make."""

    settings: Settings

    def setup(self):
        count = self.settings.text.num_nextn_predict_layers
        self.stages = [DraftStage(self.settings, i == 0, i == count - 1) for i in range(count)]

    def entries(self, taps: jax.Array, positions: jax.Array) -> Packed:
        """Window entries of backbone positions.

        Args:
          taps: ``[targets, batch, query, d]``, see :class:`~dsv41.model.Decoded`.
          positions: int32 ``[batch, query]``.

        Returns:
          leaves ``[stages, batch, query, width']``.
        """
        main, rope = self.stages[0].main(taps), self._rope(positions)
        entries = [stage.entries(main, rope) for stage in self.stages]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries)

    def hidden(self, x: jax.Array, ring: Ring, start: jax.Array) -> jax.Array:
        """Passes a block of embeddings through all stages.

        Args:
          x: ``[batch, block, d]``, embeddings of the next token and of noise.
          ring: entries of committed positions.
          start: int32 ``[batch]``, position of the block's first token.

        Returns:
          ``[batch, block, d]``, before the norm.
        """
        rope = self._rope(start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32))
        streams = jnp.repeat(x[:, :, None], self.settings.text.hc_mult, axis=2)
        mix = first_mix(streams)
        for i, stage in enumerate(self.stages):
            entries = ring.entries.map(lambda leaf, i=i: leaf[i])
            streams, mix = stage(streams, mix, entries, ring.positions >= 0, rope)
        return mix_streams(streams, mix)

    def norm(self, x: jax.Array) -> jax.Array:
        """The norm before the backbone's head."""
        return self.stages[-1].norm(x)

    def markov(self, tokens: jax.Array) -> Bias:
        """What tokens int32 ``[...]`` add to the logits of their successors."""
        return self.stages[-1].markov_head(tokens)

    def confidence(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """Confidence logits ``[...]`` of hidden values ``[..., d]`` after tokens of this Markov embedding."""
        return self.stages[-1].confidence_head(x, embedding)

    def _rope(self, positions: jax.Array) -> RotaryTable:
        return rotary_table(positions, window_frequencies(self.settings.text))

    def declare_all(self) -> None:
        """Declares every parameter; for ``init`` under ``eval_shape``."""
        declare_parts(self)
