"""Few layers of a large model at its real widths: for comparing and timing what does not fit a device as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dsv41.config import ModelConfig
from dsv41.layer_table import layer_table, stack_plan


def one_of_each_kind(config: ModelConfig) -> ModelConfig:
    """The configuration with only the first layer of each kind, without Engram and drafter.

    Official: window only, Full and Reuse of ratio 2, Full of ratio 1 with the candidate pool, Reuse, Reindex.
    """
    first: dict = {}
    for row in layer_table(config.text).layers:
        first.setdefault(row.kind, row.index)
    return keep_layers(config, first.values())


def one_of_each_group(config: ModelConfig) -> ModelConfig:
    """The configuration with one repetition of each group of layers, without Engram and drafter.

    Official, 16 of 40 layers: two window-only ones, Full + 5 Reuse, Full + 3 Reuse, Reindex + 3 Reuse.
    """
    table = layer_table(config.text)
    groups = (*stack_plan(table.encoder), *stack_plan(table.decoder))
    return keep_layers(config, (group.start + i for group in groups for i in range(group.depth)))


def keep_layers(config: ModelConfig, layers: Iterable[int]) -> ModelConfig:
    """The configuration with only these layers, renumbered, without Engram and drafter.

    Raises:
      ConfigError: a layer's source is not among them.
    """
    text, kept = config.text, sorted(layers)

    def places(sources: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(kept.index(layer) for layer in sources if layer in kept)

    candidate = text.candidate_source_layer_id
    few = dataclasses.replace(
        text,
        num_hidden_layers=len(kept),
        compress_ratios=tuple(text.compress_ratios[layer] for layer in kept),
        kv_source_layer_ids=places(text.kv_source_layer_ids),
        index_source_layer_ids=places(text.index_source_layer_ids),
        candidate_source_layer_id=kept.index(candidate) if candidate in kept else None,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )
    layer_table(few)
    return dataclasses.replace(config, text=few)
