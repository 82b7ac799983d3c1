"""Bytes of a state by part, counted on its shapes: nothing is allocated."""

from __future__ import annotations

import functools
from typing import Any

import jax

from dsv41.settings import Settings
from dsv41.state.request import create_segment, create_state
from dsv41.state.ring import create_ring


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays (or their shapes) in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def state_bytes(settings: Settings, batch: int, pages: int, table_pages: int) -> dict[str, int]:
    """Bytes of :func:`~dsv41.state.request.create_state` of the same arguments, by part."""
    state = jax.eval_shape(functools.partial(create_state, settings, batch, pages, table_pages))
    return {
        "global memory": tree_bytes(state.memory),
        "page table": tree_bytes(state.page_table),
        "encoder rings": tree_bytes(state.encoder_ring),
        "decoder rings": tree_bytes(state.decoder_ring),
        "compressor tails": tree_bytes(state.tails),
        "n-gram tail": tree_bytes(state.ngram_tail),
        "length": tree_bytes(state.length),
    }


def request_bytes(settings: Settings) -> dict[str, int]:
    """Bytes that a request takes whatever its length, by part; its pages and page table come on top."""
    parts = state_bytes(settings, batch=1, pages=0, table_pages=0)
    return {name: count for name, count in parts.items() if name not in ("global memory", "page table")}


def drafter_bytes(settings: Settings) -> int:
    """Bytes of the drafter's rings, which a request has where drafts are made for it."""
    stages = settings.text.num_nextn_predict_layers
    return tree_bytes(jax.eval_shape(functools.partial(create_ring, settings, stages, 1)))


def prefill_bytes(settings: Settings) -> int:
    """Bytes of the encoder tail that a request holds during a replaying prefill."""
    return tree_bytes(jax.eval_shape(functools.partial(create_segment, settings, 1, settings.text.sliding_window)))
