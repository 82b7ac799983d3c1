"""What one device moves, computes and sends in a step, item by item.

Moved and computed is the least that the algorithm asks for; sent is what the steps send.

Weights are read once, of the experts those that so many tokens choose if they choose evenly. Of the history each
request reads the index keys that a selecting layer looks at, its windows, and the chosen entries, once for each query
but no more than there are. Streams are read and written once at each sub-layer, whose input and output they become.

On a mesh, requests and pages lie as the rules say and everything else is replicated: devices that share a request's
tokens repeat what is not split. Index queries of all heads are gathered, and a device scans its own pages with them.
Columns of a long chunk are split over the context (:mod:`dsv41.sharding.split`): a device has its own in all but the
attention to pages, which it does for all columns, window included.
Values and sums cross in the activation dtype; the experts' sums and what softmax and head make, as float32.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv41.layer_table import Mode
from dsv41.planning.memory import engram_layers, engram_row_bytes, global_entry_bytes
from dsv41.planning.parameters import Held
from dsv41.planning.spread import Columns, Spread, all_gather, all_reduce, exchange
from dsv41.planning.steps import Step
from dsv41.settings import Settings
from dsv41.sharding.exchange import share
from dsv41.sharding.experts import dispatch

_FLOAT = 4
# What goes with a candidate that crosses devices, and with a token that goes to an expert: a number and a weight.
_CANDIDATE = _CHOICE = 8
_NUMBER = 4


class Work(NamedTuple):
    """Bytes moved in the device's memory, operations of products, bytes sent and received."""

    moved: float = 0.0
    operations: float = 0.0
    links: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Dispatch(NamedTuple):
    """How tokens reach their experts, and the link bytes of this way and of the other."""

    way: str
    links: dict[str, float]


class Ledger(NamedTuple):
    """The items of a step, and how its tokens reach their experts."""

    items: dict[str, Work]
    dispatch: Dispatch

    @property
    def total(self) -> Work:
        return sum(self.items.values(), Work())


def step_ledger(settings: Settings, held: tuple[Held, ...], spread: Spread, step: Step, requests: int) -> Ledger:
    """The ledger of one device.

    Args:
      held: the device's parameters.
      requests: of this device.
    """
    backbone = [part for part in held if not part.parameter.drafter and _runs(settings, step, part)]
    columns = Columns.of(spread, requests, step.queries, settings.text.sliding_window)
    experts, way = _experts(settings, backbone, spread, step, columns)
    items = {
        "experts": experts,
        "dense weights": _dense(settings, backbone, spread, step, columns),
        "index keys": _index(settings, spread, step, requests, columns),
        "selected entries": _selected(settings, spread, step, requests, columns),
        "rings": _rings(settings, spread, step, requests, columns),
        "streams": _streams(settings, step, columns),
        "Engram": _engram(settings, backbone, spread, step, columns),
        "embedding and head": _ends(settings, backbone, spread, step, requests, columns),
        "new entries": _written(settings, spread, step, requests, columns),
    }
    if step.drafts:
        drafter = [part for part in held if part.parameter.drafter]
        head = next(part for part in backbone if part.parameter.module == "head")
        items["drafter"] = _drafter(settings, drafter, head, spread, requests)
    return Ledger(items, way)


def _runs(settings: Settings, step: Step, held: Held) -> bool:
    """Whether a step reads a parameter of the backbone."""
    layer, module, start = held.parameter.layer, held.parameter.module, settings.table.decoder_start
    if layer is None:
        return step.encoder if module == "embed" else step.decoder
    if layer < start:
        return step.encoder
    appends = module.startswith("attn.compressor") or module in ("attn.indexer.wk", "attn.indexer.k_norm")
    if layer == start and appends:
        return step.encoder
    return step.decoder or (layer == start and module == "attn_norm")


def _products(parts: list[Held], spread: Spread, tokens: int) -> float:
    """Operations of these matrices with all tokens that reach the device's part of them."""
    return sum(2 * tokens * spread.gathered(part.parameter.axes) * part.matrix for part in parts)


def _experts(
    settings: Settings, parts: list[Held], spread: Spread, step: Step, columns: Columns
) -> tuple[Work, Dispatch]:
    text, layers = settings.text, len(step.layers(settings.table))
    routed = [part for part in parts if part.parameter.routed]
    tokens = columns.tokens
    chosen, count = text.num_experts_per_tok, text.n_routed_experts
    moved = sum(part.nbytes for part in routed) * touched(chosen, count, tokens * spread.dispatch)
    operations = _products(routed, spread, tokens) * chosen / count
    way, links = _dispatch(settings, spread, tokens, chosen)
    return Work(moved, operations, layers * links[way]), Dispatch(way, {name: layers * n for name, n in links.items()})


