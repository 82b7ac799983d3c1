"""Speculation in the engine: the same tokens as plain decoding, slots that are used again, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dsv41.config import load_config
from dsv41.inference.engine import Engine, EngineOptions
from dsv41.inference.requests import Request
from tests.fixtures_engine import GOLDEN, MINI8_OPTIONS
from tests.helpers import random_tokens, with_text

MINI8 = GOLDEN / "mini8" / "fp8"


def requests() -> list[Request]:
    """Prompts shorter and longer than the window, greedy and sampled, of several lengths of answer."""
    shapes = ((7, 12, 0.0), (33, 7, 0.0), (18, 12, 0.8), (5, 1, 0.0), (61, 2, 0.0), (3, 9, 1.0))
    return [
        Request(tokens=random_tokens(i, n).tolist(), max_new_tokens=new, temperature=t, top_p=0.9, seed=i)
        for i, (n, new, t) in enumerate(shapes)
    ]


def engine(speculative: object, **options) -> Engine:
    return Engine.from_checkpoint(MINI8, dataclasses.replace(MINI8_OPTIONS, speculative=speculative, **options))


@pytest.fixture(scope="module")
def plain(mini8_engine) -> list[tuple[int, ...]]:
    """The tokens of plain decoding."""
    return [c.tokens for c in mini8_engine.generate(requests())]


@pytest.mark.parametrize("speculative", [1, 5, "auto"])
def test_any_depth_gives_the_tokens_of_plain_decoding(plain, speculative):
    """Deterministic: also at a temperature, and bit for bit in bfloat16, where rounded logits often tie."""
    drafting = engine(speculative)
    assert [c.tokens for c in drafting.generate(requests())] == plain
    # Every token but the first of each request came from some step; plain steps would need one each.
    statistics = drafting.statistics
    assert statistics.verified.sum() > 0
    produced = sum(len(tokens) - 1 for tokens in plain)
    assert statistics.steps + statistics.accepted.sum() == produced


def test_a_used_slot_shows_nothing_of_its_last_request(drafting_engine):
    """Drafts would be other ones if the drafter saw the ring of the request before: then other ones are accepted."""
    once = [
        Request(tokens=random_tokens(9 + i, 20).tolist(), max_new_tokens=16, temperature=0.8, seed=i) for i in range(3)
    ]
    fill = [Request(tokens=random_tokens(8, 30).tolist(), max_new_tokens=12)] * 2

    def accepted(together: list[Request]) -> np.ndarray:
        before = drafting_engine.statistics.accepted.copy()
        drafting_engine.generate(together)
        return drafting_engine.statistics.accepted - before

    alone = sum(accepted([request]) for request in once)
    np.testing.assert_array_equal(accepted([*fill, *once]) - accepted(fill), alone)
    assert alone.sum() > 0


def test_without_deterministic_greedy_tokens_stay(mini8_engine):
    """Another width is another compiled shape: tokens may differ at ties within rounding, which are counted."""
    greedy = [dataclasses.replace(request, temperature=0.0) for request in requests()]
    # One request is long enough for the shapes of the deterministic engine: its prefill is compiled already.
    greedy.append(Request(tokens=random_tokens(7, 120).tolist(), max_new_tokens=10))
    plain = [c.tokens for c in mini8_engine.generate(greedy)]
    fast = [c.tokens for c in engine(5, deterministic=False).generate(greedy)]
    # One early difference changes all that follows, so requests are counted. bfloat16 ties are a few per cent.
    assert sum(a != b for a, b in zip(fast, plain, strict=True)) <= 1


def test_depths_are_checked_before_any_work():
    for depth in (0, 6, True, "always"):
        with pytest.raises(ValueError, match=f"speculative: {depth!r} is "):
            Engine.from_checkpoint(MINI8, EngineOptions(speculative=depth))
    plain = with_text(load_config(MINI8), num_nextn_predict_layers=0, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"the model has no drafter \(num_nextn_predict_layers 0\)"):
        EngineOptions(speculative=1).check_speculation(plain)


def test_an_engine_needs_its_drafter(mini8_engine):
    with pytest.raises(ValueError, match="speculative: 2, but this engine was given no drafter"):
        Engine(mini8_engine.model, mini8_engine.variables, None, EngineOptions(speculative=2))


def test_engram_rows_from_the_host_give_the_same_tokens(mini8_engine):
    """Steps in two parts are other programs: bits may differ, so the tokens of a few greedy requests are compared."""
    greedy = [dataclasses.replace(request, temperature=0.0) for request in requests()[:3]]
    plain = [c.tokens for c in mini8_engine.generate(greedy)]
    mapped = engine(3, engram="mapped")
    assert [c.tokens for c in mapped.generate(greedy)] == plain
    lookups = mapped.lookups
    text = mapped.model.settings.text
    assert 0 < lookups.rows_read < lookups.rows_asked  # pads and neighbours share rows
    assert lookups.bytes_read == lookups.rows_read * text.engram_head_dim * 33 // 32
    assert lookups.hidden_s + lookups.waited_s == pytest.approx(lookups.lookup_s)
    assert "engram_table_1" not in mapped.variables["params"]
