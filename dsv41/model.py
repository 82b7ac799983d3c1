"""DeepSeek-V4.1-Flash: a causal encoder whose outputs become the memory that the decoder attends to.

    tokens ──► embedding ──► C residual streams
                                  │  encoder, layers 0 … E−1: window attention, and CSA2 over the global entries
                                  │  of its KV sources; Engram adds hashed n-gram memory before some layers
                                  ▼
                  encoder outputs (streams + mix) ──► the decoder's global entries  (`project`)
                                  │  decoder, layers E … L−1: window attention, and CSA2 over those entries
                                  ▼
                         mix of streams ──► RMSNorm ──► head ──► logits

The split matters because every position must pass the encoder, but only positions whose logits or window entries
are wanted must pass the decoder: a prompt's decoder pass may be bounded to its last W tokens (replay).

Modules own parameters, requests own state: :meth:`Model.encode` and :meth:`Model.decode` read a
:class:`~dsv41.state.request.ModelState` and return what their tokens add to it; nothing is kept here.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from dsv41.layers.engram import Engram, EngramInputs, EngramRows, TableParameter
from dsv41.layers.flow import Flow, ForcedSelection, Step
from dsv41.layers.linear import RMSNorm, WideLinear, declare, declare_parts
from dsv41.layers.mhc import first_mix, mix_streams
from dsv41.layers.stack import Stack, StackOutputs, concatenate, join_outputs
from dsv41.numerics.ngram_hash import BLOCKED, hash_ids, lookback, ngram_hash
from dsv41.numerics.rotary import csa_frequencies, rotary_table, window_frequencies
from dsv41.settings import Settings
from dsv41.sharding.context import page_tables
from dsv41.sharding.split import Split
from dsv41.state.request import EncoderDelta, ModelState, Segment
from dsv41.state.ring import Ring, entries_at
from pallas_kernels.formats import Packed
from pallas_kernels.index_select import BlockSelection


@struct.dataclass
class TokenBatch:
    """The tokens of one step, padded to a common width.

    Attributes:
      tokens: int32 ``[batch, query]``; what stands beyond ``count`` is ignored.
      count: int32 ``[batch]``, live tokens of each row (0: an inactive slot).
      is_image: bool ``[batch, query]``, positions of image spans (markers included); None without pictures.
      embeddings: ``[batch, query, d]``, used instead of the embedding at image positions; None without pictures.
      documents: int32 ``[batch, query]``, for rows that hold several texts: the column at which the token's begins, a
        multiple of every compression ratio and of the tokens of a candidate block; −1 where there is none. Texts see
        nothing of each other, and positions count from their beginnings. The state must be empty, and the row whole.
        None: a row is one text, and goes on where the state ends.
    """

    tokens: jax.Array
    count: jax.Array
    is_image: jax.Array | None = None
    embeddings: jax.Array | None = None
    documents: jax.Array | None = None


class Decoded(NamedTuple):
    """What the decoder makes of a segment.

    Attributes:
      hidden: ``[batch, query, d]``, normalised, input of the head.
      taps: ``[target layers, batch, query, d]``, what DSpark reads.
      entries: window entries, leaves ``[decoder layers, batch, query, width']``.
    """

    hidden: jax.Array
    taps: jax.Array
    entries: Packed


@struct.dataclass
class Begun:
    """An encoder pass up to its first Engram (to the encoder's end if it has none).

    Attributes:
      segment: the tokens' positions, with the embeddings of this device's columns as streams.
      flow: what enters the next layer.
      outputs: of the layers that ran.
      ids: compressed ids ``[batch, query]``.
    """

    segment: Segment
    flow: Flow
    outputs: StackOutputs
    ids: jax.Array


class Embedding(nn.Module):
    """Token embeddings ``[vocab, d]``."""

    settings: Settings

    def setup(self):
        text = self.settings.text
        self.weight = declare(
            self, "weight", (text.vocab_size, text.hidden_size), self.settings.dtype, ("vocab", "embed")
        )

    def __call__(self, tokens: jax.Array, valid: jax.Array) -> jax.Array:
        """``[batch, query]`` to ``[batch, query, d]``; zeros where not ``valid``, whatever the token there."""
        rows = self.settings.parallel.rows(self.weight, jnp.where(valid, tokens, 0), "vocab")
        return jnp.where(valid[..., None], rows, 0)


class Model(nn.Module):
    """The text model. Parameters under the names of the public checkpoint, stacked along loops.

    The collection ``constants`` holds ``token_map`` int32 ``[vocab]``: token ids to compressed ids (Engram).
    """

    settings: Settings

    def setup(self):
        settings, text, table = self.settings, self.settings.text, self.settings.table
        self.embed = Embedding(settings)
        self.encoder = Stack(settings, table.encoder, appends=True)
        self.decoder = Stack(settings, table.decoder, appends=False)
        self.engram = {str(layer): Engram(settings) for layer in text.engram_layer_ids}
        if settings.engram_in_step:
            self.engram_table = {
                str(layer): TableParameter(settings, rows)
                for layer, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True)
            }
        self.norm = RMSNorm(settings, text.hidden_size, "embed")
        self.head = WideLinear(settings, text.vocab_size, text.hidden_size, ("vocab", "embed"))
        self.token_map = self.variable("constants", "token_map", jnp.zeros, (text.vocab_size,), jnp.int32)

    def encode(
        self,
        state: ModelState,
        batch: TokenBatch,
        write_from: jax.Array | None = None,
        forced: ForcedSelection | None = None,
        engram_rows: EngramRows | None = None,
    ) -> tuple[Segment, EncoderDelta]:
        """Passes tokens through the encoder and projects its outputs into the decoder's global memory.

        Args:
          write_from: int32 ``[batch]``, positions below it have their global entries already (an encoder replay
            over a prefix hit); a multiple of every ratio. None: none has.
          engram_rows: what the encoder's Engrams look up; None where the tables are parameters.

        Returns:
          the encoder outputs, and what the pass adds to the state.
        """
        begun = self.begin(state, batch, write_from, forced)
        return self.finish(state, begun, write_from, forced, engram_rows)

    def begin(
        self,
        state: ModelState,
        batch: TokenBatch,
        write_from: jax.Array | None = None,
        forced: ForcedSelection | None = None,
    ) -> Begun:
        """The part of :meth:`encode` that needs no Engram rows yet."""
        queries = batch.tokens.shape[1]
        split = split_of(self.settings, queries)
        valid = jnp.arange(queries) < batch.count[:, None]
        if batch.documents is not None:
            valid &= batch.documents >= 0
        is_image = jnp.zeros_like(valid) if batch.is_image is None else batch.is_image & valid
        ids = jnp.where(valid & ~is_image, self.token_map.value[jnp.where(valid, batch.tokens, 0)], -1)
        seen = lookback(ids, state.ngram_tail)
        reach = None
        if batch.documents is not None:
            position = jnp.arange(queries, dtype=jnp.int32) - batch.documents
            seen = jnp.where(jnp.arange(seen.shape[-1]) <= position[..., None], seen, BLOCKED)
            reach = jnp.minimum(position + 1, self.settings.text.sliding_window)

        x = self.embed(*split.own((batch.tokens, valid)))
        if batch.embeddings is not None:
            image, embeddings = split.own((is_image, batch.embeddings))
            x = jnp.where(image[..., None], embeddings.astype(x.dtype), x)
        streams = jnp.repeat(x[:, :, None], self.settings.text.hc_mult, axis=2)
        segment = Segment(
            streams, first_mix(streams), is_image, seen, state.length, batch.count, batch.documents, reach
        )

        step, ring = begin_step(self.settings, state, state.encoder_ring, segment, None, write_from, forced)
        flow = first_flow(self.settings, state, segment)
        flow, outputs = self.encoder(flow, ring, step, last=self.encoder.before_engram)
        return Begun(segment, flow, outputs, ids)

    def finish(
        self,
        state: ModelState,
        begun: Begun,
        write_from: jax.Array | None = None,
        forced: ForcedSelection | None = None,
        engram_rows: EngramRows | None = None,
    ) -> tuple[Segment, EncoderDelta]:
        """The rest of :meth:`encode`; ``state``, ``write_from`` and ``forced`` as :meth:`begin` had them."""
        segment = begun.segment
        engram = self._own_engram(self.encoder.engram_layers, segment, engram_rows)
        step, ring = begin_step(self.settings, state, state.encoder_ring, segment, engram, write_from, forced)
        flow, outputs = self.encoder(begun.flow, ring, step, first=self.encoder.before_engram)
        outputs = join_outputs(begun.outputs, outputs)
        flow, projections = self._project(flow, outputs.projections, step)
        streams, mix = step.split.whole((flow.streams, flow.mix))
        segment = segment.replace(streams=streams, mix=mix)
        return segment, EncoderDelta(flow.memory, outputs.entries, projections, begun.ids)

    def decode(
        self,
        state: ModelState,
        segment: Segment,
        forced: ForcedSelection | None = None,
        engram_rows: EngramRows | None = None,
    ) -> Decoded:
        """Passes encoder outputs, whose global entries are in the memory, through the decoder.

        Args:
          engram_rows: what the decoder's Engrams look up; None where the tables are parameters.
        """
        engram = self._own_engram(self.decoder.engram_layers, segment, engram_rows)
        step, ring = begin_step(self.settings, state, state.decoder_ring, segment, engram, forced=forced)
        streams, mix = step.split.own((segment.streams, segment.mix))
        flow = first_flow(self.settings, state, segment.replace(streams=streams, mix=mix))
        flow, outputs = self.decoder(flow, ring, step)
        x = mix_streams(flow.streams, flow.mix)
        self.sow("intermediates", "final_collapsed", x)
        return Decoded(step.split.whole(self.norm(x)), step.split.whole(flow.taps, axis=2), outputs.entries)

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """Embeddings ``[..., d]`` of tokens int32 ``[...]``, all of them in the vocabulary."""
        return self.embed(tokens, jnp.ones(tokens.shape, bool))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[..., d]`` to ``[..., vocab]`` float32."""
        return self.settings.parallel.gather(self.local_logits(hidden), "vocab", axis=-1)

    def local_logits(self, hidden: jax.Array) -> jax.Array:
        """Of :meth:`logits` this device's part of the vocabulary."""
        return self.head(hidden)

    def _project(self, flow: Flow, projections: dict, step: Step) -> tuple[Flow, dict]:
        """Writes the decoder's global entries of the encoder outputs in ``flow`` (mixed and normed by its source)."""
        if not self.decoder.layers:
            return flow, projections
        source = self.settings.table.layers[self.settings.table.decoder_start]
        inputs = jax.tree.map(lambda leaf: leaf[0], self.decoder.inputs(ring=step.start[None]))
        flow, new = self.decoder.source.write_memory(flow, inputs, step)
        if new is not None:
            ratio, new = source.kind.ratio, jax.tree.map(lambda leaf: leaf[None], new)
            before = projections.get(ratio)
            projections = {**projections, ratio: new if before is None else concatenate(before, new)}
        return flow, projections

    def _own_engram(self, layers: tuple[int, ...], segment: Segment, rows: EngramRows | None) -> EngramInputs | None:
        """:meth:`engram_inputs` of this device's columns of a segment, with all columns' rows if any are given."""
        split = split_of(self.settings, segment.is_image.shape[1])
        return self.engram_inputs(layers, *split.own((segment.lookback, rows)), split.places)

    def engram_inputs(
        self, layers: tuple[int, ...], seen: jax.Array, rows: EngramRows | None = None, split: tuple[str, ...] = ()
    ) -> EngramInputs | None:
        """Keys and values of some Engram layers, stacked (None for none); addresses depend on tokens only.

        Args:
          seen: compressed ids that each position looks back on, int32 ``[batch, query, max n-gram]``.
          rows: what they look up there; None: they are looked up here, in the parameters.
          split: mesh axes that divide the queries.

        Raises:
          ValueError: the rows of a layer are not given, and its table is no parameter.
        """
        text = self.settings.text
        if not layers:
            return None
        if rows is None and self.settings.engram_in_step:
            ids = hash_ids(ngram_hash(text), seen, self.token_map.value[text.engram_pad_token_id])
            rows = {n: self.engram_table[str(n)](ids[text.engram_layer_ids.index(n)], split) for n in layers}
        if missing := [n for n in layers if n not in (rows or {})]:
            raise ValueError(f"engram_rows: layers {missing} are not given, and their tables are no parameters")
        inputs = [self.engram[str(n)](rows[n]) for n in layers]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs)

    def declare_all(self) -> None:
        """Declares every parameter; for ``init`` under ``eval_shape``."""
        declare_parts(self)


def split_of(settings: Settings, queries: int) -> Split:
    """Which columns of a step of so many a device computes."""
    return Split.of(settings.parallel, queries, settings.text.sliding_window)


def begin_step(
    settings: Settings,
    state: ModelState,
    ring: Ring,
    segment: Segment,
    engram: EngramInputs | None,
    write_from: jax.Array | None = None,
    forced: ForcedSelection | None = None,
) -> tuple[Step, Packed]:
    """What all layers of a stack share in one step, and their window entries."""
    columns = segment.start[:, None] + jnp.arange(segment.is_image.shape[1], dtype=jnp.int32)
    valid = columns < (segment.start + segment.count)[:, None]
    positions = columns
    if segment.documents is not None:
        valid &= segment.documents >= 0
        positions = columns - segment.documents
    pages = next((pool.main.payload.shape[1] for pool in state.memory.values()), 0)
    page_table, read_table = page_tables(settings.parallel, state.page_table, pages)
    window, queries = ring.positions.shape[1], positions.shape[1]
    places = jnp.arange(window + queries, dtype=jnp.int32)
    order = None
    if queries <= window:
        order = (places - (segment.start - window)[:, None]) % (window + queries)
        entries, held = entries_at(ring, segment.start[:, None] - window + order)
        offset = order - window
        local_valid = held | ((offset >= 0) & jnp.take_along_axis(valid, jnp.maximum(offset, 0), axis=1))
    else:
        entries, held = entries_at(ring, segment.start[:, None] - window + places[:window])
        local_valid = jnp.concatenate([held, valid], axis=1)
    split = split_of(settings, queries)
    own = split.own(positions)
    step = Step(
        split=split,
        start=segment.start,
        count=segment.count,
        columns=columns,
        positions=positions,
        valid=valid,
        documents=segment.documents,
        reach=segment.reach,
        write_from=jnp.zeros_like(segment.start) if write_from is None else write_from,
        page_table=page_table,
        read_table=read_table,
        local_valid=local_valid,
        order=order,
        is_image=split.own(segment.is_image),
        rope_window=rotary_table(own, window_frequencies(settings.text)),
        rope_csa=rotary_table(own, csa_frequencies(settings.text)),
        tails=state.tails,
        engram=engram,
        forced=forced,
    )
    return step, entries


def first_flow(settings: Settings, state: ModelState, segment: Segment) -> Flow:
    """The flow before the first layer of a stack: nothing selected, nothing tapped.

    The segment's streams and mix are of this device's columns.
    """
    text, table = settings.text, settings.table
    batch, queries = segment.is_image.shape
    blocks = 0
    if text.candidate_source_layer_id is not None:
        ratio = table.layers[text.candidate_source_layer_id].kind.ratio
        entries = state.page_table.shape[1] * settings.page_entries(ratio)
        blocks = BlockSelection(text.candidate_block_size, text.candidate_topk_blocks).chosen(entries)
    return Flow(
        streams=segment.streams,
        mix=segment.mix,
        memory=state.memory,
        selection=jnp.full((batch, queries, text.index_topk), -1, jnp.int32),
        blocks=jnp.full((batch, queries, blocks), -1, jnp.int32),
        taps=jnp.zeros(
            (len(text.dspark_target_layer_ids), batch, segment.streams.shape[1], text.hidden_size), settings.dtype
        ),
    )
