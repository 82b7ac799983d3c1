"""The training pass and its gradient: packed texts, padding, micro-batches, recomputation, replay, meshes.

Compiling is all that these tests take long for: they share one layout, one batch shape and a few programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dsv41.checkpoint.placement import flatten_tree
from dsv41.declared import declared_variables
from dsv41.model import Model, TokenBatch
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.sharding.rules import MeshError
from dsv41.state.request import create_sequential_state
from dsv41.steps.prefill import decode_and_commit, encode_and_commit
from dsv41.training.forward import TrainBatch, alignment, forward
from dsv41.training.losses import LossConfig
from dsv41.training.optimizers import OptimizerConfig, parameter_groups
from dsv41.training.placement import abstract_masters
from dsv41.training.step import Counts, Recipe, Sums, loss_and_gradient, train_step
from dsv41.training.update import TrainState, Update, masters
from tests.helpers import random_model, random_tokens, with_text
from tests.test_sharded_steps import WIDE, divided, meshed

# As encoder a Full layer with an Engram, as decoder a Full layer with candidate pool and a Reindex layer.
LAYOUT = WIDE | {
    "num_hidden_layers": 3,
    "compress_ratios": (2, 1, 1),
    "kv_source_layer_ids": (0, 1),
    "index_source_layer_ids": (0, 1, 2),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (0,),
}
ROWS, LENGTH, MICRO = 8, 64, 4
# Texts shorter and longer than the window (16), of odd and even lengths, one of a single token.
TEXTS = (21, 1, 30, 40, 9)

_gradient = jax.jit(loss_and_gradient, static_argnums=0)
_forward = jax.jit(forward, static_argnums=0)


@functools.cache
def model_of(remat: str = "nothing") -> Model:
    config = random_model(False, **LAYOUT)[0].settings.config
    settings = Settings.for_training(config, RoundingPolicy.preset("off"), remat)
    return Model(dataclasses.replace(settings, page_tokens=8))


@functools.cache
def variables() -> dict:
    made = random_model(False, **LAYOUT)[1]
    return made | {"params": masters(made["params"])}


@functools.cache
def update() -> Update:
    """Its state holds the gradient of the first step."""
    groups = parameter_groups(OptimizerConfig(), declared_variables(model_of()))
    return Update.of(optax.sgd(0.1, momentum=0.9), groups, bias_rate=0.001)


def recipe(model: Model, **losses) -> Recipe:
    every = {"balance": 0.01, "z_loss": 0.001, "index_distillation": 0.5}
    return Recipe(model, LossConfig(**every | losses), update())


def texts() -> list[np.ndarray]:
    return [random_tokens(i, n) for i, n in enumerate(TEXTS)]


def packed(rows: list[list[np.ndarray]], padding: int = 0) -> TrainBatch:
    """Rows of texts, each at the next aligned column; rows without any fill up the batch."""
    step = alignment(model_of().settings)
    tokens = np.full((ROWS, LENGTH), padding, np.int32)
    targets, documents = np.full_like(tokens, -1), np.full_like(tokens, -1)
    for row, parts in enumerate(rows):
        column = 0
        for text in parts:
            tokens[row, column : column + len(text)] = text
            targets[row, column : column + len(text) - 1] = text[1:]
            documents[row, column : column + len(text)] = column
            column += -(-len(text) // step) * step
    return TrainBatch(*map(jnp.asarray, (tokens, targets, documents)))


def full() -> TrainBatch:
    """Rows of unequal loads; one of the micro-batches is nearly empty."""
    a, b, c, d, e = texts()
    return packed([[a, b, c], [d, e], [e, d], [c, b], [b], [], [a], [d]])


def gradient_of(recipe: Recipe, batch: TrainBatch, params=None, constants=None) -> tuple[Sums, dict]:
    params = variables()["params"] if params is None else params
    constants = variables()["constants"] if constants is None else constants
    sums, gradient = _gradient(recipe, params, constants, batch, None, Counts.of(batch))
    return sums, {path: np.asarray(leaf) for path, leaf in flatten_tree(gradient).items()}


@functools.cache
def of_full() -> tuple[Sums, dict]:
    return gradient_of(recipe(model_of()), full())


def assert_close(ours: dict, wanted: dict, relative: float):
    assert ours.keys() == wanted.keys()
    for path, value in wanted.items():
        error = np.linalg.norm(ours[path][tuple(map(slice, value.shape))] - value)
        assert error <= relative * max(np.linalg.norm(value), 1e-6), "/".join(path)


def test_packed_texts_see_nothing_of_each_other():
    """Loss, loads and every gradient are those of the texts in rows of their own."""
    a, b, c, d, e = texts()
    sums, gradient = gradient_of(recipe(model_of()), packed([[a, b, c], [d, e]]))
    alone, wanted = gradient_of(recipe(model_of()), packed([[text] for text in texts()]))
    for ours, theirs in zip(jax.tree.leaves(sums), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_close(gradient, wanted, 1e-4)
    without = {path[-1] for path, g in wanted.items() if not g.any()}
    assert without <= {"bias", "bias_vl"}


def test_what_stands_in_padding_changes_nothing():
    a, b, c, d, e = texts()
    zeros, sevens = (gradient_of(recipe(model_of()), packed([[a, b, c], [d, e]], padding)) for padding in (0, 7))
    np.testing.assert_array_equal(sevens[0].loss, zeros[0].loss)
    assert_close(sevens[1], zeros[1], 0.0)
    # Nothing is counted where there is nothing else.
    nothing, gradient = gradient_of(recipe(model_of()), packed([], 7))
    assert not any(np.asarray(x).any() for x in (*jax.tree.leaves(nothing), *gradient.values()))


def hidden(batch: TrainBatch, cut: int = LENGTH) -> np.ndarray:
    return np.asarray(_forward(model_of(), variables(), batch, jnp.full(ROWS, cut)).hidden)


def test_a_text_changes_nothing_in_its_neighbours():
    a, b, c, d, e = texts()
    x = hidden(packed([[a, b, c], [d, e]]))
    y = hidden(packed([[a, b, random_tokens(9, len(c))], [random_tokens(8, len(d)), e]]))
    step = alignment(model_of().settings)
    begin = -(-len(d) // step) * step
    np.testing.assert_array_equal(x[0, : len(a)], y[0, : len(a)])
    np.testing.assert_array_equal(x[1, begin : begin + len(e)], y[1, begin : begin + len(e)])
    assert (x[1, : len(d)] != y[1, : len(d)]).any()


def test_a_cut_is_a_replay():
    """The decoder's outputs from the cut on are those of an inference that replays from there; before it, exact."""
    model, text, cut = model_of(), random_tokens(4, 48), 23
    batch = packed([[text]])
    exact, ours = hidden(batch), hidden(batch, cut)

    @jax.jit
    def replay(variables: dict) -> jax.Array:
        state = create_sequential_state(model.settings, 1, LENGTH)
        tokens = TokenBatch(batch.tokens[:1], jnp.asarray([len(text)], jnp.int32))
        state, segment = encode_and_commit(model, variables, state, tokens)
        tail = jax.tree.map(lambda x: x[:, cut : len(text)] if x.ndim > 1 else x, segment)
        tail = tail.replace(start=jnp.asarray([cut], jnp.int32), count=jnp.asarray([len(text) - cut], jnp.int32))
        return decode_and_commit(model, variables, state, tail)[1].hidden

    np.testing.assert_allclose(ours[:1, cut : len(text)], replay(variables()), atol=1e-4)
    np.testing.assert_array_equal(ours[0, :cut], exact[0, :cut])
    assert np.abs(ours[0, cut : cut + 8] - exact[0, cut : cut + 8]).max() > 1e-3


