"""Kinds of fault that implementations of this model really had, each with the property that rules it out."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.layer_table import LayerKind, Mode
from dsv41.layers.attention import Attention
from dsv41.layers.flow import LayerInputs, Step
from dsv41.layers.moe import Router, SharedExpert
from dsv41.model import Model, TokenBatch
from dsv41.numerics.rotary import csa_frequencies, rotary_table, rotate, window_frequencies
from dsv41.settings import Settings
from dsv41.sharding.split import WHOLE
from dsv41.state.request import ModelState
from dsv41.steps.decode import forward_tokens
from dsv41.verification.capture import memory_of
from pallas_kernels.expert_matmul import ExpertWeights, expert_matmul
from pallas_kernels.formats import FP8_E8M0, Packed
from tests.helpers import (
    ALL_SLOTS,
    SLOTS,
    SMALL_LAYOUT,
    STRAY,
    WIDTH,
    assert_close,
    chunk,
    decode,
    entries_of,
    exact,
    forward,
    fresh_state,
    mini8_config,
    owned,
    poison_contents,
    random_model,
    random_tokens,
)

PROMPT = random_tokens(0, 61)
ModelAndVariables = tuple[Model, dict]


@pytest.fixture(scope="module")
def whole(smooth_mini8: ModelAndVariables) -> tuple:
    """The prompt in one chunk in every slot: state, logits ``[slots, 61, vocab]``, the layers' values."""
    model, variables = smooth_mini8
    state, logits, layers = forward(model, variables, fresh_state(model.settings), dict.fromkeys(ALL_SLOTS, PROMPT))
    return state, logits[:, : len(PROMPT)], layers


# Causality: the future, and a group's own end, are invisible


def test_a_token_does_not_move_outputs_before_it(smooth_mini8: ModelAndVariables, whole):
    """Bit for bit: first and second members of groups, the window's edge, the last position."""
    model, variables = smooth_mini8
    clean_state, clean, _ = whole
    places = (0, 1, 2, 7, 14, 15, 16, 17, 30, 31, 59, 60)
    for round_ in np.reshape(places, (-1, SLOTS)):
        prompts = {}
        for slot, place in enumerate(round_):
            prompts[slot] = PROMPT.copy()
            prompts[slot][place] = 3 + (PROMPT[place] + 100) % 480
        state, logits, _ = forward(model, variables, fresh_state(model.settings), prompts)
        for slot, place in enumerate(round_):
            ours = logits[slot, : len(PROMPT)]
            assert ours[:place].tobytes() == clean[slot, :place].tobytes(), place
            assert (ours[place] != clean[slot, place]).any(), place
            for ratio in state.memory:
                changed = (entries_of(state, ratio, slot) != entries_of(clean_state, ratio, slot)).any((0, 2))
                group = place // ratio
                assert not changed[:group].any(), (place, ratio)
                assert changed[group] == ((group + 1) * ratio <= len(PROMPT)), (place, ratio)


def test_selections_hold_visible_entries_only(smooth_mini8: ModelAndVariables, whole):
    """None of a group that the query is inside of; all visible ones while they are fewer than top-k."""
    model, _ = smooth_mini8
    table, top_k = model.settings.table, model.settings.text.index_topk
    layers = whole[2]
    for source in table.index_sources:
        ratio, chosen = table.layers[source].kind.ratio, layers[source]["topk"]
        for query in range(len(PROMPT)):
            visible = (query + 1) // ratio
            for slot in ALL_SLOTS:
                entries = chosen[slot, query]
                real = entries[entries >= 0]
                assert len(set(real)) == len(real) == min(top_k, visible)
                assert (real < visible).all()
    # Padded queries choose nothing.
    assert (layers[table.index_sources[0]]["topk"][:, len(PROMPT) :] == -1).all()


