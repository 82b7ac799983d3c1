"""Steps on meshes of eight pretended devices, against the same steps on one.

The chunks are longer than the window: where the context is divided, so are they.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.declared import abstract_variables
from dsv41.model import Model, TokenBatch
from dsv41.sharding.mesh import parse_preset
from dsv41.state.request import ModelState, create_state
from dsv41.steps.decode import decode_step
from dsv41.steps.prefill import exact_chunk
from tests.helpers import TWO_LAYERS, assert_close, owned, poison_contents, random_model

# mini8 with as many heads, groups and experts as eight devices want, in a layout that is quick to compile.
WIDE = {
    "num_attention_heads": 8,
    "o_groups": 8,
    "n_routed_experts": 16,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "compress_ratios": (2, 1, 1),
    "kv_source_layer_ids": (0, 1),
    "index_source_layer_ids": (0, 1, 2),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (1,),
    "dspark_target_layer_ids": (),
}
SHORT = WIDE | TWO_LAYERS
SLOTS, TABLE_PAGES, CHUNK, STEPS = 8, 16, 32, 2
MESHES = (
    {"expert": 8},
    {"tensor": 8},
    {"data": 8},
    {"data": 2, "expert": 2, "tensor": 2},
    {"context": 2},
    {"data": 2, "context": 2, "tensor": 2},
)
# Meshes that compile a decode step too, each for an axis of its own; others take single tokens as short chunks.
DECODING = MESHES[3], MESHES[5]
# With the layer that selects anew among candidates.
REINDEXING = MESHES[5:]
# Live tokens of two chunks. The first one leaves open groups of two; those of the second begin and end in any column.
COUNTS = ([CHUNK, 1, 7, 20, 31, 16, 2, 9], [5, CHUNK, 31, 18, 0, 17, CHUNK, 30])


def meshed(model: Model, axes: dict[str, int], dispatch: str = "auto") -> Model:
    """The model divided over the first devices."""
    preset = parse_preset("test", {"axes": axes, "dispatch": dispatch})
    parallel = preset.parallel(jax.devices()[: preset.devices])
    return Model(dataclasses.replace(model.settings, parallel=parallel))


def divided(model: Model, variables: dict) -> dict:
    """Variables of one device on the model's mesh, tables padded to whole parts."""

    def put(leaf: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        padding = [(0, new - old) for old, new in zip(leaf.shape, target.shape, strict=True)]
        return jax.device_put(np.pad(np.asarray(leaf), padding), target.sharding)

    return variables | {"params": jax.tree.map(put, variables["params"], abstract_variables(model))}


_create = jax.jit(create_state, static_argnums=(0, 1, 2, 3))


def fresh(model: Model) -> ModelState:
    """Every request holds its own pages, in an order of its own.

    Numbers count from the pool of its batch shard, of which shard c of the context has page c of each C.
    """
    parallel = model.settings.parallel
    shards = parallel.parts("batch")
    state = _create(model.settings.whole, SLOTS, SLOTS * TABLE_PAGES, TABLE_PAGES)
    each = SLOTS // shards * TABLE_PAGES
    contexts = dict(parallel.axes).get("context", 1)
    table = np.empty((shards, SLOTS // shards, TABLE_PAGES), np.int32)
    for shard, context in np.ndindex(shards, contexts):
        pages = np.random.default_rng(shard).permutation(each // contexts) + context * each // contexts
        table[shard, :, context::contexts] = pages.reshape(-1, TABLE_PAGES // contexts)
    state = state.replace(page_table=jnp.asarray(table.reshape(SLOTS, TABLE_PAGES)))
    # Bound, where there is no mesh to place it on: a step would be compiled for it and once more for what it returns.
    return jax.device_put(state, jax.local_devices()[0]) if parallel.mesh is None else state


def requests_of(model: Model, state: ModelState) -> list[dict[str, np.ndarray]]:
    """What every request owns, wherever it lies."""
    shards = model.settings.parallel.parts("batch")
    state = jax.tree.map(np.asarray, state)
    pools = np.repeat(np.arange(shards), SLOTS // shards)[:, None] * (SLOTS // shards * TABLE_PAGES)
    state = state.replace(page_table=state.page_table + pools)
    return [owned(state, slot) for slot in range(SLOTS)]


def rollout(model: Model, variables: dict, decodes: bool) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
    """Two chunks of every request with some single tokens between, in each of which a request is inactive.

    Returns:
      the logits, and what the requests own in the end.
    """
    state = fresh(model)
    if model.settings.parallel.mesh is not None:  # the one device that they are compared with never saw a NaN
        state = poison_contents(state)
    rng = np.random.default_rng(0)
    vocab = model.settings.text.vocab_size
    shards = model.settings.parallel.parts("batch")
    rows = np.tile(np.arange(SLOTS // shards, dtype=np.int32), shards)
    out: list[np.ndarray] = []

    def chunk(state: ModelState, tokens: np.ndarray, count: np.ndarray) -> ModelState:
        batch = TokenBatch(tokens.astype(np.int32), count.astype(np.int32))
        state, logits, _ = exact_chunk(model, variables, state, rows, batch)
        out.append(np.asarray(logits)[count > 0])
        return state

    def single(state: ModelState, tokens: np.ndarray, active: np.ndarray) -> ModelState:
        if not decodes:
            return chunk(state, np.pad(tokens[:, None], [(0, 0), (0, CHUNK - 1)]), active)
        state, logits = decode_step(model, variables, state, tokens.astype(np.int32), active)
        out.append(np.asarray(logits)[active])
        return state

    state = chunk(state, rng.integers(0, vocab, (SLOTS, CHUNK)), np.array(COUNTS[0]))
    for i in range(STEPS):
        state = single(state, rng.integers(0, vocab, SLOTS), np.arange(SLOTS) != i)
    state = chunk(state, rng.integers(0, vocab, (SLOTS, CHUNK)), np.array(COUNTS[1]))
    return out, requests_of(model, state)


@functools.cache
def alone(reindexing: bool) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
    """The rollout on one device."""
    model, variables = wide(reindexing)
    return rollout(model, variables, decodes=False)


def wide(reindexing: bool) -> tuple[Model, dict]:
    return random_model(False, **(WIDE if reindexing else SHORT))


def assert_same(axes: dict[str, int], dispatch: str, decodes: bool):
    """The rollout on a mesh is that of one device."""
    reindexing = axes in REINDEXING
    model, variables = wide(reindexing)
    model = meshed(model, axes, dispatch)
    logits, requests = rollout(model, divided(model, variables), decodes)
    wanted_logits, wanted_requests = alone(reindexing)
    for ours, wanted in zip(logits, wanted_logits, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(ours.argmax(-1), wanted.argmax(-1))
    for ours, wanted in zip(requests, wanted_requests, strict=True):
        assert_close(ours, wanted)


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(f"{a}{n}" for a, n in axes.items()))
def test_a_mesh_gives_the_logits_of_one_device(axes):
    assert_same(axes, "auto", axes in DECODING)


def test_exchanging_rows_gives_the_logits_of_one_device():
    """These batches are so small that rows are gathered unless the mesh says otherwise."""
    assert_same({"expert": 8}, "exchange", decodes=True)
