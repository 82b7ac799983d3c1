"""What one device moves, computes and sends in a step, item by item.

Moved and computed is the least that the algorithm asks for; sent is what the steps send.

Weights are read once, of the experts those that so many tokens choose if they choose evenly. Of the history each
request reads the index keys that a selecting layer looks at, its windows, and the chosen entries, once for each query
but no more than there are. Streams are read and written once at each sub-layer, whose input and output they become.

On a mesh, requests and pages lie as the rules say and everything else is replicated: devices that share a request's
tokens repeat what is not split. Index queries of all heads are gathered, and a device scans its own pages with them.
Values and sums cross in the activation dtype; the experts' sums and what softmax and head make, as float32.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv41.layer_table import Mode
from dsv41.planning.memory import engram_layers, engram_row_bytes, global_entry_bytes
from dsv41.planning.parameters import Held
from dsv41.planning.spread import Spread, all_gather, all_reduce
from dsv41.planning.steps import Step
from dsv41.settings import Settings
from dsv41.sharding.exchange import share
from dsv41.sharding.experts import dispatch

_FLOAT = 4
# What goes with a candidate that crosses devices, and with a token that goes to an expert: a number and a weight.
_CANDIDATE = _CHOICE = 8


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
    experts, way = _experts(settings, backbone, spread, step, requests)
    items = {
        "experts": experts,
        "dense weights": _dense(settings, backbone, spread, step, requests),
        "index keys": _index(settings, spread, step, requests),
        "selected entries": _selected(settings, spread, step, requests),
        "rings": _rings(settings, spread, step, requests),
        "streams": Work(_crossed(settings, requests * step.queries, len(step.layers(settings.table)))),
        "Engram": _engram(settings, backbone, spread, step, requests),
        "embedding and head": _ends(settings, backbone, spread, step, requests),
        "new entries": Work(_written(settings, spread, step, requests)),
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


def _experts(settings: Settings, parts: list[Held], spread: Spread, step: Step, requests: int) -> tuple[Work, Dispatch]:
    text, layers = settings.text, len(step.layers(settings.table))
    routed = [part for part in parts if part.parameter.routed]
    tokens = requests * step.queries
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


def _dense(settings: Settings, parts: list[Held], spread: Spread, step: Step, requests: int) -> Work:
    """Attention, routers, shared experts, mixing and norms; sums over heads and over the feed-forward columns."""
    others = [part for part in parts if not (part.parameter.routed or _is_engram(part))]
    own = [part for part in others if part.parameter.module not in ("embed", "head")]
    tokens, layers = requests * step.queries, len(step.layers(settings.table))
    output = layers * tokens * settings.text.hidden_size * settings.dtype.itemsize
    links = all_reduce(output, spread.heads) + all_reduce(output, spread.reduced)
    return Work(sum(part.nbytes for part in own), _products(own, spread, tokens), links)


def _is_engram(held: Held) -> bool:
    return held.parameter.module.startswith("engram.")


def _index(settings: Settings, spread: Spread, step: Step, requests: int) -> Work:
    text, formats, tokens = settings.text, settings.formats, requests * step.queries
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
        candidates = text.index_topk * _CANDIDATE
        if layer.kind.makes_pool:
            candidates += text.candidate_topk_blocks * _CANDIDATE
        total += Work(
            requests * read * formats.index_keys.entry_bytes(text.index_head_dim) / spread.pages,
            tokens * 2 * wide * scanned / spread.pages,
            all_gather(tokens * query / spread.heads, spread.heads) + all_gather(tokens * candidates, spread.pages),
        )
    return total


def _selected(settings: Settings, spread: Spread, step: Step, requests: int) -> Work:
    text, tokens, heads = settings.text, requests * step.queries, settings.text.num_attention_heads / spread.heads
    entry = settings.formats.main_kv.entry_bytes(text.head_dim)
    total = Work()
    for layer in step.layers(settings.table):
        if layer.kind.mode is Mode.WINDOW:
            continue
        chosen = step.mean_visible(layer.kind.ratio, text.index_topk)
        read = min(step.queries * chosen, step.entries(layer.kind.ratio))
        # Each device's own softmax: a sum of values, a maximum and a denominator for every head.
        partial = tokens * heads * (text.head_dim + 2) * _FLOAT
        total += Work(
            requests * read * entry / spread.pages,
            tokens * 4 * heads * text.head_dim * chosen / spread.pages,
            all_reduce(partial, spread.pages),
        )
    return total


def _rings(settings: Settings, spread: Spread, step: Step, requests: int) -> Work:
    text, layers = settings.text, len(step.layers(settings.table))
    entry = settings.formats.window.entry_bytes(text.head_dim)
    seen = step.mean_visible(1, text.sliding_window)
    heads = text.num_attention_heads / spread.heads
    read = min(text.sliding_window + step.queries - 1, step.history + step.queries)
    operations = requests * step.queries * 4 * heads * text.head_dim * seen
    return Work(layers * requests * read * entry, layers * operations)


def _crossed(settings: Settings, tokens: int, layers: int) -> float:
    """Bytes of the streams, and of a sub-layer's input and output, at the sub-layers of so many layers."""
    text = settings.text
    return 2 * layers * tokens * (2 * text.hc_mult + 2) * text.hidden_size * settings.dtype.itemsize


def _engram(settings: Settings, parts: list[Held], spread: Spread, step: Step, requests: int) -> Work:
    """Rows of the tables, wherever they lie, and their projections.

    On a mesh every device looks all requests' rows up in its part, and what they found is added up where it belongs
    (:meth:`dsv41.sharding.parallel.Parallel.rows`).
    """
    tokens = requests * step.queries
    rows = engram_layers(settings, step) * tokens * engram_row_bytes(settings)
    own = [part for part in parts if _is_engram(part) and part.parameter.module != "engram.embed"]
    links = 0.0
    if settings.engram_in_step and spread.rows > 1:
        links = all_gather(rows, spread.batch) + all_reduce(rows, spread.shared_rows)
    return Work(sum(part.nbytes for part in own) + rows, _products(own, spread, tokens), links)


def _ends(settings: Settings, parts: list[Held], spread: Spread, step: Step, requests: int) -> Work:
    """Embedded rows on the way in, the head on the way out."""
    text, tokens, total = settings.text, requests * step.queries, Work()
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


def _written(settings: Settings, spread: Spread, step: Step, requests: int) -> float:
    """Bytes of new entries: of every layer's window, and of the global memory where the encoder runs."""
    text, formats, table = settings.text, settings.formats, settings.table
    window = len(step.layers(table)) * step.queries * formats.window.entry_bytes(text.head_dim)
    if not step.encoder:
        return requests * window
    made = sum(step.queries / table.layers[source].kind.ratio for source in table.kv_sources)
    return requests * (window + made * global_entry_bytes(settings) / spread.pages)


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
