"""Timing decode and prefill of a model, and the machine's own limits in the same run."""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.checkpoint import CheckpointReader, RandomSource, TensorSource
from dsv41.config import load_config
from dsv41.defaults import default_config
from dsv41.inference.prefill import PrefillOptions, prefill
from dsv41.layers.dspark import Drafter
from dsv41.loading import checkpoint_variables, load_drafter, model_tokenizer, random_variables
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.state.ring import create_ring
from dsv41.state.sizes import state_bytes
from dsv41.steps.acceptance import Rule
from dsv41.steps.decode import generate_step
from dsv41.steps.draft import draft_step
from dsv41.steps.prefill import Variables
from dsv41.steps.sampling import Sampler, create_sampler
from dsv41.steps.verify import verify_step


class Limits(NamedTuple):
    """What the machine does at best, measured: bytes read a second, float32 operations a second."""

    bytes_per_s: float
    operations_per_s: float
    device: str


def machine_limits() -> Limits:
    """Measures a reduction over 256 MiB and a float32 product of square matrices."""
    side = 2048
    values = jnp.ones((64, 2**20), jnp.float32)
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.float32)
    read = _seconds(jax.jit(lambda x: jnp.max(x, axis=1)), values)
    product = _seconds(jax.jit(lambda x: jnp.matmul(x, x, precision="highest")), square)
    return Limits(values.nbytes / read, 2 * side**3 / product, jax.devices()[0].device_kind)


def _seconds(f: Callable, *args: Any, repeats: int = 5) -> float:
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_model(
    directory: pathlib.Path | None, batch: int, context: int, steps: int, repeats: int, limits: Limits
) -> dict[str, Any]:
    """One row of the benchmark.

    Args:
      directory: configuration or checkpoint; None: the small configuration with the real vocabulary.
      batch: requests that decode together.
      context: prompt tokens of each before the timed steps.
      steps: decode steps of one timing, of which there are ``repeats``; each step ends when its tokens are on the
        host, as in generation.

    Returns:
      tokens a second of prefill and decode, milliseconds a decode step, its floor (the larger of weights and state
      over the measured bandwidth and operations over the measured rate) and the ratio, and seconds to trace and to
      compile the decode step, the compiled program not taken from any cache. Of a model with a drafter also
      milliseconds of a draft of a block and of the step that verifies it, and the accepted drafts a step from which on
      the two beat plain steps.
    """
    config = default_config() if directory is None else load_config(directory)
    settings = Settings.default(config)
    model = Model(settings)
    variables = _variables(model, directory)
    # The timed plain steps, and then as many tokens again for drafts, should all of them be accepted.
    state = create_sequential_state(
        settings, batch, context + 2 * steps * (repeats + 1) + config.text.dspark_block_size
    )
    prompts = np.random.default_rng(0).integers(3, config.text.vocab_size, (batch, context)).tolist()
    options = PrefillOptions("replay", (min(1024, 1 << (context - 1).bit_length()),))
    state, _ = prefill(model, variables, state, range(batch), prompts, options)
    again = create_sequential_state(settings, batch, state.page_table.shape[1] * settings.page_tokens)
    begin = time.perf_counter()
    jax.block_until_ready(prefill(model, variables, again, range(batch), prompts, options))
    prefill_s = time.perf_counter() - begin

    active, sampler = jnp.ones((batch,), bool), create_sampler(batch)
    begin = time.perf_counter()
    lowered = generate_step.lower(model, variables, state, sampler, active)
    trace_s = time.perf_counter() - begin
    begin = time.perf_counter()
    lowered.compile()
    compile_s = time.perf_counter() - begin

    times = []
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(steps):
            state, sampler, tokens = generate_step(model, variables, state, sampler, active)
            np.asarray(tokens)
        if repeat:  # the first fills caches
            times.append((time.perf_counter() - begin) / steps)
    step_s = statistics.median(times)
    floor_s = max(
        (_weight_bytes(variables) + sum(state_bytes(settings, batch, 0, 1).values())) / limits.bytes_per_s,
        2 * batch * matrix_parameters(model) / limits.operations_per_s,
    )
    row = {
        "model": "small" if directory is None else "/".join(directory.resolve().parts[-2:]),
        "layers": config.text.num_hidden_layers,
        "batch": batch,
        "prefill_tokens_per_s": batch * context / prefill_s,
        "decode_tokens_per_s": batch / step_s,
        "step_ms": step_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "step_over_floor": step_s / floor_s,
        "trace_s": trace_s,
        "compile_s": compile_s,
    }
    if config.text.num_nextn_predict_layers:
        draft_s, verify_s = _speculation_seconds(model, variables, directory, state, sampler, steps, repeats)
        row |= {"draft_ms": draft_s * 1e3, "verify_ms": verify_s * 1e3, "pays_from": (draft_s + verify_s) / step_s - 1}
    return row


