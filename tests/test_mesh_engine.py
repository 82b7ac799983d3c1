"""The engine on a mesh gives the tokens that it gives on one device; what a mesh cannot serve is refused by name."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from dsv41.evaluation.acceptance import without_drafts
from dsv41.inference.engine import Engine, EngineOptions
from dsv41.inference.prefill import PrefillOptions
from dsv41.inference.requests import Request
from dsv41.sharding.mesh import parse_preset
from dsv41.sharding.rules import MeshError
from tests.helpers import mini8_config, with_text
from tests.test_sharded_steps import WIDE, meshed

# With the kind of layer that only attends to what another has chosen, and a drafter.
LAYOUT = WIDE | {
    "num_nextn_predict_layers": 1,
    "compress_ratios": (2, 1, 1, 0),
    "index_source_layer_ids": (0, 1),
    "dspark_target_layer_ids": (1, 2),
}

OPTIONS = EngineOptions(
    max_batch=4, max_length=96, prefill=PrefillOptions(chunk_sizes=(32,)), deterministic=True, speculative=2
)


@pytest.fixture(scope="module")
def drafting() -> Engine:
    return Engine.random(with_text(mini8_config(), **LAYOUT), OPTIONS)


def test_requests_on_a_mesh(drafting):
    """More requests than slots, prompts longer than a chunk, some drawn at a temperature: they come and go on shards
    with pools of their own, whose pages lie on two devices each. There drafts are verified, here there are none."""
    requests = [
        Request(tokens=[(11 * i + 5 * j) % 500 for j in range(n)], max_new_tokens=m, temperature=t, seed=i, top_p=0.9)
        for i, (n, m, t) in enumerate([(40, 5, 0.0), (3, 7, 0.8), (9, 4, 0.0), (70, 6, 0.8), (20, 3, 0.0), (1, 9, 0.0)])
    ]
    wanted = without_drafts(drafting).generate(requests)
    parallel = parse_preset("test", {"axes": {"data": 2, "context": 2, "tensor": 2}}).parallel(jax.devices())
    engine = Engine.random(drafting.model.settings.config, OPTIONS, parallel=parallel)
    seen = dict.fromkeys(range(len(requests)), 0)
    done = engine.generate(requests, lambda index, count: seen.update({index: seen[index] + count}))
    assert [c.tokens for c in done] == [c.tokens for c in wanted]
    assert seen == {i: len(request.tokens) for i, request in enumerate(requests)}
    assert engine.statistics.verified[0] > 0


def test_what_a_mesh_cannot_serve_is_refused(drafting):
    on_mesh = meshed(drafting.model, {"data": 8})
    with pytest.raises(MeshError, match="max_batch of 4 is not divisible by mesh axes data 8"):
        Engine(on_mesh, drafting.variables, None, OPTIONS)
    with pytest.raises(MeshError, match="engram 'pinned': on a mesh"):
        Engine(on_mesh, drafting.variables, None, dataclasses.replace(OPTIONS, max_batch=8, engram="pinned"))
