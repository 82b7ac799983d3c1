"""Timing decode steps and prefill chunks at a model's real widths and at any context, with kernels and with XLA.

Weights and memory are random and made on the device, and of each group of layers there is one repetition: a model that
does not fit a device is timed by layers that do. Nothing is prefilled; what a step costs depends on how much it reads,
not on how that came about.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from dsv41.checkpoint.placement import flatten_tree, unflatten_tree
from dsv41.config import ModelConfig
from dsv41.declared import abstract_variables
from dsv41.evaluation.floors import step_work
from dsv41.evaluation.launches import launches
from dsv41.layer_table import Mode, stack_plan
from dsv41.loading import device_random_variables
from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.shallow import one_of_each_group
from dsv41.sharding.parallel import SINGLE, Parallel
from dsv41.sharding.requests import sequential_state
from dsv41.sharding.steps import place, state_spec
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.state.ring import Ring
from dsv41.steps.decode import generate_step
from dsv41.steps.prefill import Variables, exact_chunk
from dsv41.steps.sampling import create_sampler
from pallas_kernels import backend
from pallas_kernels.benchmark.limits import Limits
from pallas_kernels.formats import Format, Packed

_ROUTER_BIASES = (("gate", "bias"), ("gate", "bias_vl"))
# Pages drawn at once.
_PAGES = 1024


def shallow_model(config: ModelConfig, parallel: Parallel = SINGLE) -> Model:
    """A model of one repetition of each group of layers."""
    return Model(dataclasses.replace(Settings.default(one_of_each_group(config)), parallel=parallel))


def balanced_variables(model: Model) -> Variables:
    """Random weights drawn on the devices.

    The routers' biases are 0: random ones would send all tokens to the same few experts, and the floor assumes what
    training aims at, that tokens choose evenly.
    """
    variables = device_random_variables(model, 0)
    params = flatten_tree(variables["params"])
    biases = {path: jnp.zeros_like(leaf) for path, leaf in params.items() if path[-2:] in _ROUTER_BIASES}
    return variables | {"params": unflatten_tree(params | biases)}


def filled_state(settings: Settings, batch: int, context: int, room: int) -> ModelState:
    """A state of requests of ``context`` tokens with random entries and room for as many tokens as said."""
    state, parallel = sequential_state(settings, batch, context + room), settings.parallel
    if parallel.mesh is None:
        return jax.device_put(_filled(settings, context, state), jax.local_devices()[0])
    spec = state_spec(parallel)
    fill = functools.partial(_filled, settings, context)
    filled = jax.shard_map(fill, mesh=parallel.mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    return jax.jit(filled, donate_argnums=0)(state)


def _filled(settings: Settings, context: int, state: ModelState) -> ModelState:
    """A device's part of a state with random entries."""
    text, formats, batch = settings.text, settings.formats, state.length.shape[0]
    key = jax.random.fold_in(jax.random.key(0, impl="rbg"), settings.parallel.index("pages"))
    keys = iter(jax.random.split(key, 2 * len(state.memory) + 2))

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

    return state.replace(
        memory=memory,
        encoder_ring=ring(state.encoder_ring),
        decoder_ring=ring(state.decoder_ring),
        length=jnp.full((batch,), context, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_entries(fmt: Format, shape: tuple[int, ...], width: int, key: jax.Array) -> Packed:
    """Entries ``[*shape, width']``, drawn page by page: as floats a long memory would not fit."""

    def page(key: jax.Array) -> Packed:
        return fmt.encode(jax.random.normal(key, (shape[-1], width)))

    pages = jax.lax.map(page, jax.random.split(key, math.prod(shape[:-1])), batch_size=_PAGES)
    return pages.map(lambda leaf: leaf.reshape(*shape, leaf.shape[-1]))


class Case(NamedTuple):
    """What is timed: ``batch`` requests that decode together, and a chunk of one request of every batch shard, all at
    ``context`` tokens."""

    mesh: str
    back_end: str
    batch: int
    context: int


class _Programs(NamedTuple):
    """Compiled for one case; both take the variables and donate the state."""

    decode: Compiled
    chunk: Compiled
    compile_s: float


def measure_widths(
    models: Mapping[str, Model],
    back_ends: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    chunk: int,
    steps: int,
    repeats: int,
    limits: Limits,
    profile: pathlib.Path | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for each model, batch, context and back end.

    All programs are compiled side by side before the first is timed: one takes a minute, and a few cores are idle.

    Args:
      models: the same model on meshes by their names. One at a time has weights.
      chunk: tokens of a prefill chunk, through all layers.
      steps: decode steps of one timing, and ``repeats`` of them; steps do not wait for the host.
      profile: a directory for traces of a decode step and a chunk of the first back end's cases, in folders of their
        names.

    Yields:
      milliseconds of a decode step and of a prefill chunk, their floors (:func:`step_floor`) and floor over time;
      seconds to compile both; launches of a step and of a chunk, and those of one of its Reuse layers (the longest run
      of them, 0 without one). Or ``failed``, why a case has none of them.
    """
    cases = [Case(*case) for case in itertools.product(models, back_ends, batches, contexts)]
    lengths = _Lengths(chunk, steps, repeats)
    with concurrent.futures.ThreadPoolExecutor(min(len(cases), os.cpu_count() or 1)) as pool:
        compiled = [pool.submit(_compile, models[case.mesh], case, lengths) for case in cases]
    variables, drawn = None, None
    for case, programs in zip(cases, compiled, strict=True):
        model = models[case.mesh]
        if case.mesh != drawn:
            variables = None  # those before are freed first
            variables, drawn = balanced_variables(model), case.mesh
        row = {**case._asdict(), "layers": model.settings.text.num_hidden_layers}
        traced = profile if case.back_end == back_ends[0] else None
        try:
            yield row | _measure(model, variables, case, lengths, programs.result(), limits, traced)
        except jax.errors.JaxRuntimeError as error:  # one that does not fit must not cost the others
            yield row | {"failed": str(error).splitlines()[0]}


def _measure(
    model: Model,
    variables: Variables,
    case: Case,
    lengths: _Lengths,
    programs: _Programs,
    limits: Limits,
    profile: pathlib.Path | None,
) -> dict[str, Any]:
    name = f"{case.back_end}-{case.batch}-{case.context}"
    traces = (None, None) if profile is None else (profile / f"decode-{name}", profile / f"chunk-{name}")
    decode = _decoding(model, variables, case, lengths, programs.decode)
    decode_s = _seconds(decode, lengths.steps, lengths.repeats, traces[0])
    del decode  # and its state
    chunk_s = _seconds(_prefilling(model, variables, case, lengths, programs.chunk), 1, lengths.repeats, traces[1])
    shards = model.settings.parallel.parts("batch")
    decode_floor = step_floor(model.settings, limits, case.batch, 1, case.context)
    chunk_floor = step_floor(model.settings, limits, shards, lengths.chunk, case.context)
    return {
        "step_ms": decode_s * 1e3,
        "step_floor_ms": decode_floor * 1e3,
        "step_of_floor": decode_floor / decode_s,
        "chunk_ms": chunk_s * 1e3,
        "chunk_floor_ms": chunk_floor * 1e3,
        "chunk_of_floor": chunk_floor / chunk_s,
        "compile_s": programs.compile_s,
        **_launches(model.settings, "step", programs.decode),
        **_launches(model.settings, "chunk", programs.chunk),
    }


def step_floor(settings: Settings, limits: Limits, batch: int, queries: int, context: int) -> float:
    """Least seconds of a step, links apart: the sum over its parts (:func:`~dsv41.evaluation.floors.step_work`)."""
    work = step_work(settings, batch, queries, context).values()
    return sum(limits.floor(part.operations, part.moved) for part in work)


class _Lengths(NamedTuple):
    chunk: int
    steps: int
    repeats: int

    def decoded(self, case: Case) -> int:
        """Tokens that each request needs room for in the decode timings."""
        return case.context + self.steps * (self.repeats + 1) + 2

    def prefilled(self, case: Case) -> int:
        return case.context + self.chunk * (self.repeats + 2)


def _compile(model: Model, case: Case, lengths: _Lengths) -> _Programs:
    begin = time.perf_counter()
    token_map = jax.ShapeDtypeStruct((model.settings.text.vocab_size,), jnp.int32)
    variables = {"params": abstract_variables(model), "constants": {"token_map": token_map}}

    def state(batch: int, tokens: int) -> ModelState:
        return jax.eval_shape(lambda: create_sequential_state(model.settings.whole, batch, tokens))

    shape, shards = jax.ShapeDtypeStruct, model.settings.parallel.parts("batch")
    with backend.use(case.back_end):
        sampler, active = jax.eval_shape(lambda: create_sampler(case.batch)), shape((case.batch,), jnp.bool_)
        decoding = generate_step.lower(model, variables, state(case.batch, lengths.decoded(case)), sampler, active)
        tokens = TokenBatch(shape((shards, lengths.chunk), jnp.int32), shape((shards,), jnp.int32))
        requests = shape((shards,), jnp.int32)
        chunk = exact_chunk.lower(model, variables, state(shards, lengths.prefilled(case)), requests, tokens)
        return _Programs(decoding.compile(), chunk.compile(), time.perf_counter() - begin)


def _decoding(
    model: Model, variables: Variables, case: Case, lengths: _Lengths, program: Compiled
) -> Callable[[int], None]:
    """Runs so many decode steps; they wait for each other, not for the host."""
    # Different tokens, which choose different experts.
    sampler = create_sampler(case.batch).replace(pending=jnp.asarray(_random_ids(model, case.batch)))
    sampler, active = _placed(model, (sampler, jnp.ones((case.batch,), bool)))
    carry = (filled_state(model.settings, case.batch, case.context, lengths.decoded(case) - case.context), sampler)

    def decode(count: int) -> None:
        nonlocal carry
        for _ in range(count):
            carry = program(variables, *carry, active)[:2]
        jax.block_until_ready(carry)

    return decode


def _prefilling(
    model: Model, variables: Variables, case: Case, lengths: _Lengths, program: Compiled
) -> Callable[[int], None]:
    """Prefills so many chunks of one request of every batch shard."""
    shards = model.settings.parallel.parts("batch")
    ids = jnp.asarray(_random_ids(model, shards * lengths.chunk).reshape(shards, -1))
    tokens = TokenBatch(ids, jnp.full(shards, lengths.chunk, jnp.int32))
    tokens, request = _placed(model, (tokens, jnp.zeros(shards, jnp.int32)))
    state = filled_state(model.settings, shards, case.context, lengths.prefilled(case) - case.context)

    def prefill(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, *_ = program(variables, state, request, tokens)
        jax.block_until_ready(state)

    return prefill


def _placed(model: Model, requests: Any) -> Any:
    """A tree with requests along the first axis of every leaf, on the model's mesh if it has one."""
    parallel = model.settings.parallel
    return requests if parallel.mesh is None else place(requests, parallel.spec("batch"), parallel)


def _random_ids(model: Model, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, model.settings.text.vocab_size, count).astype(np.int32)


def _seconds(run: Callable[[int], None], count: int, repeats: int, trace: pathlib.Path | None) -> float:
    """Median seconds of one of ``count`` steps that :func:`run` makes, after a first; then one more for a trace."""
    run(1)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(count)
        times.append((time.perf_counter() - begin) / count)
    if trace is not None:
        with jax.profiler.trace(str(trace)):
            run(1)
    return float(np.median(times))


def _launches(settings: Settings, name: str, program: Compiled) -> dict[str, int]:
    """All launches of a program, and those of a turn of its loop over Reuse layers."""
    table = settings.table
    groups = (*stack_plan(table.encoder), *stack_plan(table.decoder))
    run = max((run.count for group in groups for run in group.runs if run.kind.mode is Mode.REUSE), default=0)
    total, loops = launches(program.as_text())
    turns = [loop.launches for loop in loops if run > 1 and loop.trips == run]
    return {f"{name}_launches": total, f"{name}_reuse_launches": max(turns, default=0)}