def _dispatch(settings: Settings, spread: Spread, tokens: int, chosen: int) -> tuple[str, dict[str, float]]:
    """How a layer's tokens reach their experts, and link bytes of each way (:mod:`dsv41.sharding.experts`)."""
    size, width = settings.dtype.itemsize, settings.text.hidden_size
    row = width * (size + _FLOAT) + chosen * _CHOICE
    gathered = all_gather(tokens * row, spread.dispatch)
    way = dispatch(spread.preset.sizes, tokens, chosen, width, size)
    return way, {"gather": gathered, "exchange": gathered * share(spread.dispatch, chosen)}


def touched(chosen: int, count: int, tokens: int) -> float:
    """Share of the experts that so many tokens choose among themselves, if they choose evenly."""
    return 1 - (1 - chosen / count) ** tokens


def _dense(settings: Settings, parts: list[Held], spread: Spread, step: Step, columns: Columns) -> Work:
    """Attention, routers, shared experts, mixing and norms; sums over heads and over the feed-forward columns."""
    others = [part for part in parts if not (part.parameter.routed or _is_engram(part))]
    own = [part for part in others if part.parameter.module not in ("embed", "head")]
    tokens, layers = columns.tokens, len(step.layers(settings.table))
    output = layers * tokens * settings.text.hidden_size * settings.dtype.itemsize
    links = all_reduce(output, spread.heads) + all_reduce(output, spread.reduced)
    return Work(sum(part.nbytes for part in own), _products(own, spread, tokens), links)


def _is_engram(held: Held) -> bool:
    return held.parameter.module.startswith("engram.")


def _index(settings: Settings, spread: Spread, step: Step, requests: int, columns: Columns) -> Work:
    text, formats = settings.text, settings.formats
    wide = text.index_n_heads * text.index_head_dim
    total = Work()
    for layer in step.layers(settings.table):
        if not layer.kind.selects:
            continue
        ratio = layer.kind.ratio
        pool = text.candidate_topk_blocks * text.candidate_block_size
        scanned = step.mean_visible(ratio, pool if layer.kind.uses_pool else step.entries(ratio))
        read = min(step.queries * scanned, step.entries(ratio))
        query = (text.index_head_dim * settings.dtype.itemsize + _FLOAT) * text.index_n_heads
        chosen = text.index_topk + (text.candidate_topk_blocks if layer.kind.makes_pool else 0)
        links = all_gather(columns.tokens * query / spread.heads, spread.heads)
        if columns.parts == 1:
            links += all_gather(columns.tokens * chosen * _CANDIDATE, spread.pages)
        else:
            # Queries go to every shard's pages, candidates to the queries' shard, and what it chose to all.
            if spread.pages > 1:
                links += columns.gathered(query) + exchange(columns.all * chosen * _CANDIDATE, spread.pages)
            links += columns.gathered(chosen * _NUMBER)
        total += Work(
            requests * read * formats.index_keys.entry_bytes(text.index_head_dim) / spread.pages,
            columns.attended * 2 * wide * scanned / spread.pages,
            links,
        )
    return total


def _selected(settings: Settings, spread: Spread, step: Step, requests: int, columns: Columns) -> Work:
    text, heads = settings.text, settings.text.num_attention_heads / spread.heads
    entry = settings.formats.main_kv.entry_bytes(text.head_dim)
    total = Work()
    for layer in step.layers(settings.table):
        if layer.kind.mode is Mode.WINDOW:
            continue
        chosen = step.mean_visible(layer.kind.ratio, text.index_topk)
        read = min(step.queries * chosen, step.entries(layer.kind.ratio))
        total += Work(
            requests * read * entry / spread.pages,
            columns.attended * 4 * heads * text.head_dim * chosen / spread.pages,
            _merged(settings, spread, heads, columns),
        )
    return total


def _merged(settings: Settings, spread: Spread, heads: float, columns: Columns) -> float:
    """Link bytes of joining the shards' softmaxes: a maximum, a denominator and a sum of values for every head."""
    width = settings.text.head_dim
    if spread.pages == 1:
        return 0.0
    if columns.parts == 1:
        return all_reduce(columns.all * heads * (width + 2) * _FLOAT, spread.pages)
    links = columns.gathered(heads * width * settings.dtype.itemsize)
    links += all_reduce(columns.all * heads * _FLOAT, spread.pages)
    return links + exchange(columns.all * heads * (width + 1) * _FLOAT, spread.pages)


