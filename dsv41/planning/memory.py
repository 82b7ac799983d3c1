"""Bytes that one device holds: parameters, the state of its requests, and an estimate of a step's temporaries."""

from __future__ import annotations

from dsv41.planning.parameters import Held
from dsv41.planning.spread import Columns, Spread
from dsv41.planning.steps import Step
from dsv41.settings import Settings
from dsv41.sharding.chips import Chip
from dsv41.sharding.exchange import capacity
from dsv41.sharding.experts import dispatch
from pallas_kernels.formats import FP8_E8M0, DenseFormat
from pallas_kernels.tiling import TEMPORARY_BYTES

_INT, _FLOAT = 4, 4
# Operations that keep one large temporary each at a time; the index selection keeps three.
_TEMPORARIES = 3
# What enters a sub-layer, what leaves it, and one between.
_STREAM_COPIES = 3


def parameter_bytes(settings: Settings, held: tuple[Held, ...], drafter: bool) -> dict[str, int]:
    """Parameters of one device by part, and the token map that every device has."""
    parts = dict.fromkeys(("routed experts", "Engram tables", "other layers", "embedding and head"), 0)
    if drafter:
        parts["drafter"] = 0
    for part in held:
        if part.parameter.drafter and not drafter:
            continue
        parts[_part(part)] += part.nbytes
    return parts | {"token map": settings.text.vocab_size * _INT}


def _part(held: Held) -> str:
    parameter = held.parameter
    if parameter.drafter:
        return "drafter"
    if parameter.routed:
        return "routed experts"
    if parameter.module == "engram.embed":
        return "Engram tables"
    return "embedding and head" if parameter.module in ("embed", "head") else "other layers"


