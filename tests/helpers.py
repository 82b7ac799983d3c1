"""What the model's tests share: states of shuffled pages, drivers of the jitted steps, comparisons of states."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig, load_config
from dsv41.layer_table import layer_table
from dsv41.loading import random_variables
from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.state.memory import SourcePool
from dsv41.state.request import ModelState, create_state
from dsv41.state.ring import Ring
from dsv41.steps.decode import decode_step
from dsv41.steps.prefill import exact_chunk
from dsv41.verification.capture import Layers, by_layer, captured_forward
from tests.conftest import GOLDEN, PAGE_TOKENS, ROUNDING_ALIKE

# One shape for every state and every chunk of these tests, because each new one compiles the model again.
SLOTS = 4
CAPACITY = 256
WIDTH = 64
SPARE_PAGES = 5
ALL_SLOTS = tuple(range(SLOTS))

# What unallocated slots of a page table and padded tokens may hold.
STRAY = (-1, 2**31 - 1, -(2**31), 10**6, 0)

SMALL_LAYOUT = {
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "compress_ratios": (2, 2, 1, 1),
    "kv_source_layer_ids": (0, 1, 2),
    "index_source_layer_ids": (0, 1, 2, 3),
    "candidate_source_layer_id": 2,
    "engram_layer_ids": (1,),
    "dspark_target_layer_ids": (),
}
"""The changes to mini8's text configuration that make little to compile: as encoder a loop of two Full layers, as
decoder a Full layer with candidate pool and a Reindex layer."""

TWO_LAYERS = {
    "num_hidden_layers": 2,
    "compress_ratios": (2, 1),
    "kv_source_layer_ids": (0, 1),
    "index_source_layer_ids": (0, 1),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (0,),
}
"""As encoder a Full layer with an Engram, as decoder one with a candidate pool. Changes to a layout without drafter."""


def mini8_config() -> ModelConfig:
    """The small golden's configuration in float32."""
    return load_config(GOLDEN / "mini8" / "f32")


def with_text(config: ModelConfig, **fields) -> ModelConfig:
    """The configuration with some fields of its ``text_config`` replaced."""
    return dataclasses.replace(config, text=dataclasses.replace(config.text, **fields))


def random_model(cache_rounding: bool, **text_fields) -> tuple[Model, dict]:
    """A model of mini8's sizes in another layout, with random weights; those of one layout are made once."""
    fields = tuple(sorted(text_fields.items()))
    return _random_model(cache_rounding, fields), _random_variables(fields)


@functools.cache
def _random_model(cache_rounding: bool, text_fields: tuple) -> Model:
    config = with_text(mini8_config(), **dict(text_fields))
    page_tokens = math.lcm(PAGE_TOKENS, *layer_table(config.text).ratios)
    return Model(Settings.default(config, cache_rounding=cache_rounding, page_tokens=page_tokens))


@functools.cache
def _random_variables(text_fields: tuple) -> dict:
    return random_variables(_random_model(False, text_fields), 3, None)


def random_tokens(seed: int, *shape: int) -> np.ndarray:
    """Tokens of the small vocabularies, none of them special."""
    return np.random.default_rng(seed).integers(3, 490, shape).astype(np.int32)


# States. Made, poisoned and copied by a program each: run operation by operation, every shape would compile one.

_create = jax.jit(create_state, static_argnums=(0, 1, 2, 3))