def _rings(settings: Settings, spread: Spread, step: Step, requests: int, columns: Columns) -> Work:
    text, layers = settings.text, step.layers(settings.table)
    entry = settings.formats.window.entry_bytes(text.head_dim)
    seen = step.mean_visible(1, text.sliding_window)
    heads = text.num_attention_heads / spread.heads
    total = Work()
    for layer in layers:
        tokens = columns.tokens if layer.kind.mode is Mode.WINDOW else columns.attended
        read = min(text.sliding_window + tokens // requests - 1, step.history + step.queries)
        operations = tokens * 4 * heads * text.head_dim * seen
        total += Work(requests * read * entry, operations, columns.gathered(entry))
    return total


def _streams(settings: Settings, step: Step, columns: Columns) -> Work:
    """The streams at the sub-layers, and at the end of a stack what leaves it: gathered."""
    text, size = settings.text, settings.dtype.itemsize
    links = 0.0
    if step.encoder:
        links += columns.gathered(text.hc_mult * (text.hidden_size * size + _FLOAT))
    if step.decoder:
        links += columns.gathered((1 + len(text.dspark_target_layer_ids)) * text.hidden_size * size)
    return Work(_crossed(settings, columns.tokens, len(step.layers(settings.table))), 0.0, links)


def _crossed(settings: Settings, tokens: int, layers: int) -> float:
    """Bytes of the streams, and of a sub-layer's input and output, at the sub-layers of so many layers."""
    text = settings.text
    return 2 * layers * tokens * (2 * text.hc_mult + 2) * text.hidden_size * settings.dtype.itemsize


def _engram(settings: Settings, parts: list[Held], spread: Spread, step: Step, columns: Columns) -> Work:
    """Rows of the tables, wherever they lie, and their projections.

    On a mesh every device looks all requests' rows up in its part, and what they found is added up where it belongs
    (:meth:`dsv41.sharding.parallel.Parallel.rows`).
    """
    tokens = columns.tokens
    rows = engram_layers(settings, step) * tokens * engram_row_bytes(settings)
    own = [part for part in parts if _is_engram(part) and part.parameter.module != "engram.embed"]
    links = 0.0
    if settings.engram_in_step and spread.rows > 1:
        asking = spread.chunk_rows if columns.parts > 1 else 1
        links = all_gather(rows, spread.batch * asking) + all_reduce(rows, spread.shared_rows // asking)
    return Work(sum(part.nbytes for part in own) + rows, _products(own, spread, tokens), links)


def _ends(settings: Settings, parts: list[Held], spread: Spread, step: Step, requests: int, columns: Columns) -> Work:
    """Embedded rows on the way in, the head on the way out."""
    text, tokens, total = settings.text, columns.tokens, Work()
    if step.encoder:
        rows = tokens * text.hidden_size * settings.dtype.itemsize
        total += Work(rows / spread.vocab, 0.0, all_reduce(rows, spread.vocab))
    if step.decoder:
        head = next(part for part in parts if part.parameter.module == "head")
        total += _head(text.vocab_size, head, spread, requests * step.logits)
    return total


def _head(vocabulary: int, head: Held, spread: Spread, tokens: int) -> Work:
    logits = tokens * vocabulary / spread.vocab * _FLOAT
    return Work(head.nbytes, _products([head], spread, tokens), all_gather(logits, spread.vocab))


def _written(settings: Settings, spread: Spread, step: Step, requests: int, columns: Columns) -> Work:
    """New entries: of every layer's window, and of the global memory where the encoder runs."""
    text, formats, table = settings.text, settings.formats, settings.table
    window = len(step.layers(table)) * step.queries * formats.window.entry_bytes(text.head_dim)
    if not step.encoder:
        return Work(requests * window)
    ratios = [table.layers[source].kind.ratio for source in table.kv_sources]
    made = sum(step.queries / ratio for ratio in ratios)
    # Before tokens are compressed: a value and a gate of each where several become one entry.
    token = sum(text.head_dim * (2 * _FLOAT if ratio > 1 else settings.dtype.itemsize) for ratio in ratios)
    moved = requests * (window + made * global_entry_bytes(settings) / spread.pages)
    return Work(moved, 0.0, columns.gathered(token))


def _drafter(settings: Settings, parts: list[Held], head: Held, spread: Spread, requests: int) -> Work:
    """A block of drafts: the stages once, the head once, the Markov head for each draft, one after the other."""
    text, stages, block = settings.text, settings.text.num_nextn_predict_layers, settings.text.dspark_block_size
    tokens = requests * block
    chosen, count = text.dspark_num_experts_per_tok, text.dspark_n_routed_experts
    routed = [part for part in parts if part.parameter.routed]
    markov = [part for part in parts if part.parameter.module == "markov_head.head"]
    dense = [part for part in parts if part.parameter.multiplies and not part.parameter.routed]
    moved = sum(part.nbytes for part in routed) * touched(chosen, count, tokens * spread.dispatch)
    moved += sum(part.nbytes for part in dense) + (block - 1) * sum(part.nbytes for part in markov)
    operations = _products(routed, spread, tokens) * chosen / count + _products(dense, spread, tokens)
    entry, seen = settings.formats.window.entry_bytes(text.head_dim), text.sliding_window + block
    moved += stages * requests * text.sliding_window * entry + _crossed(settings, tokens, stages)
    operations += stages * tokens * 4 * text.num_attention_heads / spread.heads * text.head_dim * seen
    output = stages * tokens * text.hidden_size * settings.dtype.itemsize
    way, ways = _dispatch(settings, spread, tokens, chosen)
    links = stages * ways[way]
    links += all_reduce(output, spread.heads) + all_reduce(output, spread.reduced)
    return Work(moved, operations, links) + _head(text.vocab_size, head, spread, tokens)
