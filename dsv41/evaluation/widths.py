"""Timing decode steps and prefill chunks at a model's real widths and at any context, with kernels and with XLA.

Weights and memory are random and made on the device, and of each group of layers there is one repetition: a model that
does not fit a device is timed by layers that do. Nothing is prefilled; what a step costs depends on how much it reads,
not on how that came about.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig
from dsv41.evaluation.speed import Limits, matrix_parameters
from dsv41.layer_table import Layer, Mode
from dsv41.loading import device_random_variables
from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.shallow import one_of_each_group
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.state.ring import Ring
from dsv41.steps.decode import generate_step
from dsv41.steps.prefill import Variables, exact_chunk
from dsv41.steps.sampling import create_sampler
from pallas_kernels import backend
from pallas_kernels.formats import Format, Packed


def random_model(config: ModelConfig) -> tuple[Model, Variables]:
    """One repetition of each group of layers, with random weights drawn on the device."""
    model = Model(Settings.default(one_of_each_group(config)))
    return model, device_random_variables(model, 0)


def filled_state(settings: Settings, batch: int, context: int, room: int) -> ModelState:
    """A state of requests of ``context`` tokens with random entries and room for as many tokens as said."""
    state = create_sequential_state(settings, batch, context + room)
    text, formats = settings.text, settings.formats
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 2 * len(state.memory) + 2))

    def filled(fmt: Format, entries: Packed, width: int) -> Packed:
        if not entries.payload.size:  # a model may have no decoder
            return entries
        return _random_entries(fmt, entries.payload.shape[:-1], width, next(keys))

    memory = {
        ratio: pool.replace(
            main=filled(formats.main_kv, pool.main, text.head_dim),
            index=filled(formats.index_keys, pool.index, text.index_head_dim),
        )
        for ratio, pool in state.memory.items()
    }
    slot = np.arange(text.sliding_window)
    # Slot s holds the last position below the context that is s modulo the window.
    held = context - 1 - (context - 1 - slot) % text.sliding_window
    positions = jnp.tile(jnp.asarray(np.where(held < 0, -1, held), jnp.int32), (batch, 1))

    def ring(ring: Ring) -> Ring:
        # A copy: steps donate the state, and a buffer cannot be donated twice.
        return Ring(filled(formats.window, ring.entries, text.head_dim), jnp.copy(positions))

    state = state.replace(
        memory=memory,
        encoder_ring=ring(state.encoder_ring),
        decoder_ring=ring(state.decoder_ring),
        length=jnp.full((batch,), context, jnp.int32),
    )
    return jax.device_put(state, jax.local_devices()[0])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_entries(fmt: Format, shape: tuple[int, ...], width: int, key: jax.Array) -> Packed:
    return fmt.encode(jax.random.normal(key, (*shape, width)))


def measure_widths(
    model: Model,
    variables: Variables,
    batch: int,
    context: int,
    chunk: int,
    steps: int,
    repeats: int,
    limits: Limits,
) -> list[dict[str, Any]]:
    """One row for each back end: the present platform's, and XLA if that is another.

    Args:
      batch: requests that decode together; a prefill chunk is of one request.
      context: tokens of each before the timed steps and chunks.
      chunk: tokens of a prefill chunk, through all layers.
      steps: decode steps of one timing, and ``repeats`` of them; steps do not wait for the host.

    Returns:
      milliseconds of a decode step and of a prefill chunk, their floors (:func:`step_floor`) and the ratios, and
      seconds to compile both.
    """
    settings, rows = model.settings, []
    decode_floor = step_floor(model, variables, limits, batch, 1, context)
    chunk_floor = step_floor(model, variables, limits, 1, chunk, context)
    for name in dict.fromkeys((backend.preferred(), "xla")):
        with backend.use(name):
            begin = time.perf_counter()
            decode_s, chunk_s, compile_s = _seconds(model, variables, batch, context, chunk, steps, repeats)
        rows.append(
            {
                "back_end": name,
                "layers": settings.text.num_hidden_layers,
                "batch": batch,
                "context": context,
                "step_ms": decode_s * 1e3,
                "step_floor_ms": decode_floor * 1e3,
                "step_over_floor": decode_s / decode_floor,
                "chunk_ms": chunk_s * 1e3,
                "chunk_floor_ms": chunk_floor * 1e3,
                "chunk_over_floor": chunk_s / chunk_floor,
                "compile_s": compile_s,
                "total_s": time.perf_counter() - begin,
            }
        )
    return rows


def _seconds(
    model: Model, variables: Variables, batch: int, context: int, chunk: int, steps: int, repeats: int
) -> tuple[float, float, float]:
    """Seconds of a decode step, of a prefill chunk, and of compiling (and first running) both."""
    settings = model.settings
    active, sampler = jnp.ones((batch,), bool), create_sampler(batch)
    state = filled_state(settings, batch, context, steps * repeats + 1)

    def decode(carry: tuple) -> tuple:
        return generate_step(model, variables, *carry, active)[:2]

    carry, decode_compile_s = _timed(lambda: decode((state, sampler)))
    times = []
    for _ in range(repeats):
        carry, seconds = _timed(lambda carry=carry: functools.reduce(lambda c, _: decode(c), range(steps), carry))
        times.append(seconds / steps)
    del carry, state

    ids = np.random.default_rng(0).integers(3, settings.text.vocab_size, (1, chunk)).astype(np.int32)
    tokens, request = TokenBatch(jnp.asarray(ids), jnp.full(1, chunk, jnp.int32)), jnp.zeros(1, jnp.int32)
    state = filled_state(settings, 1, context, (repeats + 1) * chunk)
    (state, *_), chunk_compile_s = _timed(lambda: exact_chunk(model, variables, state, request, tokens))
    chunk_times = []
    for _ in range(repeats):
        (state, *_), seconds = _timed(lambda state=state: exact_chunk(model, variables, state, request, tokens))
        chunk_times.append(seconds)
    return float(np.median(times)), float(np.median(chunk_times)), decode_compile_s + chunk_compile_s


def _timed(f: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = jax.block_until_ready(f())
    return result, time.perf_counter() - begin


def step_floor(model: Model, variables: Variables, limits: Limits, batch: int, queries: int, context: int) -> float:
    """Least seconds of a step: the larger of bytes over bandwidth and operations over rate.

    Bytes: all weights but the tables, of the experts those that so many tokens choose if they choose evenly; each
    request's window, the index keys that a selecting layer looks at, and the chosen entries, once for each query but
    no more than there are.
    """
    settings = model.settings
    text, tokens = settings.text, batch * queries
    weights = _weight_bytes(variables, 1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** tokens)
    entries = batch * sum(_layer_bytes(settings, layer, queries, context) for layer in settings.table.layers)
    attended = text.num_attention_heads * text.head_dim
    operations = tokens * 2 * matrix_parameters(model)
    for layer in settings.table.layers:
        seen = text.sliding_window + min(text.index_topk, _entries(layer, context))
        operations += tokens * 4 * attended * seen
        operations += tokens * 2 * text.index_n_heads * text.index_head_dim * _scanned(settings, layer, context)
    return max((weights + entries) / limits.bytes_per_s, operations / limits.operations_per_s)


def _entries(layer: Layer, context: int) -> int:
    return context // layer.kind.ratio if layer.kind.ratio else 0


def _scanned(settings: Settings, layer: Layer, context: int) -> int:
    """Index keys that one query of the layer is compared with."""
    text, entries = settings.text, _entries(layer, context)
    if not layer.kind.selects:
        return 0
    return min(entries, text.candidate_topk_blocks * text.candidate_block_size) if layer.kind.uses_pool else entries


def _layer_bytes(settings: Settings, layer: Layer, queries: int, context: int) -> int:
    """Bytes of entries that a request's queries make a layer read."""
    text, formats = settings.text, settings.formats
    count = (text.sliding_window + queries - 1) * formats.window.entry_bytes(text.head_dim)
    if layer.kind.mode is not Mode.WINDOW:
        chosen = min(queries * text.index_topk, _entries(layer, context))
        count += chosen * formats.main_kv.entry_bytes(text.head_dim)
    scanned = min(queries * _scanned(settings, layer, context), _entries(layer, context))
    return count + scanned * formats.index_keys.entry_bytes(text.index_head_dim)


def _weight_bytes(variables: Variables, experts: float) -> float:
    """Bytes of the weights that a step reads, given the share of the routed experts; the embedding is a table."""
    total = 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(variables["params"])[0]:
        keys = [key.key for key in path]
        if keys[0] != "embed":
            total += leaf.nbytes * (experts if "experts" in keys else 1.0)
    return total
