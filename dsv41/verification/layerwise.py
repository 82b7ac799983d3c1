"""One layer at a time, fed the golden's stream, mix, caches and selections.

With rounding on, an element that lies within float noise of a rounding boundary may flip, and its row then moves
by far more than the noise. Such rows are found, not guessed: the layer is run again on inputs with noise of one
part in 5·10⁶, and a row that moves under the noise is *fragile*. Every other row must agree, of the layer's result and
of the values inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dsv41.layer_table import Mode, locate, stack_plan
from dsv41.layers.block import Block
from dsv41.layers.engram import EngramInputs
from dsv41.layers.flow import Flow, ForcedSelection, LayerInputs, Step
from dsv41.model import Model, begin_step, first_flow
from dsv41.numerics.ngram_hash import lookback
from dsv41.settings import Settings
from dsv41.state.memory import append_entries
from dsv41.state.request import ModelState, Segment, create_sequential_state
from dsv41.state.ring import Ring, create_ring
from dsv41.verification import capture
from dsv41.verification.golden import Golden
from dsv41.verification.limits import LAYER_ABSOLUTE, LAYER_RELATIVE_RMS
from dsv41.verification.table import Row, at_most, max_abs, relative_rms, row_errors, same_sets
from pallas_kernels.formats import Packed

NOISE, PROBES = 2e-7, 4
FRAGILE_LIMIT = 0.25
"""Largest share of fragile rows: one global entry near a boundary makes every row fragile that chooses it, but if
most rows were, the comparison of the others would say little."""
FLIPPED_LIMIT = 0.05
"""Largest share of selections that may differ, and of rows of drafted values that may be beyond the limit."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(
    block: Block, settings: Settings, params: Mapping, flow: Flow, inputs: LayerInputs, step: Step
) -> tuple[Flow, dict]:
    (flow, _), captured = block.apply({"params": params}, flow, inputs, step, mutable=["intermediates"])
    return flow, captured["intermediates"]


