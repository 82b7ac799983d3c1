"""Layouts that the lists can express beyond the official one: how they fold into loops, and that they run."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dsv41.config import load_config
from dsv41.layer_table import Group, LayerKind, Mode, Run, layer_table, locate, stack_plan
from tests.conftest import GOLDEN
from tests.helpers import (
    ALL_SLOTS,
    SLOTS,
    assert_close,
    decode,
    exact,
    fresh_state,
    mini8_config,
    owned,
    random_model,
    random_tokens,
    with_text,
)

OFFICIAL = load_config(GOLDEN.parents[2] / "configs" / "deepseek-v4.1-flash")

# Folding


def test_the_official_plan():
    table = layer_table(OFFICIAL.text)
    window, full2, reuse2 = LayerKind(Mode.WINDOW, 0), LayerKind(Mode.FULL, 2), LayerKind(Mode.REUSE, 2)
    full1, reuse1 = LayerKind(Mode.FULL, 1, makes_pool=True), LayerKind(Mode.REUSE, 1)
    reindex = LayerKind(Mode.REINDEX, 1, uses_pool=True)
    assert stack_plan(table.encoder) == (
        Group((Run(window, 1),), 1, 0),
        Group((Run(window, 1),), 1, 1, first_engram=True),
        Group((Run(full2, 1), Run(reuse2, 5)), 3, 2),
    )
    assert stack_plan(table.decoder) == (
        Group((Run(full1, 1), Run(reuse1, 3)), 1, 20),
        Group((Run(reindex, 1), Run(reuse1, 3)), 4, 24),
    )


def test_the_first_engram_of_the_encoder_starts_a_group():
    """Also inside a repeating pattern; later ones, and those of the decoder, do not."""
    full, reuse = Run(LayerKind(Mode.FULL, 2), 1), LayerKind(Mode.REUSE, 2)
    for engrams, groups in {
        (16,): (Group((full, Run(reuse, 5)), 2, 2), Group((full, Run(reuse, 1)), 1, 14)),
        (14, 17): (Group((full, Run(reuse, 5)), 2, 2), Group((full, Run(reuse, 5)), 1, 14, True)),
        (25,): (Group((full, Run(reuse, 5)), 3, 2),),
    }.items():
        table = layer_table(with_text(OFFICIAL, engram_layer_ids=engrams).text)
        plan = stack_plan(table.encoder)
        assert plan[: 1 + len(groups)] == (Group((Run(LayerKind(Mode.WINDOW, 0), 2),), 1, 0), *groups)
        assert [g.start for g in plan if g.first_engram] == [n for n in engrams[:1] if n < 20]
        assert stack_plan(table.decoder) == stack_plan(layer_table(OFFICIAL.text).decoder)


@st.composite
def layouts(draw) -> dict:
    """Any valid lists: window-only layers between sources, several ratios, a pool where the last source reaches."""
    ratios, kv, index = [0] * draw(st.integers(0, 3)), [], []
    for _ in range(draw(st.integers(0, 4))):
        ratio = draw(st.sampled_from([1, 2, 3, 4]))
        kv.append(len(ratios))
        index.append(len(ratios))
        ratios.append(ratio)
        for kind in draw(st.lists(st.sampled_from(["window", "reuse", "reindex"]), max_size=12)):
            if kind == "reindex":
                index.append(len(ratios))
            ratios.append(0 if kind == "window" else ratio)
    hypothesis.assume(ratios)
    last = [layer for layer in index if layer >= kv[-1]]
    return {
        "num_hidden_layers": len(ratios),
        "num_nextn_predict_layers": 0,
        "compress_ratios": tuple(ratios),
        "kv_source_layer_ids": tuple(kv),
        "index_source_layer_ids": tuple(index),
        "candidate_source_layer_id": draw(st.sampled_from([None, *last])) if last else None,
        "engram_layer_ids": tuple(sorted(draw(st.sets(st.sampled_from(range(len(ratios))), max_size=3)))),
        "dspark_target_layer_ids": (),
    }


@hypothesis.given(layouts())
@hypothesis.settings(max_examples=200, deadline=None)
def test_every_layout_folds_and_every_layer_has_one_place(layout: dict):
    table = layer_table(with_text(mini8_config(), **layout).text)
    assert table.encoder + table.decoder == table.layers
    assert not table.decoder or table.decoder[0].kind.mode is Mode.FULL
    assert all(row.kind.mode is not Mode.FULL for row in table.decoder[1:])
    for rows in (table.encoder, table.decoder):
        plan = stack_plan(rows)
        inside = {row.index for row in rows} - {row.index for row in table.decoder}
        cuts = [group.start for group in plan if group.first_engram]
        assert cuts == [layer for layer in layout["engram_layer_ids"] if layer in inside][:1]
        unfolded = [
            (group.start + repeat * group.depth + offset, kind)
            for group in plan
            for repeat in range(group.repeats)
            for offset, kind in enumerate(run.kind for run in group.runs for _ in range(run.count))
        ]
        assert unfolded == [(row.index, row.kind) for row in rows]
        places = [locate(plan, row.index) for row in rows]
        assert len(set(places)) == len(rows)
        for place, row in zip(places, rows, strict=True):
            group = plan[place.group]
            run = group.runs[place.run]
            assert run.kind == row.kind
            shape = [n for n in (group.repeats, run.count) if n > 1]
            assert len(place.index) == len(shape)
            assert all(0 <= i < n for i, n in zip(place.index, shape, strict=True))
    for layer in (-1, len(table.layers)):
        with pytest.raises(KeyError):
            locate(stack_plan(table.layers), layer)


def test_compiling_does_not_grow_with_depth():
    """Forty official layers are loops over no more bodies than eight."""
    bodies = {}
    for name in ("mini8", "tiny40"):
        table = layer_table(load_config(GOLDEN / name / "f32").text)
        bodies[name] = sum(len(group.runs) for rows in (table.encoder, table.decoder) for group in stack_plan(rows))
    assert bodies["tiny40"] <= bodies["mini8"]


# Running

NOTHING_ELSE = {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": ()}

LAYOUTS = {
    # Ratio 3, two residual streams, Engrams in the encoder and in the decoder, DSpark's taps; a Reindex layer makes a
    # pool that has room for 4 entries, and the selection has for 8.
    "ratio 3, Reindex makes a pool smaller than top-k": {
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 0,
        "compress_ratios": (3, 1, 1, 1),
        "kv_source_layer_ids": (0, 1),
        "index_source_layer_ids": (0, 1, 2, 3),
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "engram_layer_ids": (0, 3),
        "engram_num_embeddings": (1362, 1552),
        "hc_mult": 2,
        "dspark_target_layer_ids": (1, 2),
    },
    # The decoder begins with layer 0, so there is no encoder layer; its source has a tail. No pool. The Engram is
    # inside a loop of Reuse layers; a window-only layer follows.
    "KV source at layer 0, no encoder": NOTHING_ELSE
    | {
        "num_hidden_layers": 5,
        "compress_ratios": (2, 2, 2, 2, 0),
        "kv_source_layer_ids": (0,),
        "index_source_layer_ids": (0,),
        "candidate_source_layer_id": None,
        "engram_layer_ids": (2,),
    },
    # No source at all: no decoder. No Engram.
    "window only": NOTHING_ELSE
    | {
        "num_hidden_layers": 2,
        "compress_ratios": (0, 0),
        "kv_source_layer_ids": (),
        "index_source_layer_ids": (),
        "candidate_source_layer_id": None,
        "engram_layer_ids": (),
        "engram_num_embeddings": (),
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_runs_and_chunks_agree(name: str):
    """Cache rounding off: one chunk, chunks of odd sizes, and token by token give the same logits and state."""
    model, variables = random_model(False, **LAYOUTS[name])
    prompt = random_tokens(5, 50)
    steps = 6
    tokens = dict.fromkeys(ALL_SLOTS, prompt)
    whole, wanted = exact(model, variables, fresh_state(model.settings, 1), tokens)
    assert np.isfinite(wanted).all()
    assert wanted.std() > 0.1
    # Slots 0 to 2 in chunks of 7, 16, 17; slot 3 in two chunks and the rest by decode steps.
    parts = {slot: list(range(0, len(prompt), size)) for slot, size in enumerate((7, 16, 17))}
    parts[3] = [0, 23]
    ends = {slot: [*begins[1:], len(prompt)] for slot, begins in parts.items()}
    ends[3][-1] = len(prompt) - steps
    state, last = fresh_state(model.settings, 2), {}
    for i in range(max(map(len, parts.values()))):
        now = {slot: prompt[parts[slot][i] : ends[slot][i]] for slot in ALL_SLOTS if i < len(parts[slot])}
        state, logits = exact(model, variables, state, now)
        last |= {slot: logits[slot] for slot in now}
    for token in prompt[-steps:]:
        state, logits = decode(model, variables, state, {3: token})
        last[3] = logits[3]
    assert state.length.tolist() == [len(prompt)] * SLOTS
    for slot in ALL_SLOTS:
        np.testing.assert_allclose(last[slot], wanted[slot], rtol=0, atol=1e-4)
        assert_close(owned(state, slot), owned(whole, slot))
