"""The least time that a step can take, part by part: bytes over bandwidth, or operations over rate."""

from __future__ import annotations

from typing import NamedTuple

from dsv41.checkpoint.placement import flatten_tree
from dsv41.evaluation.speed import matrix_parameters
from dsv41.layer_table import Layer, Mode
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.steps.prefill import Variables


class Work(NamedTuple):
    """What a part of a step moves at least, and operations of its products."""

    moved: float
    operations: float


def step_work(model: Model, variables: Variables, batch: int, queries: int, context: int) -> dict[str, Work]:
    """The parts of a step of ``batch`` requests with ``queries`` tokens each after ``context`` tokens.

    Weights are read once, of the experts those that so many tokens choose if they choose evenly; of the history each
    request reads the index keys that a selecting layer looks at, its window, and the chosen entries, once for each
    query but no more than there are. The residual streams are read and written once at each sub-layer, whose input and
    output they become. One token of a request passes the head. Tables (embedding, Engram) are not counted.
    """
    settings = model.settings
    text, tokens = settings.text, batch * queries
    layers = settings.table.layers
    share = 1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** tokens
    experts, dense, head = _weight_bytes(variables)
    chosen = len(layers) * text.num_experts_per_tok * 3 * text.hidden_size * text.moe_intermediate_size
    others = matrix_parameters(model) - chosen - text.vocab_size * text.hidden_size
    attended = sum(text.sliding_window + min(text.index_topk, _entries(layer, context)) for layer in layers)
    scanned = sum(_scanned(settings, layer, context) for layer in layers)
    crossed = 2 * len(layers) * tokens * (2 * text.hc_mult + 2) * text.hidden_size
    return {
        "experts": Work(share * experts, tokens * 2 * chosen),
        "dense": Work(dense, tokens * 2 * others),
        "attention": Work(
            batch * sum(_attended_bytes(settings, layer, queries, context) for layer in layers),
            tokens * 4 * text.num_attention_heads * text.head_dim * attended,
        ),
        "index": Work(
            batch * sum(_index_bytes(settings, layer, queries, context) for layer in layers),
            tokens * 2 * text.index_n_heads * text.index_head_dim * scanned,
        ),
        "streams": Work(crossed * settings.dtype.itemsize, 0.0),
        "head": Work(head, batch * 2 * text.vocab_size * text.hidden_size),
    }


def _entries(layer: Layer, context: int) -> int:
    return context // layer.kind.ratio if layer.kind.ratio else 0


def _scanned(settings: Settings, layer: Layer, context: int) -> int:
    """Index keys that one query of the layer is compared with."""
    text, entries = settings.text, _entries(layer, context)
    if not layer.kind.selects:
        return 0
    return min(entries, text.candidate_topk_blocks * text.candidate_block_size) if layer.kind.uses_pool else entries


def _attended_bytes(settings: Settings, layer: Layer, queries: int, context: int) -> int:
    """Bytes of window and chosen entries that a request's queries make a layer read."""
    text, formats = settings.text, settings.formats
    count = (text.sliding_window + queries - 1) * formats.window.entry_bytes(text.head_dim)
    if layer.kind.mode is Mode.WINDOW:
        return count
    chosen = min(queries * text.index_topk, _entries(layer, context))
    return count + chosen * formats.main_kv.entry_bytes(text.head_dim)


def _index_bytes(settings: Settings, layer: Layer, queries: int, context: int) -> int:
    scanned = min(queries * _scanned(settings, layer, context), _entries(layer, context))
    return scanned * settings.formats.index_keys.entry_bytes(settings.text.index_head_dim)


def _weight_bytes(variables: Variables) -> tuple[int, int, int]:
    """Bytes of the routed experts, of all else but the embedding and the head, and of the head."""
    experts = dense = head = 0
    for path, leaf in flatten_tree(variables["params"]).items():
        if path[0] == "head":
            head += leaf.nbytes
        elif "experts" in path:
            experts += leaf.nbytes
        elif path[0] != "embed":
            dense += leaf.nbytes
    return experts, dense, head