# As programs: run operation by operation these would compile hundreds of small ones.
_append = jax.jit(append_entries, static_argnums=1)
_lookback = jax.jit(lookback)
_first_flow = jax.jit(first_flow, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(settings: Settings, requests: int, queries: int) -> tuple[ModelState, Ring]:
    return create_sequential_state(settings, requests, queries), create_ring(settings, 1, requests)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _engram_inputs(model: Model, layers: tuple[int, ...], variables: Mapping, seen: jax.Array) -> EngramInputs:
    return model.apply(variables, layers, seen, method="engram_inputs")


@functools.partial(jax.jit, static_argnums=0)
def _begin(
    settings: Settings,
    state: ModelState,
    ring: Ring,
    segment: Segment,
    engram: EngramInputs | None,
    forced: ForcedSelection | None,
) -> tuple[Step, Packed]:
    return begin_step(settings, state, ring, segment, engram, forced=forced)


def compare_layers(golden: Golden, model: Model, variables: Mapping) -> list[Row]:
    """Rows for every layer whose incoming and outgoing streams the golden has (case A's prompt)."""
    expected = golden.tensors("expected")
    rows: list[Row] = []
    for layer in range(golden.config.text.num_hidden_layers):
        if f"A.prefill.layer.{layer}" not in expected or f"A.prefill.pre_mix.{layer}" not in expected:
            continue
        if layer == 0 or (f"A.prefill.layer.{layer - 1}" in expected and f"A.prefill.pre_mix.{layer - 1}" in expected):
            rows += _compare_layer(golden, model, variables, layer)
    return rows


def _incoming(golden: Golden, settings: Settings, layer: int) -> tuple[np.ndarray, np.ndarray]:
    expected = golden.tensors("expected")
    if layer:
        return expected[f"A.prefill.layer.{layer - 1}"], expected[f"A.prefill.pre_mix.{layer - 1}"]
    streams = np.repeat(expected["A.prefill.embed"][:, :, None], settings.text.hc_mult, axis=2)
    return streams, np.broadcast_to(np.eye(settings.text.hc_mult, dtype=np.float32)[0], streams.shape[:3])


def _compare_layer(golden: Golden, model: Model, variables: Mapping, layer: int) -> list[Row]:
    settings, expected = model.settings, golden.tensors("expected")
    row = settings.table.layers[layer]
    streams, mix = _incoming(golden, settings, layer)
    flow, inputs, step = _prepare(golden, model, variables, layer, streams, mix)
    block = Block(settings, row.kind, has_engram=layer in settings.text.engram_layer_ids)
    params = _layer_params(settings, variables, layer)

    def run(streams: np.ndarray) -> tuple[Flow, dict]:
        flow_in = flow.replace(streams=streams.astype(settings.dtype))
        return jax.device_get(_apply(block, settings, params, flow_in, inputs, step))

    after, captured = run(streams)
    ours = after.streams.astype(np.float32)
    requests = ours.shape[0]
    want, want_mix = expected[f"A.prefill.layer.{layer}"], expected[f"A.prefill.pre_mix.{layer}"]
    group = f"layer {layer} ({row.kind.mode.value})"
    if golden.flavour == "fp8":
        rows = [at_most(group, f"layer.{layer}", "relative RMS", relative_rms(ours, want), LAYER_RELATIVE_RMS)]
        rows.append(
            at_most(
                group,
                f"pre_mix.{layer}",
                "relative RMS",
                relative_rms(np.asarray(after.mix), want_mix),
                LAYER_RELATIVE_RMS,
            )
        )
        return rows + _other_values(golden, layer, captured, group, requests, LAYER_RELATIVE_RMS)

    noise = np.random.default_rng(layer).standard_normal((PROBES, *streams.shape)).astype(np.float32) * NOISE
    flat = lambda x: np.asarray(x, np.float32).reshape(-1, x.shape[-2] * x.shape[-1])  # noqa: E731
    probes = [run(streams * (1 + n)) for n in noise]
    fragile = _moved([flat(moved.streams) for moved, _ in probes], flat(after.streams))
    errors = row_errors(flat(after.streams), flat(want))
    steady = errors[~fragile]
    flipped = int(np.sum(errors > LAYER_ABSOLUTE))
    note = f"{flipped} of {errors.size} rows beyond it, {int(fragile.sum())} fragile"
    rows = [
        at_most(group, f"layer.{layer}", "max abs, steady rows", steady.max(initial=0.0), LAYER_ABSOLUTE, note),
        at_most(group, f"layer.{layer}", "share of fragile rows", fragile.mean(), FRAGILE_LIMIT),
        at_most(
            group,
            f"pre_mix.{layer}",
            "max abs, steady rows",
            row_errors(np.asarray(after.mix), want_mix)[~fragile].max(initial=0.0),
            LAYER_ABSOLUTE,
        ),
    ]
    return rows + _other_values(golden, layer, captured, group, requests, None, [inside for _, inside in probes])


def _moved(probes: list[np.ndarray], value: np.ndarray) -> np.ndarray:
    """Whether a row moves under the noise of any probe: bool, one a row of :func:`row_errors`."""
    return np.max([row_errors(probe, value) for probe in probes], axis=0) > LAYER_ABSOLUTE


def _by_name(captured: dict) -> dict[str, np.ndarray]:
    return {
        [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]: np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(captured)[0]
    }


def _other_values(
    golden: Golden,
    layer: int,
    captured: dict,
    group: str,
    requests: int,
    relative: float | None,
    probes: Sequence[dict] = (),
) -> list[Row]:
    """What else the golden has of this layer: sub-layer inputs and outputs, routing, the layer's own selection.

    Without a limit on the relative error the probes' values say which rows are fragile.
    """
    expected, rows = golden.tensors("expected"), []
    values = _by_name(captured)
    probed = [_by_name(probe) for probe in probes]
    for name in ("attn_in", "attn_out", "ffn_out", "engram_gate", "router_w"):
        key = f"A.prefill.{name}.{layer}"
        if key in expected:
            ours, want = values[name].astype(np.float32), expected[key][:requests]
            if relative is None:
                fragile = _moved([probe[name].astype(np.float32) for probe in probed], ours)
                steady = row_errors(ours, want)[~fragile].max(initial=0.0)
                note = f"max abs of all {max_abs(ours, want):.1e}, {int(fragile.sum())} of {fragile.size} fragile"
                rows += [
                    at_most(group, f"{name}.{layer}", "max abs, steady rows", steady, LAYER_ABSOLUTE, note),
                    at_most(group, f"{name}.{layer}", "share of fragile rows", fragile.mean(), FRAGILE_LIMIT),
                ]
            else:
                rows.append(at_most(group, f"{name}.{layer}", "relative RMS", relative_rms(ours, want), relative))
    for name, key in (("router_idx", f"A.prefill.router_idx.{layer}"), ("topk", f"A.prefill.topk.{layer}")):
        if key in expected:
            differ = ~same_sets(values[name], expected[key][:requests])
            # In bfloat16 the reference's own scores tie exactly at the cut, and which entry wins is arbitrary.
            limit = FLIPPED_LIMIT if relative is None else 1.0
            rows.append(
                at_most(
                    group,
                    f"{name}.{layer}",
                    "share of sets that differ",
                    differ.mean(),
                    limit,
                    f"{differ.sum()} of {differ.size}",
                )
            )
    return rows


def _layer_params(settings: Settings, variables: Mapping, layer: int) -> Mapping:
    start = settings.table.decoder_start
    stack, rows = ("encoder", settings.table.encoder) if layer < start else ("decoder", settings.table.decoder)
    address = locate(stack_plan(rows), layer)
    run = variables["params"][stack][f"groups_{address.group}"][f"runs_{address.run}"]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[address.index], run)


