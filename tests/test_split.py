"""Columns of a long chunk over the context: whose they are, what a device computes of them, rows of several texts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv41.declared import abstract_variables
from dsv41.model import Model, TokenBatch
from dsv41.planning.collectives import collectives, equations
from dsv41.planning.ledger import step_ledger
from dsv41.planning.parameters import held_parameters
from dsv41.planning.spread import Spread
from dsv41.planning.steps import Step
from dsv41.sharding.load import expert_load
from dsv41.sharding.mesh import parse_preset
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import MeshError
from dsv41.sharding.split import Split
from dsv41.sharding.steps import REQUESTS, STATE, VARIABLES, sharded_step
from dsv41.steps.decode import forward_tokens
from tests.helpers import assert_close, poison_contents, random_model
from tests.test_sharded_steps import CHUNK, SLOTS, divided, fresh, meshed, requests_of

# A layer of the window only, and one KV source of each ratio, of which the second has the candidate pool.
LAYOUT = {
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "compress_ratios": (0, 2, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2),
    "candidate_source_layer_id": 2,
    "engram_layer_ids": (1,),
    "dspark_target_layer_ids": (),
}
SHARDS = 4  # with fewer columns each than the window has
TEXTS = (
    [(0, 5), (6, 20), (20, 32)],
    [(0, 32)],
    [(8, 15), (18, 31)],
    [(30, 32)],
    [],
    [(begin, begin + 2) for begin in range(0, 32, 2)],
    [(14, 18)],
    [(2, 23)],
)
PICTURES = [(1, 5, 12), (7, 14, 18)]  # rows and columns

forward = sharded_step(1, (2,), (VARIABLES, STATE, REQUESTS), (STATE, REQUESTS))(forward_tokens)


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model, dict]:
    """On one device, on the context's shards, and the variables of the first."""
    model, variables = random_model(False, **LAYOUT)
    return model, meshed(model, {"context": SHARDS}), variables


def rows_of_texts(width: int) -> TokenBatch:
    """Rows of several texts, some with pictures; embeddings that nobody may read are NaN."""
    documents = np.full((SLOTS, CHUNK), -1, np.int32)
    for row, texts in enumerate(TEXTS):
        for begin, end in texts:
            documents[row, begin:end] = begin
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 490, (SLOTS, CHUNK)).astype(np.int32)
    is_image, embeddings = np.zeros((SLOTS, CHUNK), bool), np.full((SLOTS, CHUNK, width), np.nan, np.float32)
    for row, begin, end in PICTURES:
        is_image[row, begin:end] = True
        embeddings[row, begin:end] = rng.standard_normal((end - begin, width)) / 50
    return TokenBatch(tokens, np.full(SLOTS, CHUNK, np.int32), is_image, embeddings, documents)


def test_rows_of_several_texts_are_split_like_others(models):
    model, on_mesh, variables = models
    batch = rows_of_texts(model.settings.text.hidden_size)
    state, wanted = forward(model, variables, fresh(model), batch)
    ours_state, ours = forward(on_mesh, divided(on_mesh, variables), poison_contents(fresh(on_mesh)), batch)
    live = batch.documents >= 0
    np.testing.assert_allclose(np.asarray(ours)[live], np.asarray(wanted)[live], rtol=0, atol=1e-4)
    for one, other in zip(requests_of(on_mesh, ours_state), requests_of(model, state), strict=True):
        assert_close(one, other)


def traced(model: Model, variables: dict) -> Any:
    """A device's program."""
    params = {"params": abstract_variables(model), "constants": variables["constants"]}
    return forward.trace(model, params, fresh(model), rows_of_texts(model.settings.text.hidden_size)).jaxpr


def token_rows(model: Model, variables: dict) -> set[int]:
    """Of how many tokens a device's program multiplies values as wide as the streams with a matrix, or with experts."""
    width, rows = model.settings.text.hidden_size, set()
    for equation, _ in equations(traced(model, variables), 1):
        if equation.primitive.name != "dot_general":
            continue
        x, matrix = (v.aval.shape for v in equation.invars)
        (contracted, _), (batched, _) = equation.params["dimension_numbers"]
        if [x[i] for i in contracted] == [width] and len(matrix) == 2 + len(batched) and matrix[-1] == width:
            rows.add(int(np.prod([n for i, n in enumerate(x) if i not in (*contracted, *batched)])))
    return rows


def test_a_device_computes_its_own_columns(models):
    model, on_mesh, variables = models
    whole = SLOTS * CHUNK
    # The head has every position's hidden values, which all devices get.
    assert token_rows(model, variables) == {whole}
    assert token_rows(on_mesh, variables) == {whole // SHARDS, whole}


def test_the_plan_counts_what_crosses(models):
    """To what it leaves out: the numbers of Engram's rows."""
    _, on_mesh, variables = models
    preset = parse_preset("test", {"axes": {"context": SHARDS}})
    held, step = held_parameters(on_mesh.settings, preset), Step(CHUNK, 0, logits=CHUNK)
    links = step_ledger(on_mesh.settings, held, Spread(preset), step, SLOTS).total.links
    found = collectives(traced(on_mesh, variables), preset.axes)
    assert links == pytest.approx(sum(c.bytes for c in found), rel=0.01)
    assert {c.kind for c in found} == {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}


def parallel_of(axes: dict[str, int], rules: dict[str, list[str]] | None = None) -> Parallel:
    return parse_preset("test", {"axes": axes, "rules": rules or {}}).sizes


def test_long_steps_that_the_shards_divide_are_split():
    parallel = parallel_of({"data": 2, "context": 4})
    assert Split.of(parallel, 32, 16).places == ("context",)
    assert Split.of(parallel, 16, 16).places == ()
    assert Split.of(parallel, 30, 16).places == ()
    assert Split.of(parallel_of({"tensor": 8}), 32, 16).places == ()
    assert Split.of(parallel_of({"context": 4}, {"chunk": []}), 32, 16).places == ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mlp": ["context", "tensor"]}, "logical axes 'chunk' and 'mlp' both lie on mesh axis 'context'"),
        ({"chunk": ["data"]}, "logical axes 'chunk' and 'batch' both lie on mesh axis 'data'"),
        ({"batch": [], "chunk": ["data"]}, "'chunk' lies on mesh axes data, but a request's pages on context × data"),
    ],
)
def test_columns_on_a_used_axis_are_refused(rules: dict[str, list[str]], message: str):
    with pytest.raises(MeshError, match=message):
        Split.of(parallel_of({"data": 2, "context": 2}, rules), 32, 16)


def test_columns_of_texts_are_counted_once():
    """A token's experts count on the device that has its column, and on all devices that have the same once."""
    preset = parse_preset("test", {"axes": {"data": 2, "context": 2, "tensor": 2}})
    parallel = preset.parallel(jax.devices()[: preset.devices])
    split = Split.of(parallel, 8, 4)
    routed = np.random.default_rng(0).integers(0, 7, (2, 8, 3)).astype(np.int32)
    load = functools.partial(expert_load, num_experts=6, parallel=parallel, split=split)
    count = jax.shard_map(
        lambda experts: load(split.own(experts)),
        mesh=parallel.mesh,
        in_specs=parallel.spec("batch"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(count)(routed), np.bincount(routed.ravel(), minlength=7)[:6])