def test_candidate_pool_and_selections_are_those_of_the_scores(smooth_mini8: ModelAndVariables, whole):
    """For every context: blocks by their best score with the newest among them, also when it is partly filled;
    the pool's source searches everything, later sources every visible entry of a chosen block and nothing else."""
    model, _ = smooth_mini8
    settings, text = model.settings, model.settings.text
    state, _, layers = whole
    source, size = text.candidate_source_layer_id, text.candidate_block_size
    keys = memory_of(settings, state, source, "index", SLOTS, len(PROMPT)).astype(np.float64)
    outside = 0
    for reader in (row.index for row in settings.table.layers if row.kind.selects and row.kv_source == source):
        products = np.einsum(
            "bshd,bnd->bshn", layers[reader]["index_queries"][:, : len(PROMPT)].astype(np.float64), keys
        )
        weights = layers[reader]["index_weights"][:, : len(PROMPT)]
        scores = np.einsum("bsh,bshn->bsn", weights, np.maximum(products, 0))
        for query in range(len(PROMPT)):
            seen = scores[0, query, : query + 1]
            padded = np.pad(seen, (0, -len(seen) % size), constant_values=-np.inf).reshape(-1, size).max(-1)
            padded[-1] = np.inf  # the newest
            blocks = set(np.argsort(-padded)[: text.candidate_topk_blocks])
            if reader == source:
                ours = layers[source]["candidate_blocks"][0, query]
                assert {b for b in ours if b >= 0} == blocks, query
                pool = set(range(len(seen)))
            else:
                mine = layers[source]["candidate_blocks"][0, query]
                pool = {b * size + i for b in mine if b >= 0 for i in range(size)} & set(range(len(seen)))
            best = sorted(pool, key=lambda entry: -seen[entry])[: text.index_topk]
            chosen = layers[reader]["topk"][0, query]
            assert {e for e in chosen if e >= 0} == set(best), (reader, query)
            outside += len(set(np.argsort(-seen)[: text.index_topk]) - set(best))
    assert outside > 0  # the pool excludes something, so it is really in use


# Engram's history, image spans


