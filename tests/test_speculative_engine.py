"""Speculation in the engine: the same tokens as plain decoding, slots that are used again, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dsv41.config import load_config
from dsv41.inference import speculation
from dsv41.inference.engine import Engine, EngineOptions
from dsv41.inference.requests import Request
from tests.fixtures_engine import GOLDEN, SMALL_OPTIONS, with_options
from tests.helpers import random_tokens, with_text

MINI8 = GOLDEN / "mini8" / "fp8"


def requests() -> list[Request]:
    """Prompts shorter and longer than the window, greedy and sampled, of several lengths of answer."""
    shapes = ((7, 12, 0.0), (33, 7, 0.0), (18, 12, 0.8), (5, 1, 0.0), (61, 2, 0.0), (3, 9, 1.0))
    return [
        Request(tokens=random_tokens(i, n).tolist(), max_new_tokens=new, temperature=t, top_p=0.9, seed=i)
        for i, (n, new, t) in enumerate(shapes)
    ]


@pytest.fixture(scope="module")
def plain(small_engine) -> list[tuple[int, ...]]:
    """The tokens of plain decoding."""
    return [c.tokens for c in small_engine.generate(requests())]


@pytest.mark.parametrize("speculative", [1, 5, "auto"])
def test_any_depth_gives_the_tokens_of_plain_decoding(plain, drafting_engine, speculative):
    """Deterministic: also at a temperature, and bit for bit in bfloat16, where rounded logits often tie."""
    drafting = with_options(drafting_engine, speculative=speculative)
    assert [c.tokens for c in drafting.generate(requests())] == plain
    # Every token but the first of each request came from some step; plain steps would need one each.
    statistics = drafting.statistics
    assert statistics.verified.sum() > 0
    produced = sum(len(tokens) - 1 for tokens in plain)
    assert statistics.steps + statistics.accepted.sum() == produced


def test_a_used_slot_shows_nothing_of_its_last_request(drafting_engine, monkeypatch):
    """Prompts shorter than the window, which overwrite a part of the drafter's ring. What is drafted is compared to the
    bit with what the same requests get in the same slots of a new batch: nothing is left to rounding."""
    fill = [Request(tokens=random_tokens(8, 30).tolist(), max_new_tokens=6)] * 2
    once = [
        Request(tokens=random_tokens(9 + i, 5 + i).tolist(), max_new_tokens=8, temperature=0.8, seed=i)
        for i in range(2)
    ]
    drafting_engine.generate(once)  # compiles, which runs steps too
    rounds: list[list[np.ndarray]] = []
    step = speculation.draft_step

    def draft_step(*arguments):
        *_, start, count, _, active = arguments
        ring, drafts = step(*arguments)
        rounds.append([np.asarray(x)[active] for x in (start + count, drafts.tokens, drafts.confidence)])
        return ring, drafts

    monkeypatch.setattr(speculation, "draft_step", draft_step)
    new = [c.tokens for c in drafting_engine.generate(once)]
    fresh = rounds.copy()
    rounds.clear()
    assert [c.tokens for c in drafting_engine.generate([*fill, *once])][2:] == new
    assert len(rounds) > len(fresh) > 2
    np.testing.assert_array_equal(fresh[0][0], [5, 6])  # the positions of the pending tokens, right after the prompts
    for used, wanted in zip(rounds[-len(fresh) :], fresh, strict=True):
        for ours, theirs in zip(used, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_without_deterministic_greedy_tokens_stay(small_engine, drafting_engine):
    """Another width is another compiled shape: tokens may differ at ties within rounding, which are counted."""
    greedy = [dataclasses.replace(request, temperature=0.0) for request in requests()]
    # One request is long enough for the shapes of the deterministic engine: its prefill is compiled already.
    greedy.append(Request(tokens=random_tokens(7, 120).tolist(), max_new_tokens=10))
    plain = [c.tokens for c in small_engine.generate(greedy)]
    free = with_options(drafting_engine, speculative=5, deterministic=False)
    fast = [c.tokens for c in free.generate(greedy)]
    # One early difference changes all that follows, so requests are counted. bfloat16 ties are a few per cent.
    assert sum(a != b for a, b in zip(fast, plain, strict=True)) <= 1


def test_depths_are_checked_before_any_work():
    for depth in (0, 6, True, "always"):
        with pytest.raises(ValueError, match=f"speculative: {depth!r} is "):
            Engine.from_checkpoint(MINI8, EngineOptions(speculative=depth))
    plain = with_text(load_config(MINI8), num_nextn_predict_layers=0, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"the model has no drafter \(num_nextn_predict_layers 0\)"):
        EngineOptions(speculative=1).check_speculation(plain)


def test_an_engine_needs_its_drafter(small_engine):
    with pytest.raises(ValueError, match="speculative: 2, but this engine was given no drafter"):
        Engine(small_engine.model, small_engine.variables, None, EngineOptions(speculative=2))


def test_engram_rows_from_the_host_give_the_same_tokens(small_engine, small_checkpoint):
    """Steps in two parts are other programs: bits may differ, so the tokens of a few greedy requests are compared."""
    greedy = [dataclasses.replace(request, temperature=0.0) for request in requests()[:3]]
    plain = [c.tokens for c in small_engine.generate(greedy)]
    options = dataclasses.replace(SMALL_OPTIONS, speculative=3, engram="mapped")
    mapped = Engine.from_checkpoint(small_checkpoint, options)
    assert [c.tokens for c in mapped.generate(greedy)] == plain
    lookups = mapped.lookups
    text = mapped.model.settings.text
    assert 0 < lookups.rows_read < lookups.rows_asked  # pads and neighbours share rows
    assert lookups.bytes_read == lookups.rows_read * text.engram_head_dim * 33 // 32
    assert lookups.hidden_s + lookups.waited_s == pytest.approx(lookups.lookup_s)
    assert "engram_table_0" not in mapped.variables["params"]