def primitives(jaxpr: Any) -> Counter:
    """How often each primitive stands in a program, inner ones included."""
    found = Counter()
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                found += primitives(getattr(value, "jaxpr", value))
    return found


def test_recomputed_layers_keep_their_choices():
    """The backward pass has no top-k of its own, and as many products as it was told. They are counted in a decoder: a
    Full layer with candidate pool and a Reindex layer."""
    decoder = {
        "num_hidden_layers": 2,
        "compress_ratios": (1, 1),
        "kv_source_layer_ids": (0,),
        "index_source_layer_ids": (0, 1),
        "candidate_source_layer_id": 0,
        "engram_layer_ids": (),
        "engram_num_embeddings": (),
    }
    counts = {}
    for remat in ("nothing", "products", "choices"):
        settings = model_of(remat).settings
        model = Model(dataclasses.replace(settings, config=with_text(settings.config, **decoder)))
        arguments = (abstract_masters(model), variables()["constants"], full(), None, Counts.of(full()))
        counts[remat] = primitives(_gradient.trace(recipe(model), *arguments).jaxpr)
    assert counts["choices"]["top_k"] == counts["products"]["top_k"] == counts["nothing"]["top_k"] > 0
    products = {remat: count["dot_general"] for remat, count in counts.items()}
    assert products["nothing"] < products["products"] < products["choices"]