def test_a_text_cut_anywhere_has_the_same_ngrams(smooth_mini8: ModelAndVariables, whole):
    """20 tokens: the gate of every position reads the n-gram's row, and the history that stays is the same."""
    model, variables = smooth_mini8
    text, layer = PROMPT[:20], model.settings.text.engram_layer_ids[0]
    gates = whole[2][layer]["engram_gate"][0, :20]
    token_map = np.asarray(variables["constants"]["token_map"])
    for cuts in ((1, 2, 3, 4), (5, 8, 10, 11), (16, 17, 18, 19)):
        state = fresh_state(model.settings)
        state, _, first = forward(model, variables, state, {s: text[:cut] for s, cut in enumerate(cuts)})
        state, _, second = forward(model, variables, state, {s: text[cut:] for s, cut in enumerate(cuts)})
        for slot, cut in enumerate(cuts):
            parts = (first[layer]["engram_gate"][slot, :cut], second[layer]["engram_gate"][slot, : 20 - cut])
            np.testing.assert_allclose(np.concatenate(parts), gates, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(state.ngram_tail[slot], token_map[text[-3:]])


SPAN = slice(10, 19)


@pytest.fixture(scope="module")
def picture(smooth_mini8: ModelAndVariables) -> tuple:
    """A text with an image span: tokens ``[40]``, flags and embeddings (NaN at text positions) of the span."""
    model, _ = smooth_mini8
    tokens = PROMPT[:40].copy()
    tokens[SPAN] = model.settings.config.image_token_id
    flags = np.zeros(len(tokens), bool)
    flags[SPAN] = True
    embeddings = np.full((len(tokens), model.settings.text.hidden_size), np.nan, np.float32)
    embeddings[SPAN] = np.random.default_rng(0).normal(0, 2.8, embeddings[SPAN].shape)
    return tokens, flags, embeddings


def run_picture(model, variables, state: ModelState, picture: tuple, begins: dict[int, int], ends: dict[int, int]):
    """Positions ``begins[slot]`` … ``ends[slot] − 1`` of the picture's text; poison wherever no image is."""
    tokens, flags, embeddings = picture
    is_image = np.zeros((SLOTS, WIDTH), bool)
    # Flags beyond a row's live tokens are padding too.
    is_image[:, -1] = True
    images = np.full((SLOTS, WIDTH, embeddings.shape[1]), np.nan, np.float32)
    rows = {}
    for slot, begin in begins.items():
        part = slice(begin, ends[slot])
        count = ends[slot] - begin
        rows[slot] = tokens[part]
        is_image[slot, :count], images[slot, :count] = flags[part], embeddings[part]
    return forward(model, variables, state, rows, STRAY, is_image, images)


def test_an_image_span_may_cross_a_chunk_edge_anywhere(smooth_mini8: ModelAndVariables, picture):
    model, variables = smooth_mini8
    length, zero = len(picture[0]), dict.fromkeys(ALL_SLOTS, 0)
    whole_state, whole_logits, whole_layers = run_picture(
        model, variables, poison_contents(fresh_state(model.settings)), picture, zero, dict.fromkeys(ALL_SLOTS, length)
    )
    assert np.isfinite(whole_logits[:, :length]).all()
    layer = model.settings.text.engram_layer_ids[0]
    gate = whole_layers[layer]["engram_gate"][0, :length]
    assert (gate[SPAN] == 0).all()
    assert (gate[: SPAN.start] > 0).all()
    assert (gate[SPAN.stop :] > 0).all()
    for cuts in ((9, 10, 11, 12), (14, 17, 18, 19), (20, 21, 22, 30)):
        ends = dict(enumerate(cuts))
        state = poison_contents(fresh_state(model.settings))
        state, first, _ = run_picture(model, variables, state, picture, zero, ends)
        # Image positions enter the history as nothing that can be looked back on.
        for slot, cut in ends.items():
            blocked = picture[1][cut - 3 : cut]
            np.testing.assert_array_equal(np.asarray(state.ngram_tail[slot]) == -1, blocked)
        state, second, _ = run_picture(model, variables, state, picture, ends, dict.fromkeys(ALL_SLOTS, length))
        for slot, cut in ends.items():
            ours = np.concatenate([first[slot, :cut], second[slot, : length - cut]])
            np.testing.assert_allclose(ours, whole_logits[slot, :length], rtol=0, atol=1e-4)
            assert_close(owned(state, slot), owned(whole_state, slot))


def test_ngrams_do_not_look_into_or_across_an_image(smooth_mini8: ModelAndVariables, picture):
    """An image position, and everything before it, reads as nothing: the pad token's compressed id."""
    model, variables = smooth_mini8
    tokens, flags, _ = picture

    @jax.jit
    def lookback(batch: TokenBatch, state: ModelState) -> jax.Array:
        return model.apply(variables, state, batch, method="encode")[0].lookback

    batch = chunk(dict.fromkeys(ALL_SLOTS, tokens))
    is_image = np.zeros((SLOTS, WIDTH), bool)
    is_image[:, : len(tokens)] = flags
    seen = np.asarray(lookback(batch.replace(is_image=jnp.asarray(is_image)), fresh_state(model.settings)))[0]
    token_map = np.asarray(variables["constants"]["token_map"])
    for t in range(len(tokens)):
        blocked = False
        for back in range(seen.shape[1]):
            blocked = blocked or t - back < 0 or bool(flags[t - back])
            assert seen[t, back] == (-1 if blocked else token_map[tokens[t - back]]), (t, back)


def test_the_image_bias_chooses_for_images_and_weighs_for_none(smooth_mini8: ModelAndVariables):
    """Forced to one set of experts: image tokens take them, text tokens do not, weights are those of the scores."""
    settings = smooth_mini8[0].settings
    text, rng = settings.text, np.random.default_rng(0)
    experts, chosen = text.n_routed_experts, text.num_experts_per_tok
    x = jnp.asarray(rng.normal(size=(2, 30, text.hidden_size)), jnp.float32)
    forced = np.arange(experts - chosen, experts)
    params = {
        "weight": jnp.asarray(rng.normal(size=(experts, text.hidden_size)) / np.sqrt(text.hidden_size), jnp.float32),
        "bias": jnp.zeros(experts),
        "bias_vl": jnp.zeros(experts).at[forced].set(100.0),
    }
    router = Router(settings, experts, chosen)
    images = jnp.asarray(np.arange(30) % 2 == 1)[None].repeat(2, 0)
    plain = router.apply({"params": params}, x, jnp.zeros_like(images))
    routed = router.apply({"params": params}, x, images)
    for name in ("experts", "weights"):
        np.testing.assert_array_equal(getattr(routed, name)[:, ::2], getattr(plain, name)[:, ::2])
    assert (np.sort(routed.experts[:, 1::2]) == forced).all()
    assert not (np.sort(routed.experts[:, ::2]) == forced).all()
    scores = np.sqrt(np.log1p(np.exp(np.asarray(x, np.float64) @ np.asarray(params["weight"], np.float64).T)))
    picked = np.take_along_axis(scores, np.asarray(routed.experts), -1)
    wanted = picked / picked.sum(-1, keepdims=True) * text.routed_scaling_factor
    np.testing.assert_allclose(routed.weights, wanted, rtol=1e-5)


def test_image_positions_of_the_model_use_the_image_bias(smooth_mini8: ModelAndVariables, picture):
    """The flags reach the router of every layer, live image positions only."""
    model, variables = smooth_mini8
    experts, chosen = model.settings.text.n_routed_experts, model.settings.text.num_experts_per_tok
    forced = np.arange(experts - chosen, experts)

    def force(path, leaf):
        return leaf.at[..., forced].set(100.0) if path[-1].key == "bias_vl" else leaf

    params = jax.tree_util.tree_map_with_path(force, variables["params"])
    length = len(picture[0])
    _, _, layers = run_picture(
        model, variables | {"params": params}, fresh_state(model.settings), picture, {0: 0}, {0: length}
    )
    for layer in range(model.settings.text.num_hidden_layers):
        takes_forced = (np.sort(layers[layer]["router_idx"][0, :length]) == forced).all(-1)
        assert takes_forced[SPAN].all(), layer
        assert not takes_forced[~picture[1]].all(), layer


# Experts


def test_swiglu_clamps_the_gate_above_and_the_other_on_both_sides():
    settings = Settings.default(mini8_config())
    text = settings.text
    limit, rng = text.swiglu_limit, np.random.default_rng(0)
    x = rng.normal(size=(1, 40, text.hidden_size)).astype(np.float32)
    shape = (text.moe_intermediate_size, text.hidden_size)
    w1, w3 = (rng.normal(size=shape).astype(np.float32) * 2 for _ in range(2))
    w2 = rng.normal(size=shape[::-1]).astype(np.float32) / 10
    gate, up = x @ w1.T, x @ w3.T
    assert min(gate.max(), -gate.min(), up.max(), -up.min()) > limit
    params = {name: {"weight": jnp.asarray(w)} for name, w in (("w1", w1), ("w3", w3), ("w2", w2))}
    ours = SharedExpert(settings).apply({"params": params}, jnp.asarray(x))

    def expert(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return (gate / (1 + np.exp(-gate)) * up) @ w2.T

    wanted = expert(np.minimum(gate, limit), np.clip(up, -limit, limit))
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    for wrong in (
        expert(np.clip(gate, -limit, limit), np.clip(up, -limit, limit)),
        expert(np.minimum(gate, limit), np.minimum(up, limit)),
        expert(gate, np.clip(up, -limit, limit)),
    ):
        assert np.abs(ours - wrong).max() > 1e-3


def test_the_routing_weight_enters_before_the_rounding_of_the_down_projection():
    rng = np.random.default_rng(0)
    hidden, inner, rows = 64, 32, 16
    x = np.asarray(jax.jit(FP8_E8M0.round)(jnp.asarray(rng.normal(size=(rows, hidden)), jnp.float32)))
    w1, w3 = (rng.normal(size=(1, inner, hidden)).astype(np.float32) for _ in range(2))
    w2 = rng.normal(size=(1, hidden, inner)).astype(np.float32)
    weight = rng.uniform(0.3, 1, (rows, 1)).astype(np.float32)
    matrices = [ExpertWeights(jnp.asarray(w), None) for w in (w1, w3, w2)]
    run = jax.jit(functools.partial(expert_matmul, limit=10.0, activation_fmt=FP8_E8M0))
    ours = np.asarray(run(jnp.asarray(x), jnp.zeros((rows, 1), jnp.int32), jnp.asarray(weight), *matrices))
    gate, up = np.minimum(x @ w1[0].T, 10), np.clip(x @ w3[0].T, -10, 10)
    inside = gate / (1 + np.exp(-gate)) * up

    def rounded(values: np.ndarray) -> np.ndarray:
        return np.asarray(jax.jit(FP8_E8M0.round)(jnp.asarray(values)))

    before, after = rounded(inside * weight) @ w2[0].T, rounded(inside) * weight @ w2[0].T
    # A value at a tie may round to the other side; most do not.
    assert np.median(np.abs(ours - before)) < 1e-5
    assert np.median(np.abs(ours - after)) > 1e-3


# Rotary positions


def attention_alone(settings: Settings, kind: LayerKind, position: int, keep: str) -> jax.Array:
    """A window-only layer on one token at ``position`` with an empty ring; the other rotary table is NaN."""
    text, rng = settings.text, np.random.default_rng(0)
    layer = Attention(settings, kind)
    tables = {"rope_window": window_frequencies(text), "rope_csa": csa_frequencies(text)}
    positions, window = jnp.full((1, 1), position, jnp.int32), text.sliding_window
    nothing = dict.fromkeys((field.name for field in dataclasses.fields(Step)), None)
    inputs = LayerInputs(Packed(jnp.full((1, window, text.head_dim), jnp.nan), None), None, None, None, None)
    x = jnp.asarray(rng.normal(size=(1, 1, text.hidden_size)), jnp.float32)

    def step(positions: jax.Array) -> Step:
        rope = {n: rotary_table(positions, f) for n, f in tables.items()}
        rope = {n: t if n == keep else jax.tree.map(lambda x: x * jnp.nan, t) for n, t in rope.items()}
        return Step(**nothing | rope | {"split": WHOLE, "local_valid": jnp.arange(window + 1)[None] == window})

    shapes = nn.meta.unbox(jax.eval_shape(lambda: layer.init(jax.random.key(0), x, None, inputs, step(positions))))
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 10, s.dtype), shapes)
    return jax.jit(lambda p, at: layer.apply(p, x, None, inputs, step(at))[1])(params, positions)


