"""What each layer does and from whom it reads: the table derived from the configuration's three lists.

A model is a list of layers; each has a mode and up to three sources (global KV, top-k, candidate pool). The
layers below the last KV source are the causal encoder, the others the decoder. :func:`stack_plan` folds such a
list into repeating groups, so that a model of any depth compiles as a few loop bodies.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence

from dsv41.config_types import ConfigError, TextConfig


class Mode(enum.Enum):
    """How a layer attends beyond its own window."""

    WINDOW = "window only"
    FULL = "Full"
    """Makes its own global entries and selects among them."""
    REINDEX = "Reindex"
    """Reads another layer's entries, selects anew."""
    REUSE = "Reuse"
    """Reads another layer's entries and another layer's selection."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What two layers must share to run as iterations of one loop: everything static.

    Attributes:
      mode: see :class:`Mode`.
      ratio: tokens of one global entry; 0 in window-only layers.
      makes_pool: publishes the candidate blocks that later Reindex layers choose in.
      uses_pool: selects only inside the candidate blocks.
    """

    mode: Mode
    ratio: int
    makes_pool: bool = False
    uses_pool: bool = False

    @property
    def selects(self) -> bool:
        return self.mode in (Mode.FULL, Mode.REINDEX)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One row of the layer table; sources are layer numbers, None where the layer has none.

    Attributes:
      first_engram: no layer of the encoder below this one has an Engram, and this one has. A step can be cut here:
        what lies below runs while the Engram's rows are on their way.
    """

    index: int
    kind: LayerKind
    kv_source: int | None
    index_source: int | None
    candidate_source: int | None
    first_engram: bool = False


@dataclasses.dataclass(frozen=True)
class LayerTable:
    """The layers of the backbone, the boundary of encoder and decoder, and where each source stores.

    Attributes:
      layers: row L describes layer L.
      decoder_start: first decoder layer: the last KV source (the number of layers where there is none).
    """

    layers: tuple[Layer, ...]
    decoder_start: int

    @property
    def encoder(self) -> tuple[Layer, ...]:
        return self.layers[: self.decoder_start]

    @property
    def decoder(self) -> tuple[Layer, ...]:
        return self.layers[self.decoder_start :]

    @property
    def kv_sources(self) -> tuple[int, ...]:
        return tuple(x.index for x in self.layers if x.kind.mode is Mode.FULL)

    @property
    def index_sources(self) -> tuple[int, ...]:
        return tuple(x.index for x in self.layers if x.kind.selects)

    @property
    def ratios(self) -> tuple[int, ...]:
        """The distinct compression ratios of the KV sources, ascending."""
        return tuple(sorted({self.layers[s].kind.ratio for s in self.kv_sources}))

    def sources_of_ratio(self, ratio: int) -> tuple[int, ...]:
        """The KV sources that share one pool of pages: those of one ratio, in layer order."""
        return tuple(s for s in self.kv_sources if self.layers[s].kind.ratio == ratio)

    def source_slot(self, layer: int) -> int:
        """Position of a layer's KV source among the sources of its ratio (0 for window-only layers)."""
        row = self.layers[layer]
        if row.kv_source is None:
            return 0
        return self.sources_of_ratio(row.kind.ratio).index(row.kv_source)


def layer_table(text: TextConfig) -> LayerTable:
    """Derives the table from ``compress_ratios``, the source lists and the candidate source.

    Raises:
      ConfigError: a list is out of order, out of range or of the wrong length, or a layer cannot run as
        described; the message names the field, the layer and the value.
    """
    depth, drafts = text.num_hidden_layers, text.num_nextn_predict_layers
    ratios = text.compress_ratios
    if len(ratios) != depth + drafts:
        raise ConfigError(
            f"text_config.compress_ratios: {len(ratios)} entries for {depth} layers and {drafts} draft layers"
        )
    for layer, ratio in enumerate(ratios):
        if ratio < 0 or (layer >= depth and ratio != 0):
            raise ConfigError(f"text_config.compress_ratios: layer {layer} has ratio {ratio}")
    for field in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(text, field)
        for before, after in itertools.pairwise(ids):
            if after <= before:
                raise ConfigError(f"text_config.{field}: layer {after} after layer {before} is out of order")
        for layer in ids:
            if not 0 <= layer < depth:
                raise ConfigError(f"text_config.{field}: layer {layer} is not one of the {depth} layers")
    kv_sources, index_sources = text.kv_source_layer_ids, text.index_source_layer_ids
    for layer in kv_sources:
        if layer not in index_sources:
            raise ConfigError(f"text_config.kv_source_layer_ids: KV source {layer} is no index source")
    candidate = text.candidate_source_layer_id
    if candidate is not None and candidate not in index_sources:
        raise ConfigError(f"text_config.candidate_source_layer_id: layer {candidate} is no index source")

    layers = tuple(_layer(text, layer, candidate) for layer in range(depth))
    if candidate is not None:
        for row in layers[candidate + 1 :]:
            if row.kind.selects and row.kv_source != layers[candidate].kv_source:
                raise ConfigError(
                    f"text_config.index_source_layer_ids: layer {row.index} lies above candidate source {candidate} "
                    f"but reads the entries of layer {row.kv_source}, not of layer {layers[candidate].kv_source}"
                )
    decoder_start = kv_sources[-1] if kv_sources else depth
    first = next((layer for layer in text.engram_layer_ids if layer < decoder_start), None)
    layers = tuple(dataclasses.replace(row, first_engram=row.index == first) for row in layers)
    return LayerTable(layers, decoder_start)