def _speculation_seconds(
    model: Model,
    variables: Variables,
    directory: pathlib.Path | None,
    state: ModelState,
    sampler: Sampler,
    steps: int,
    repeats: int,
) -> tuple[float, float]:
    """Seconds of a draft of a whole block, and of the step that verifies it, each until its result is on the host.

    The state and the sampler (donated) do not move far: at most one block in each step is accepted.
    """
    text, batch = model.settings.text, sampler.pending.shape[0]
    drafter, source = Drafter(model.settings), _source(model, directory)
    drafter_variables = load_drafter(drafter, source)
    ring = create_ring(model.settings, text.num_nextn_predict_layers, batch)
    taps = jnp.zeros((len(text.dspark_target_layer_ids), batch, text.dspark_block_size + 1, text.hidden_size))
    ring, taps = jax.device_put((ring, taps.astype(model.settings.dtype)), jax.local_devices()[0])
    active, depth = np.ones(batch, bool), np.full(batch, text.dspark_block_size, np.int32)
    start, nothing = state.length, np.zeros(batch, np.int32)
    rounds = max(1, steps // (text.dspark_block_size + 1))
    draft_times, verify_times = [], []
    for repeat in range(repeats + 1):
        draft_s = verify_s = 0.0
        for _ in range(rounds):
            begin = time.perf_counter()
            ring, drafts = draft_step(
                model, drafter, False, variables, drafter_variables, ring, taps, start, nothing, sampler, active
            )
            np.asarray(drafts.confidence)
            between = time.perf_counter()
            state, sampler, outcome = verify_step(
                model, Rule.COUPLED, variables, state, sampler, drafts.tokens, None, depth, active
            )
            np.asarray(outcome.tokens)
            draft_s, verify_s = draft_s + between - begin, verify_s + time.perf_counter() - between
            start = outcome.start + outcome.consumed
        if repeat:  # the first compiles
            draft_times.append(draft_s / rounds)
            verify_times.append(verify_s / rounds)
    return statistics.median(draft_times), statistics.median(verify_times)


def _has_tensors(directory: pathlib.Path | None) -> bool:
    return directory is not None and any(directory.glob("model*.safetensors"))


def _source(model: Model, directory: pathlib.Path | None) -> TensorSource:
    return CheckpointReader(directory) if _has_tensors(directory) else RandomSource(model.settings.config, 0)


def _variables(model: Model, directory: pathlib.Path | None) -> Variables:
    config = model.settings.config
    if _has_tensors(directory):
        return checkpoint_variables(model, directory, model_tokenizer(config, directory))
    return random_variables(model, 0, model_tokenizer(config))


def _weight_bytes(variables: Variables) -> int:
    """Bytes of all weights but the tables that a step reads a few rows of (embedding, Engram)."""
    params = dict(variables["params"])
    params.pop("embed")
    read = {name: leaves for name, leaves in params.items() if not name.startswith("engram_table_")}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def matrix_parameters(model: Model) -> int:
    """Matrix elements that one token multiplies: everything but tables and the experts it is not sent to."""
    from dsv41.checkpoint import checkpoint_layout

    text = model.settings.text
    total = 0.0
    for spec in checkpoint_layout(model.settings.config).values():
        if spec.part != "text" or spec.dtype == "F8_E8M0" or len(spec.value_shape) != 2:
            continue
        if spec.name == "embed.weight" or spec.name.endswith(".engram.embed.weight"):
            continue
        share = text.num_experts_per_tok / text.n_routed_experts if ".ffn.experts." in spec.name else 1.0
        total += share * spec.value_shape[0] * spec.value_shape[1]
    return int(total)