def test_the_output_is_rotated_back_and_window_layers_use_their_own_base():
    """A token that attends to itself alone: its output cannot depend on where it stands."""
    settings = Settings.default(mini8_config(), cache_rounding=False)
    kind = LayerKind(Mode.WINDOW, 0)
    outputs = [attention_alone(settings, kind, position, "rope_window") for position in (0, 5, 200)]
    assert np.isfinite(outputs[0].y).all()
    for out in outputs[1:]:
        np.testing.assert_allclose(out.y, outputs[0].y, rtol=0, atol=1e-5)
        # The entry that is stored does depend on it.
        assert np.abs(np.asarray(out.entries.payload - outputs[0].entries.payload)).max() > 1e-2
    assert not np.isfinite(attention_alone(settings, kind, 5, "rope_csa").y).all()


def test_bases_of_window_and_other_layers():
    text = mini8_config().text
    pairs = np.arange(0, text.qk_rope_head_dim, 2) / text.qk_rope_head_dim
    np.testing.assert_allclose(window_frequencies(text), text.rope_theta**-pairs, rtol=1e-6)
    plain = text.compress_rope_theta**-pairs
    ours = csa_frequencies(text)
    assert (ours <= plain * (1 + 1e-6)).all()
    np.testing.assert_allclose(ours[-1], plain[-1] / text.rope_scaling.factor, rtol=1e-6)
    cos, sin = rotary_table(jnp.arange(50), ours)
    np.testing.assert_allclose(np.square(cos) + np.square(sin), 1, atol=1e-5)  # no factor on the softmax


