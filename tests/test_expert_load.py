"""Counting the tokens of each expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.model import TokenBatch
from dsv41.sharding.load import expert_load, imbalance, layer_loads, load_step
from dsv41.sharding.mesh import parse_preset
from dsv41.state.request import create_sequential_state
from dsv41.verification.capture import by_layer
from tests.helpers import random_model

# One layer of the encoder, one of the decoder.
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "compress_ratios": (0, 1),
    "kv_source_layer_ids": (1,),
    "index_source_layer_ids": (1,),
    "candidate_source_layer_id": None,
    "engram_layer_ids": (0,),
    "dspark_target_layer_ids": (),
}


@pytest.mark.parametrize("axes", [{}, {"expert": 4}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
def test_loads_are_counted_over_all_parts_of_the_batch(axes: dict[str, int]):
    preset = parse_preset("test", {"axes": axes})
    parallel = preset.parallel(jax.devices()[: preset.devices])
    rng = np.random.default_rng(0)
    routed = rng.integers(0, 7, (4, 5, 3)).astype(np.int32)  # the last is nobody's
    text = rng.random((4, 5)) < 0.5
    rows = parallel.spec("batch")

    def part(experts: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
        return expert_load(experts, 6, parallel), expert_load(experts, 6, parallel, counted)

    mapped = jax.shard_map(
        part, mesh=parallel.mesh, in_specs=(rows, rows), out_specs=jax.sharding.PartitionSpec(), check_vma=False
    )
    both, only_text = jax.jit(mapped)(routed, text)
    np.testing.assert_array_equal(both, np.bincount(routed.ravel(), minlength=7)[:6])
    np.testing.assert_array_equal(only_text, np.bincount(routed[text].ravel(), minlength=7)[:6])


def test_a_step_counts_every_layer():
    model, variables = random_model(False, **TWO_LAYERS)
    text = model.settings.text
    tokens = np.random.default_rng(0).integers(3, 490, (2, 8)).astype(np.int32)
    batch = TokenBatch(jnp.asarray(tokens), jnp.asarray([8, 3], jnp.int32))
    state = create_sequential_state(model.settings, 2, 16)
    load = np.asarray(load_step(model, variables, state, batch))
    assert load.shape == (2, text.n_routed_experts)
    np.testing.assert_array_equal(load.sum(axis=1), 11 * text.num_experts_per_tok)
    # What lies beyond a row's count is nobody's load.
    again = batch.replace(tokens=jnp.asarray(np.where(np.arange(8) < [[8], [3]], tokens, 7)))
    np.testing.assert_array_equal(load_step(model, variables, state, again), load)


def test_layers_stand_in_their_order_whatever_the_loops(smooth_mini8):
    model, variables = smooth_mini8
    settings = model.settings
    experts = settings.text.n_routed_experts
    state = create_sequential_state(settings, 1, 16)
    batch = TokenBatch(jnp.ones((1, 8), jnp.int32), jnp.full(1, 8, jnp.int32))

    def forward(variables: dict) -> tuple:
        (segment, _), encoder = model.apply(variables, state, batch, method="encode", mutable=["intermediates"])
        _, decoder = model.apply(variables, state, segment, method="decode", mutable=["intermediates"])
        return encoder, decoder

    rng = np.random.default_rng(0)
    captured = jax.tree.map(
        lambda leaf: rng.integers(0, experts + 1, leaf.shape).astype(np.int32), jax.eval_shape(forward, variables)
    )
    load = layer_loads(settings, captured)
    for layer, values in by_layer(settings, captured).items():
        wanted = np.bincount(values["router_idx"].ravel(), minlength=experts + 1)[:experts]
        np.testing.assert_array_equal(load[layer], wanted, err_msg=f"layer {layer}")


def test_imbalance_of_experts_and_of_devices():
    load = np.array([[4, 0, 2, 2], [0, 0, 0, 0], [3, 3, 3, 3]])
    np.testing.assert_array_equal(imbalance(load), [2, 0, 1])
    np.testing.assert_array_equal(imbalance(load, devices=2), [1, 0, 1])
    np.testing.assert_array_equal(imbalance(load, devices=4), [2, 0, 1])
