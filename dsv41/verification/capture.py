"""Running the model on golden inputs with every layer's intermediate values taken out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.layer_table import locate, stack_plan
from dsv41.layers.flow import ForcedSelection
from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.state.memory import source_view
from dsv41.state.request import ModelState, Segment, commit_decoder, commit_encoder, forget_decoder
from pallas_kernels.formats import Format, Packed
from pallas_kernels.index_select import BlockSelection
from pallas_kernels.paged_memory import gather

Layers = dict[int, dict[str, np.ndarray]]
"""Captured values by layer and name, each ``[batch, query, …]``."""


@functools.partial(jax.jit, static_argnums=0)
def captured_forward(
    model: Model, variables: Mapping, state: ModelState, batch: TokenBatch, forced: ForcedSelection | None
) -> tuple[ModelState, jax.Array, jax.Array, jax.Array, tuple]:
    """All layers on one chunk: state, logits and hidden of every position, taps, and the captured values."""
    (segment, delta), encoder = model.apply(
        variables, state, batch, None, forced, method="encode", mutable=["intermediates"]
    )
    state = commit_encoder(state, delta, batch.count)
    decoded, decoder = model.apply(variables, state, segment, forced, method="decode", mutable=["intermediates"])
    state = commit_decoder(state, decoded.entries, segment.start, segment.count)
    logits = model.apply(variables, decoded.hidden, method="logits")
    return state, logits, decoded.hidden, decoded.taps, (encoder, decoder)


@functools.partial(jax.jit, static_argnums=0)
def replayed_logits(model: Model, variables: Mapping, state: ModelState, tail: Segment) -> tuple[ModelState, jax.Array]:
    """Decoder replay of an encoder tail with the logits ``[batch, query, vocab]`` of all its positions."""
    state = forget_decoder(state)
    decoded = model.apply(variables, state, tail, method="decode")
    state = commit_decoder(state, decoded.entries, tail.start, tail.count)
    return state, model.apply(variables, decoded.hidden, method="logits")


def by_layer(settings: Settings, captured: tuple) -> Layers:
    """Sorts captured values out of the loops' stacked axes."""
    # On the host first: taken apart on the device, every value of every layer would be an operation of its own.
    captured = jax.device_get(captured)
    layers: Layers = {}
    for name, rows, captures in (
        ("encoder", settings.table.encoder, captured[0]),
        ("decoder", settings.table.decoder, captured[1]),
    ):
        plan = stack_plan(rows)
        tree = captures.get("intermediates", {}).get(name, {})
        for row in rows:
            address = locate(plan, row.index)
            run = tree[f"groups_{address.group}"][f"runs_{address.run}"]
            layers[row.index] = {
                [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]: leaf[address.index]
                for path, leaf in jax.tree_util.tree_flatten_with_path(run)[0]
            }
    return layers


@dataclasses.dataclass
class Capture:
    """A chunk's results on the host, live positions of live rows only.

    Attributes:
      logits: ``[batch, query, vocab]``; hidden: ``[batch, query, d]``; taps: ``[batch, query, targets · d]``.
      layers: see :data:`Layers`.
    """

    logits: np.ndarray
    hidden: np.ndarray
    taps: np.ndarray
    layers: Layers


def run_chunk(
    model: Model,
    variables: Mapping,
    state: ModelState,
    tokens: np.ndarray,
    width: int,
    entries: Mapping[int, np.ndarray] | None = None,
    candidates: np.ndarray | None = None,
    is_image: np.ndarray | None = None,
    embeddings: np.ndarray | None = None,
) -> tuple[ModelState, Capture]:
    """Runs tokens ``[rows, query]`` (rows and width padded to the state's batch and ``width``) through all layers.

    Args:
      entries, candidates: selections to force, see :func:`forced_selection`.
      is_image, embeddings: image positions of the tokens and what stands there.
    """
    slots, (rows, queries) = state.length.shape[0], tokens.shape
    pad = ((0, slots - rows), (0, width - queries))

    def padded(x: np.ndarray) -> np.ndarray:
        return np.pad(x, pad + ((0, 0),) * (x.ndim - 2))

    batch = TokenBatch(
        tokens=padded(tokens.astype(np.int32)),
        count=np.where(np.arange(slots) < rows, queries, 0).astype(np.int32),
        is_image=padded(np.zeros(tokens.shape, bool) if is_image is None else is_image),
        embeddings=padded(
            np.zeros((*tokens.shape, model.settings.text.hidden_size), np.float32) if embeddings is None else embeddings
        ),
    )
    forced = forced_selection(
        model.settings, entries or {}, candidates, slots, width, pool_width(model.settings, state)
    )
    state, logits, hidden, taps, captured = captured_forward(model, variables, state, batch, forced)

    def live(x: jax.Array | np.ndarray) -> np.ndarray:
        x = np.asarray(x)[:rows, :queries]
        return x.astype(np.float32) if x.dtype.name == "bfloat16" else x

    layers = {
        layer: {name: live(value) for name, value in values.items()}
        for layer, values in by_layer(model.settings, captured).items()
    }
    taps = np.moveaxis(np.asarray(taps)[:, :rows, :queries].astype(np.float32), 0, 2)
    return state, Capture(live(logits), live(hidden), taps.reshape(*taps.shape[:2], -1), layers)