def test_latents_of_one_step_are_rotated_at_their_own_positions():
    """A text of one repeated token at the first source: equal latents, so entries differ by their rotation only."""
    model, variables = random_model(False, **SMALL_LAYOUT)
    ratio, source = 2, 0
    state, _ = exact(model, variables, fresh_state(model.settings), {0: [7] * 20})
    entries = memory_of(model.settings, state, source, "main", 1, 20 // ratio)[0]
    table = rotary_table(jnp.arange(20 // ratio) * ratio, csa_frequencies(model.settings.text))
    unrotated = np.asarray(rotate(jnp.asarray(entries), table, inverse=True))
    np.testing.assert_allclose(unrotated, np.broadcast_to(unrotated[:1], unrotated.shape), rtol=0, atol=1e-4)
    assert np.abs(entries - entries[0]).max() > 0.1


# NaN beside live values, forward and backward


def test_nan_in_padding_reaches_no_gradient():
    """Gradients of the live logits: the same bits whether unused pages, rings, tails and padding are zero or NaN."""
    lists = {"kv_source_layer_ids": (0, 1), "index_source_layer_ids": (0, 1), "candidate_source_layer_id": None}
    layout = SMALL_LAYOUT | lists | {"num_hidden_layers": 2, "compress_ratios": (2, 1)}
    model, variables = random_model(False, **layout)

    def loss(params, state: ModelState, batch: TokenBatch) -> jax.Array:
        _, logits = forward_tokens(model, variables | {"params": params}, state, batch)
        live = jnp.arange(WIDTH) < batch.count[:, None]
        return jnp.sum(jnp.where(live[..., None], jnp.sin(logits), 0))

    gradient = jax.jit(jax.grad(loss))
    tokens = {0: PROMPT[:40], 2: PROMPT[:3]}
    clean = gradient(variables["params"], fresh_state(model.settings), chunk(tokens))
    poison = gradient(variables["params"], poison_contents(fresh_state(model.settings)), chunk(tokens, WIDTH, STRAY))
    moved = 0
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (clean, poison)), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(b).all(), name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
        moved += bool(np.any(np.asarray(a)))
    assert moved > 20


def test_decode_over_a_hole_in_the_page_table_writes_nowhere(smooth_mini8: ModelAndVariables, whole):
    """A request that stands at the end of its pages: no other page is touched, none of its entries overwritten."""
    model, variables = smooth_mini8
    state = whole[0]
    table = np.array(state.page_table)
    table[1, len(PROMPT) // model.settings.page_tokens + 1 :] = -1
    state = state.replace(page_table=jax.device_put(table, jax.local_devices()[0]))
    before = {r: [np.asarray(leaf).copy() for leaf in jax.tree.leaves(pool)] for r, pool in state.memory.items()}
    state = jax.tree.map(jnp.copy, state)
    room = (len(PROMPT) // model.settings.page_tokens + 1) * model.settings.page_tokens
    for _ in range(room - len(PROMPT)):
        state, _ = decode(model, variables, state, {1: 9})
    filled = {r: [np.asarray(leaf).copy() for leaf in jax.tree.leaves(pool)] for r, pool in state.memory.items()}
    assert any((a != b).any() for r in before for a, b in zip(before[r], filled[r], strict=True))
    for _ in range(4):
        state, _ = decode(model, variables, state, {1: 9})
    for ratio, pool in state.memory.items():
        for a, b in zip(filled[ratio], jax.tree.leaves(pool), strict=True):
            np.testing.assert_array_equal(a, b)
