"""The training pass: the model's own encoder and decoder over whole rows of packed texts.

Nothing here computes a layer. A row begins with an empty state, its global entries go through pages as in inference,
and :class:`~dsv41.model.TokenBatch` tells the model where texts begin, so that neither windows, nor entries, nor
compression groups, nor n-grams reach from one into another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.sharding.requests import context_shards
from dsv41.sharding.rules import MeshError
from dsv41.state.request import ModelState, create_state

Variables = Mapping

Statistics = Mapping
"""What modules sow for losses and biases, by stack ("encoder", "decoder") and then as parameters are nested."""


@struct.dataclass
class TrainBatch:
    """Rows of packed texts.

    Attributes:
      tokens: int32 ``[rows, length]``; 0 at padding.
      targets: int32 ``[rows, length]``, the next token of the same text; −1: no loss here.
      documents: int32 ``[rows, length]``, see :class:`~dsv41.model.TokenBatch`; −1 at padding.
      is_image: bool ``[rows, length]``; embeddings: ``[rows, length, d]``: pictures, None without.
    """

    tokens: jax.Array
    targets: jax.Array
    documents: jax.Array
    is_image: jax.Array | None = None
    embeddings: jax.Array | None = None


class Outputs(NamedTuple):
    """What losses are computed from.

    Attributes:
      hidden: ``[rows, length, d]``, normalised, input of the head.
      taps: ``[target layers, rows, length, d]``, what DSpark reads.
      statistics: see :data:`Statistics`.
    """

    hidden: jax.Array
    taps: jax.Array
    statistics: Statistics


def alignment(settings: Settings) -> int:
    """Columns of which texts must begin at multiples: whole compression groups and whole candidate blocks."""
    text, columns = settings.text, [1, *settings.table.ratios]
    if text.candidate_source_layer_id is not None:
        columns.append(text.candidate_block_size * settings.table.layers[text.candidate_source_layer_id].kind.ratio)
    return math.lcm(*columns)


def forward(
    model: Model, variables: Variables, batch: TrainBatch, cut: jax.Array | None = None, collect: tuple[str, ...] = ()
) -> Outputs:
    """Passes rows through all layers.

    Args:
      cut: int32 ``[rows]``, a column of each row from which the decoder's windows are cut, as those of a replay that
        begins there; the length of the row, or None, cuts nothing.
      collect: collections that modules sow into, as "statistics".
    """
    state = _row_state(model.settings, *batch.tokens.shape)
    count = jnp.full(batch.tokens.shape[:1], batch.tokens.shape[1], jnp.int32)
    tokens = TokenBatch(batch.tokens, count, batch.is_image, batch.embeddings, batch.documents)
    (segment, delta), encoder = model.apply(variables, state, tokens, method="encode", mutable=list(collect))
    if cut is not None:
        since = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32) - cut[:, None]
        segment = segment.replace(reach=jnp.where(since >= 0, jnp.minimum(segment.reach, since + 1), segment.reach))
    state = state.replace(memory=delta.memory)
    decoded, decoder = model.apply(variables, state, segment, method="decode", mutable=list(collect))
    return Outputs(
        decoded.hidden, decoded.taps, {name: encoder.get(name, {}) | decoder.get(name, {}) for name in collect}
    )


def _row_state(settings: Settings, rows: int, length: int) -> ModelState:
    """An empty state in which each row has its own pages, made inside a step.

    Raises:
      MeshError: the mesh divides the context: a row of training lies on one device.
    """
    if (shards := context_shards(settings.parallel)) > 1:
        raise MeshError(f"context: {shards} shards; training needs rows undivided, a context axis of 1")
    pages = -(-length // settings.page_tokens)
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    return create_state(settings, rows, rows * pages, pages).replace(page_table=table)