def state_bytes(settings: Settings, requests: int, tokens: int, split: int = 1) -> dict[str, int]:
    """The state of some requests of ``tokens`` tokens each, by the parts of ``dsv41.state.sizes.state_bytes``.

    Args:
      split: devices that a request's pages are spread over; all else of it is on each.
    """
    text, table = settings.text, settings.table
    pages = -(-tokens // settings.page_tokens)
    held = -(-requests * pages // split)
    entries = sum(settings.page_entries(table.layers[source].kind.ratio) for source in table.kv_sources)
    tail = sum(max(table.layers[source].kind.ratio - 1, 0) for source in table.kv_sources)
    return {
        "global memory": held * entries * global_entry_bytes(settings),
        "page table": requests * pages * _INT,
        "encoder rings": _ring_bytes(settings, len(table.encoder), requests),
        "decoder rings": _ring_bytes(settings, len(table.decoder), requests),
        "compressor tails": tail * requests * 2 * text.head_dim * _FLOAT,
        "n-gram tail": requests * (text.engram_max_ngram_size - 1) * _INT,
        "length": requests * _INT,
    }


def global_entry_bytes(settings: Settings) -> int:
    """One global entry with its index key."""
    # As dsv41.state.memory counts it, without importing Flax: half of the time that a plan takes.
    text, formats = settings.text, settings.formats
    return formats.main_kv.entry_bytes(text.head_dim) + formats.index_keys.entry_bytes(text.index_head_dim)


def token_bytes(settings: Settings) -> float:
    """Global memory that one token takes over all sources."""
    table = settings.table
    return sum(global_entry_bytes(settings) / table.layers[source].kind.ratio for source in table.kv_sources)


def drafter_ring_bytes(settings: Settings, requests: int) -> int:
    """The drafter's rings of some requests."""
    return _ring_bytes(settings, settings.text.num_nextn_predict_layers, requests)


def encoder_tail_bytes(settings: Settings, requests: int) -> int:
    """The last encoder outputs that requests keep until the decoder has replayed them."""
    text = settings.text
    position = text.hc_mult * (text.hidden_size * settings.dtype.itemsize + _FLOAT)
    position += 1 + text.engram_max_ngram_size * _INT
    return requests * (text.sliding_window * position + 2 * _INT)


def _ring_bytes(settings: Settings, layers: int, requests: int) -> int:
    text = settings.text
    entry = settings.formats.window.entry_bytes(text.head_dim)
    return requests * text.sliding_window * (layers * entry + _INT)


def engram_layers(settings: Settings, step: Step) -> int:
    """Engram layers that a step passes."""
    return len({layer.index for layer in step.layers(settings.table)} & set(settings.text.engram_layer_ids))


def engram_row_bytes(settings: Settings) -> int:
    """What one token looks up in one table, as stored."""
    stored = FP8_E8M0 if settings.packed_weights else DenseFormat(settings.dtype.name)
    return settings.text.engram_columns * stored.entry_bytes(settings.text.engram_head_dim)


def temporary_bytes(settings: Settings, spread: Spread, step: Step, requests: int, context: int, chip: Chip) -> int:
    """Estimate of what a step holds besides its arguments and results.

    Args:
      context: tokens that each request has pages for.

    Streams around a sub-layer, the wide values inside one (queries and heads, or rows of other devices with their sums
    and inner values), Engram's rows, window entries put in order before the layers and the new ones after them, logits,
    and what single operations tile to. At the end of a split chunk its streams are gathered.
    """
    text, size, layers = settings.text, settings.dtype.itemsize, step.layers(settings.table)
    tokens, parts, _ = Columns.of(spread, requests, step.queries, text.sliding_window)
    stream = tokens * text.hc_mult * text.hidden_size * size
    engram = engram_layers(settings, step) * tokens * engram_row_bytes(settings)
    entry = settings.formats.window.entry_bytes(text.head_dim)
    entries = len(layers) * requests * (text.sliding_window + 2 * step.queries) * entry
    logits = 2 * step.logits * requests * text.vocab_size // spread.vocab * _FLOAT
    attention = _attention_bytes(settings, spread, tokens, parts)
    inside = _STREAM_COPIES * stream + max(attention, _expert_bytes(settings, spread, tokens), engram)
    streams = max(inside, (1 + parts) * stream if parts > 1 and step.encoder else 0)
    relaid = _relaid_bytes(settings, chip, -(-requests * context // spread.pages))
    return streams + entries + logits + relaid + _TEMPORARIES * TEMPORARY_BYTES


def _attention_bytes(settings: Settings, spread: Spread, tokens: int, parts: int) -> int:
    """Queries and heads' outputs; where pages are divided, those of all columns, with sums in float32 to be joined."""
    text, size = settings.text, settings.dtype.itemsize
    values = tokens * text.num_attention_heads * text.head_dim // spread.heads
    if spread.pages == 1:
        return 2 * values * size
    return values * (size + _FLOAT) + parts * values * (size + 2 * _FLOAT)


def _relaid_bytes(settings: Settings, chip: Chip, tokens: int) -> int:
    """Index keys and their scales, laid out anew with rows of whole lanes for the kernels that scan them."""
    table = settings.table
    return sum(2 * chip.lanes * tokens // table.layers[source].kind.ratio for source in table.kv_sources)


def _expert_bytes(settings: Settings, spread: Spread, tokens: int) -> int:
    """Rows that a device's experts are given with their sums, and the room for every choice that could be theirs: its
    row, its inner value and its result, which is added up in float32."""
    text, size, parts = settings.text, settings.dtype.itemsize, spread.dispatch
    chosen, rows = text.num_experts_per_tok, tokens
    if parts > 1:
        gathers = dispatch(spread.preset.sizes, tokens, chosen, text.hidden_size, size) == "gather"
        rows = parts * (tokens if gathers else capacity(tokens, parts, chosen))
    choices = rows * min(chosen, text.n_routed_experts // spread.experts)
    wide, inner = text.hidden_size, text.moe_intermediate_size // spread.inner
    return rows * wide * (size + _FLOAT) + choices * (wide * (2 * size + _FLOAT) + 2 * inner * size)