def forced_selection(
    settings: Settings,
    entries: Mapping[int, np.ndarray],
    candidates: np.ndarray | None,
    slots: int,
    width: int,
    blocks: int,
) -> ForcedSelection:
    """Golden selections as the model takes them; inactive, and all −1, without any.

    Args:
      entries: by index source, int ``[rows, query, top_k]``, −1 = none; empty for no forcing.
      candidates: bool ``[rows, query, entries]``, the pool's members; None without a pool.
      slots, width: the padded batch and query axes.
      blocks: candidate blocks that the model carries.
    """
    top_k, size = settings.text.index_topk, settings.text.candidate_block_size
    sources = settings.table.index_sources
    stacked = np.full((len(sources), slots, width, top_k), -1, np.int32)
    for i, source in enumerate(sources):
        if source in entries:
            rows, queries, count = entries[source].shape
            stacked[i, :rows, :queries, :count] = entries[source]
    chosen = np.full((slots, width, blocks), -1, np.int32)
    if candidates is not None and entries:
        rows, queries, count = candidates.shape
        padded = np.pad(candidates, ((0, 0), (0, 0), (0, -count % size)))
        member = padded.reshape(rows, queries, -1, size).any(-1)
        ids = np.where(member, np.arange(member.shape[-1]), np.iinfo(np.int32).max)
        ids = np.sort(ids, axis=-1)[..., :blocks]
        chosen[:rows, :queries, : ids.shape[-1]] = np.where(ids == np.iinfo(np.int32).max, -1, ids)
    return ForcedSelection(stacked, chosen, np.asarray(bool(entries)))


def pool_width(settings: Settings, state: ModelState) -> int:
    """Candidate blocks that the model carries with this state; 0 without a pool."""
    text = settings.text
    if text.candidate_source_layer_id is None:
        return 0
    ratio = settings.table.layers[text.candidate_source_layer_id].kind.ratio
    selection = BlockSelection(text.candidate_block_size, text.candidate_topk_blocks)
    return selection.chosen(state.page_table.shape[1] * settings.page_entries(ratio))


def memory_of(settings: Settings, state: ModelState, source: int, part: str, rows: int, entries: int) -> np.ndarray:
    """Entries 0 … entries − 1 of a KV source, decoded: ``[rows, entries, width]`` float32; part "main" or "index"."""
    ratio = settings.table.layers[source].kind.ratio
    fmt = settings.formats.main_kv if part == "main" else settings.formats.index_keys
    pool = getattr(state.memory[ratio], part)
    return np.asarray(_entries(fmt, pool, state.page_table, settings.table.source_slot(source)))[:rows, :entries]


@functools.partial(jax.jit, static_argnums=0)
def _entries(fmt: Format, pool: Packed, page_table: jax.Array, slot: jax.Array) -> jax.Array:
    """All entries that requests have room for, decoded: one program for every length."""
    pool, table = source_view(pool, page_table, slot)
    index = jnp.arange(page_table.shape[1] * pool.payload.shape[1], dtype=jnp.int32)
    return gather(pool, fmt, table, jnp.broadcast_to(index, (page_table.shape[0], *index.shape)))


def ring_of(settings: Settings, state: ModelState, layer: int, rows: int) -> np.ndarray:
    """A layer's window ring in slot order, decoded: ``[rows, W, head_dim]`` float32."""
    start = settings.table.decoder_start
    ring = state.encoder_ring if layer < start else state.decoder_ring
    entries = ring.entries.map(lambda leaf: np.asarray(leaf)[layer - start if layer >= start else layer])
    return np.asarray(decoded(settings.formats.window, entries))[:rows]


@functools.partial(jax.jit, static_argnums=0)
def decoded(fmt: Format, entries: Packed) -> jax.Array:
    """Values of packed entries, as one program."""
    return fmt.decode(entries)


def tail_of(settings: Settings, state: ModelState, source: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A source's compressor tail, kv and gate, each ``[rows, ratio − 1, head_dim]``."""
    tails = state.tails[settings.table.layers[source].kind.ratio]
    slot = settings.table.source_slot(source)
    return np.asarray(tails.kv)[slot, :rows], np.asarray(tails.gate)[slot, :rows]