def _layer(text: TextConfig, layer: int, candidate: int | None) -> Layer:
    ratio = text.compress_ratios[layer]
    is_kv, is_index = layer in text.kv_source_layer_ids, layer in text.index_source_layer_ids
    if ratio == 0:
        if is_kv or is_index:
            field = "kv_source_layer_ids" if is_kv else "index_source_layer_ids"
            raise ConfigError(f"text_config.{field}: layer {layer} has compress ratio 0, it has no global entries")
        return Layer(layer, LayerKind(Mode.WINDOW, 0), None, None, None)
    kv_source = max((s for s in text.kv_source_layer_ids if s <= layer), default=None)
    index_source = max((s for s in text.index_source_layer_ids if s <= layer), default=None)
    if kv_source is None or index_source is None:
        raise ConfigError(f"text_config.compress_ratios: layer {layer} has ratio {ratio} but no KV source below it")
    if text.compress_ratios[kv_source] != ratio:
        raise ConfigError(
            f"text_config.compress_ratios: layer {layer} has ratio {ratio}, its KV source {kv_source} has "
            f"{text.compress_ratios[kv_source]}"
        )
    mode = Mode.FULL if is_kv else Mode.REINDEX if is_index else Mode.REUSE
    uses_pool = mode is Mode.REINDEX and candidate is not None and layer > candidate
    kind = LayerKind(mode, ratio, makes_pool=layer == candidate, uses_pool=uses_pool)
    return Layer(layer, kind, kv_source, index_source, candidate if uses_pool else None)


@dataclasses.dataclass(frozen=True)
class Run:
    """``count`` consecutive layers of one kind."""

    kind: LayerKind
    count: int


@dataclasses.dataclass(frozen=True)
class Group:
    """A pattern of runs that repeats: layers ``start`` … ``start + repeats · depth − 1``.

    Attributes:
      first_engram: the first layer is the first of its stack with an Engram, see :class:`Layer`.
    """

    runs: tuple[Run, ...]
    repeats: int
    start: int
    first_engram: bool = False

    @property
    def depth(self) -> int:
        """Layers of one repetition."""
        return sum(run.count for run in self.runs)

    @property
    def layers(self) -> range:
        return range(self.start, self.start + self.depth * self.repeats)


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a layer's parameters lie: group, run, and the index on the stacked leading axes (if any)."""

    group: int
    run: int
    index: tuple[int, ...]


def stack_plan(layers: Sequence[Layer]) -> tuple[Group, ...]:
    """Folds consecutive layers into repeating groups.

    A block starts at each layer that selects (or at the first layer) and takes in what follows; equal
    neighbouring blocks become one group. Where a step may be cut, a block and a group start too. The official encoder
    gives two window-only layers, apart since the second has an Engram, and 3 × (Full + 5 Reuse), its decoder
    Full + 3 Reuse and 4 × (Reindex + 3 Reuse).
    """
    blocks: list[tuple[Layer, list[Run]]] = []
    for layer in layers:
        if not blocks or layer.kind.selects or layer.first_engram:
            blocks.append((layer, [Run(layer.kind, 1)]))
            continue
        runs = blocks[-1][1]
        if runs[-1].kind == layer.kind:
            runs[-1] = Run(layer.kind, runs[-1].count + 1)
        else:
            runs.append(Run(layer.kind, 1))
    groups: list[Group] = []
    for first, runs in blocks:
        if groups and groups[-1].runs == tuple(runs) and not first.first_engram:
            groups[-1] = dataclasses.replace(groups[-1], repeats=groups[-1].repeats + 1)
        else:
            groups.append(Group(tuple(runs), 1, first.index, first.first_engram))
    return tuple(groups)


def locate(groups: Sequence[Group], layer: int) -> Address:
    """Address of a layer inside the stacked parameters of :func:`stack_plan`'s groups."""
    for g, group in enumerate(groups):
        if layer not in group.layers:
            continue
        repeat, offset = divmod(layer - group.start, group.depth)
        for r, run in enumerate(group.runs):
            if offset < run.count:
                index = ((repeat,) if group.repeats > 1 else ()) + ((offset,) if run.count > 1 else ())
                return Address(g, r, index)
            offset -= run.count
    raise KeyError(f"layer {layer} is in none of the groups")