def _prepare(
    golden: Golden,
    model: Model,
    variables: Mapping,
    layer: int,
    streams: np.ndarray,
    mix: np.ndarray,
) -> tuple[Flow, LayerInputs, Step]:
    """A fresh prompt as this layer meets it: its sources' entries in the memory, its selection made."""
    settings, expected = model.settings, golden.tensors("expected")
    text, table, row = settings.text, settings.table, settings.table.layers[layer]
    requests, queries = streams.shape[:2]
    state, ring = _empty(settings, requests, queries)
    ids = golden.token_map[expected["A.input_ids"][:requests, :queries]].astype(np.int32)
    segment = Segment(
        streams=streams.astype(settings.dtype),
        mix=mix.astype(np.float32),
        is_image=np.zeros((requests, queries), bool),
        lookback=_lookback(ids, state.ngram_tail),
        start=np.zeros((requests,), np.int32),
        count=np.full((requests,), queries, np.int32),
    )
    if row.kind.mode in (Mode.REINDEX, Mode.REUSE):
        main = expected[f"A.prefill_cache.compress_kv.{row.kv_source}"][:requests]
        index = expected[f"A.prefill_cache.index_k.{row.kv_source}"][:requests]
        memory = _append(
            state.memory[row.kind.ratio],
            settings,
            state.page_table,
            np.int32(table.source_slot(layer)),
            segment.start,
            np.full((requests,), main.shape[1], np.int32),
            main,
            index,
        )
        state = state.replace(memory={**state.memory, row.kind.ratio: memory})
    flow = _first_flow(settings, state, segment)
    forced = None
    if row.kind.mode is not Mode.WINDOW:
        source = text.candidate_source_layer_id
        candidates = expected.get(f"A.prefill.candidates.{source}")
        entries = {s: expected[f"A.prefill.topk.{s}"][:requests] for s in table.index_sources}
        forced = capture.forced_selection(
            settings,
            entries,
            None if candidates is None else candidates[:requests],
            requests,
            queries,
            flow.blocks.shape[-1],
        )
        flow = flow.replace(selection=forced.entries[table.index_sources.index(row.index_source)], blocks=forced.blocks)
        if not row.kind.selects:
            forced = None
    engram = None
    if layer in text.engram_layer_ids:
        engram = _engram_inputs(model, (layer,), variables, segment.lookback)
    step, ring = _begin(settings, state, ring, segment, engram, forced)
    inputs = LayerInputs(
        ring=ring.map(lambda leaf: np.asarray(leaf)[0]),
        source_slot=np.int32(table.source_slot(layer)),
        index_slot=np.int32(table.index_sources.index(layer) if row.kind.selects else 0),
        engram_slot=np.int32(0 if engram is not None else -1),
        tap_slot=np.int32(0),
    )
    return flow, inputs, step