def fresh_state(settings: Settings, seed: int = 0, slots: int = SLOTS) -> ModelState:
    """An empty state: every slot holds pages for CAPACITY tokens, in an order that the seed decides; some are spare.

    It is bound to a device, as the states that steps return are: an unbound one would compile every step twice.
    """
    table_pages = -(-CAPACITY // settings.page_tokens)
    pages = slots * table_pages + SPARE_PAGES
    order = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    table = order[: slots * table_pages].reshape(slots, table_pages)
    state = _create(settings, slots, pages, table_pages).replace(page_table=jnp.asarray(table))
    return jax.device_put(state, jax.local_devices()[0])


def poisoned(tree):
    """The same tree of NaN: 0xFF bytes are NaN or infinite scales, and codes that no rounding of zeros gives."""
    return jax.tree.map(lambda x: jnp.full_like(x, 0xFF if x.dtype == jnp.uint8 else jnp.nan), tree)


@jax.jit
def poison_contents(state: ModelState) -> ModelState:
    """The state of empty requests with NaN in every page, ring slot and tail."""

    def ring(old: Ring) -> Ring:
        return old.replace(entries=poisoned(old.entries))

    return state.replace(
        memory=poisoned(state.memory),
        encoder_ring=ring(state.encoder_ring),
        decoder_ring=ring(state.decoder_ring),
        tails=poisoned(state.tails),
    )


@jax.jit
def copied(state: ModelState) -> ModelState:
    """A copy that survives the donation of the state."""
    return jax.tree.map(jnp.copy, state)


@jax.jit
def lost_rings(state: ModelState, begin: np.ndarray | int = 0) -> ModelState:
    """Pages as they are; everything else that requests own is gone, and what lay there is NaN."""
    empty = poison_contents(state)

    def ring(old: Ring) -> Ring:
        return old.replace(positions=jnp.full_like(old.positions, -1))

    return empty.replace(
        memory=state.memory,
        encoder_ring=ring(empty.encoder_ring),
        decoder_ring=ring(empty.decoder_ring),
        ngram_tail=jnp.full_like(state.ngram_tail, -1),
        length=jnp.full_like(state.length, begin),
    )


# Steps


def chunk(tokens: Mapping[int, Sequence[int]], width: int = WIDTH, padding: Sequence[int] = (0,)) -> TokenBatch:
    """A batch of one row a slot; slots that are not named are inactive.

    Args:
      tokens: live tokens by slot, at most ``width`` each.
      padding: what padded positions hold, repeated.
    """
    grid = np.resize(np.array(padding, np.int32), (SLOTS, width))
    count = np.zeros(SLOTS, np.int32)
    for slot, row in tokens.items():
        count[slot] = len(row)
        grid[slot, : len(row)] = row
    return TokenBatch(jnp.asarray(grid), jnp.asarray(count))


def exact(
    model: Model,
    variables: dict,
    state: ModelState,
    tokens: Mapping[int, Sequence[int]],
    width: int = WIDTH,
    padding: Sequence[int] = (0,),
) -> tuple[ModelState, np.ndarray]:
    """One chunk of every named slot through all layers; logits ``[slots, vocab]`` of the last live tokens."""
    rows = jnp.arange(SLOTS, dtype=jnp.int32)
    state, logits, _ = exact_chunk(model, variables, state, rows, chunk(tokens, width, padding))
    return state, np.asarray(logits)


def forward(
    model: Model,
    variables: dict,
    state: ModelState,
    tokens: Mapping[int, Sequence[int]],
    padding: Sequence[int] = (0,),
    is_image: np.ndarray | None = None,
    embeddings: np.ndarray | None = None,
) -> tuple[ModelState, np.ndarray, Layers]:
    """One chunk through all layers with what lies inside; the state is not donated.

    Args:
      is_image: bool ``[slots, width]``, none by default.
      embeddings: ``[slots, width, d]``, NaN by default: only those at image positions may be read.

    Returns:
      state, logits ``[slots, width, vocab]`` of every position, and the layers' values ``[slots, width, …]``.
    """
    batch = chunk(tokens, WIDTH, padding)
    shape = (*batch.tokens.shape, model.settings.text.hidden_size)
    batch = batch.replace(
        is_image=jnp.asarray(np.zeros(shape[:2], bool) if is_image is None else is_image),
        embeddings=jnp.asarray(np.full(shape, np.nan, np.float32) if embeddings is None else embeddings),
    )
    state, logits, _, _, inside = captured_forward(model, variables, state, batch, None)
    return state, np.asarray(logits), by_layer(model.settings, inside)


def decode(
    model: Model, variables: dict, state: ModelState, tokens: Mapping[int, int]
) -> tuple[ModelState, np.ndarray]:
    """One decode step of the named slots; logits ``[slots, vocab]``."""
    ids, active = np.full(SLOTS, -1, np.int32), np.zeros(SLOTS, bool)
    for slot, token in tokens.items():
        ids[slot], active[slot] = token, True
    state, logits = decode_step(model, variables, state, jnp.asarray(ids), jnp.asarray(active))
    return state, np.asarray(logits)


@functools.cache
def rounding_alike(step):
    """A step compiled so that a value rounds as in every other program; the suite's others compile sooner."""
    compiled = {}

    def run(model: Model, *arguments):
        key = (model, jax.tree.structure(arguments), *map(jax.typeof, jax.tree.leaves(arguments)))
        if key not in compiled:
            compiled[key] = step.lower(model, *arguments).compile(compiler_options=ROUNDING_ALIKE)
        return compiled[key](*arguments)

    return run


# Comparisons


def entry_rows(pool: SourcePool, pages: np.ndarray) -> np.ndarray:
    """Bytes of the entries on some pages, in order: uint8 ``[sources, entries, bytes of an entry]``."""
    parts = []
    for leaf in jax.tree.leaves(pool):
        leaf = np.asarray(leaf)[:, pages]
        width = leaf.shape[-1] * leaf.dtype.itemsize
        parts.append(
            np.ascontiguousarray(leaf).view(np.uint8).reshape(leaf.shape[0], leaf.shape[1] * leaf.shape[2], width)
        )
    return np.concatenate(parts, axis=-1)


def entries_of(state: ModelState, ratio: int, slot: int) -> np.ndarray:
    """Bytes of all entries that a slot has room for, ``[sources, entries, bytes]``."""
    return entry_rows(state.memory[ratio], np.asarray(state.page_table)[slot])


def changed_entries(before: ModelState, after: ModelState, ratio: int, slot: int) -> np.ndarray:
    """Which entries of a slot differ, bool ``[sources, entries]``."""
    return (entries_of(before, ratio, slot) != entries_of(after, ratio, slot)).any(-1)


def owned(state: ModelState, slot: int) -> dict[str, np.ndarray]:
    """All that a request's future depends on: its entries, live ring slots, open groups, history, length."""
    length = int(state.length[slot])
    parts: dict[str, np.ndarray] = {"length": np.asarray(length), "ngram_tail": np.asarray(state.ngram_tail[slot])}
    for ratio, pool in state.memory.items():
        pages = np.asarray(state.page_table)[slot, : -(-(length // ratio) // pool.main.payload.shape[2])]
        parts[f"memory {ratio}"] = entry_rows(pool, pages)[:, : length // ratio]
    for name in ("encoder_ring", "decoder_ring"):
        ring: Ring = getattr(state, name)
        positions = np.asarray(ring.positions[slot])
        parts[f"{name} positions"] = positions
        for i, leaf in enumerate(jax.tree.leaves(ring.entries)):
            parts[f"{name} {i}"] = np.asarray(leaf)[:, slot, positions >= 0]
    for ratio, tail in state.tails.items():
        parts[f"tail {ratio} kv"] = np.asarray(tail.kv)[:, slot, : length % ratio]
        parts[f"tail {ratio} gate"] = np.asarray(tail.gate)[:, slot, : length % ratio]
    return parts


def assert_same_bytes(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
    """Equal to the bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


def assert_close(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], tolerance: float = 1e-4) -> None:
    """Equal up to a tolerance; integers exactly. For states whose cache rounding is off (float32 throughout)."""
    assert a.keys() == b.keys()
    for name in a:
        left, right = a[name], b[name]
        if name.startswith("memory"):
            left, right = left.view(np.float32), right.view(np.float32)
        assert left.dtype == right.dtype, name
        if left.dtype == np.float32:
            np.testing.assert_allclose(left, right, rtol=0, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(left, right, err_msg=name)