@functools.cache
def one_step(poisoned: bool = False) -> tuple[TrainState, dict]:
    """After a step of micro-batches whose layers are recomputed, and whose indexers are not trained."""
    batches = jax.tree.map(lambda x: x.reshape(MICRO, -1, LENGTH), full())
    r = recipe(model_of("choices"), index_distillation=0.0)
    params = jax.tree.map(jnp.copy, poisoned_params() if poisoned else variables()["params"])
    return train_step(r, r.update.begin(params), variables()["constants"], batches)


def poisoned_params() -> dict:
    params = dict(variables()["params"])
    return params | {"head": {"weight": params["head"]["weight"].at[3, 5].set(jnp.nan)}}


def test_recomputed_micro_batches_of_unequal_lengths_are_one_batch():
    """Metrics and gradient part by part are those of all rows at once, where nothing is recomputed."""
    state, metrics = one_step()
    sums, wanted = of_full()
    count = Counts.of(full())
    expected = {
        "loss": sums.loss - 0.5 * sums.divergence / count.tokens,
        "cross_entropy": sums.cross_entropy / count.targets,
        "accuracy": sums.correct / count.targets,
        "z": sums.squared / count.targets,
        "balance": sums.balance / count.tokens / model_of().settings.text.num_hidden_layers,
        "index_divergence": 0,
        "tokens": sum(len(text) - 1 for text in (*texts(), *texts(), texts()[3])),
        "skipped": 0,
        "bad": -1,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    gradient = {path: np.asarray(leaf) for path, leaf in flatten_tree(state.optimizer[0].trace).items()}
    others = {path: g for path, g in gradient.items() if "indexer" not in path}
    assert_close(others, {path: wanted[path] for path in others}, 1e-4)
    before, after = flatten_tree(variables()["params"]), flatten_tree(state.params)
    for path, g in gradient.items():
        if "bias" not in path[-1]:
            moved = np.asarray(before[path]) - np.float32(0.1) * g
            np.testing.assert_allclose(after[path], moved, rtol=1e-6, atol=1e-8, err_msg="/".join(path))


def test_distillation_trains_indexers_alone():
    """Other gradients are as without it, see the micro-batches."""
    without = flatten_tree(one_step()[0].optimizer[0].trace)
    sums, ours = of_full()
    assert sums.divergence > 0
    indexers = [path for path in ours if "indexer" in path]
    assert len(indexers) > 2 * model_of().settings.text.num_hidden_layers
    for path in indexers:
        assert not np.asarray(without[path]).any(), path
        assert np.linalg.norm(ours[path]) > 0, path


def test_biases_move_toward_balance():
    state, _ = one_step()
    before, now = flatten_tree(variables()["params"]), flatten_tree(state.params)
    sums, _ = of_full()
    assert len(sums.text) == model_of().settings.text.num_hidden_layers
    for router, load in sums.text.items():
        path = (*router.split("/"), "bias")
        wanted = 0.001 * np.sign(np.mean(load, -1, keepdims=True) - load)
        np.testing.assert_allclose(now[path] - before[path], wanted, atol=1e-7)
        image = (*router.split("/"), "bias_vl")
        np.testing.assert_array_equal(now[image], before[image])


def test_a_step_that_is_not_finite_changes_nothing_and_names_the_tensor():
    after, metrics = one_step(poisoned=True)
    assert metrics["skipped"] == 1
    assert int(after.step) == 1
    before = flatten_tree(poisoned_params())
    paths = sorted(before)
    assert paths[int(metrics["bad"])] == min(p for p in paths if p[-1] not in ("bias", "bias_vl"))
    for path, x in flatten_tree(after.params).items():
        np.testing.assert_array_equal(x, before[path], err_msg="/".join(path))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(after.optimizer))


def test_devices_change_no_gradient():
    """Data, experts, heads, vocabulary and tables are all divided; a text is where its row is."""
    model = meshed(model_of(), {"data": 2, "expert": 2, "tensor": 2})
    there = divided(model, variables())
    constants = jax.tree.map(np.asarray, there["constants"])
    sums, ours = gradient_of(recipe(model), full(), there["params"], constants)
    one, wanted = of_full()
    for x, y in zip(jax.tree.leaves(sums), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert_close(ours, wanted, 1e-4)
    for path, value in wanted.items():  # rows that a mesh gives a table behind its own
        behind = ours[path].copy()
        behind[tuple(map(slice, value.shape))] = 0
        assert not behind.any(), "/".join(path)


def test_training_refuses_a_divided_context():
    model = meshed(model_of(), {"context": 2})
    with pytest.raises(MeshError, match="context: 2 shards"):
        _gradient(recipe(model), variables()["params"], variables()["constants"], full(), None, Counts.of(full()))
