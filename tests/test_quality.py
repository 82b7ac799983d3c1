"""What a trained model's approximations cost: measured by the steps that inference runs, and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from dsv41.cli import main
from dsv41.config import load_config
from dsv41.evaluation import retrieval
from dsv41.evaluation.quality import (
    PADDING,
    Scores,
    Subject,
    Texts,
    choose_texts,
    compared,
    pool,
    prefix,
    replay,
    score,
    top_k,
)
from dsv41.evaluation.quality_plot import plot_quality
from dsv41.evaluation.retrieval import (
    Phrase,
    attention_mass,
    needle,
    proper_names,
    random_phrases,
    reuse,
)
from dsv41.inference.prefill import PrefillOptions, encode_prompts
from dsv41.layer_table import Mode, layer_table
from dsv41.layers.attention import Attention
from dsv41.model import Model, TokenBatch
from dsv41.numerics.rotary import csa_frequencies, rotary_table
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.state.memory import source_view
from dsv41.state.request import create_sequential_state
from dsv41.steps.decode import decode_step
from dsv41.steps.prefill import replay_decoder
from dsv41.tokens.tokenizer import TOKENIZER_FILE
from dsv41.training.corpora import DataError
from dsv41.training.export import export_checkpoint
from dsv41.training.initial import initial_parameters
from dsv41.training.tokenizer import save_tokenizer, train_tokenizer, vocabulary_fields
from dsv41.verification.capture import by_layer, captured_forward
from pallas_kernels.paged_memory import gather
from tests.conftest import GOLDEN
from tests.helpers import SMALL_LAYOUT, lost_rings, random_model, random_tokens, with_text

# As encoder a loop of two layers: what a window's replay before a hit gives is not exact.
LAYERS = SMALL_LAYOUT | {"engram_layer_ids": (0,)}
# Three windows of 16, and a continuation; two ratio-1 layers, of which the second selects inside of the pool.
LENGTH, PROMPT, CONTINUATION, TEXTS = 64, 50, 8, 3


@functools.cache
def subject() -> Subject:
    return Subject(*random_model(False, **LAYERS))


@functools.cache
def texts() -> Texts:
    sizes = np.random.default_rng(0).integers(1, 5, (TEXTS, LENGTH))
    return Texts(random_tokens(1, TEXTS, LENGTH), sizes)


# ---------------------------------------------------------------- scores


def test_scores_are_those_of_decoding_one_token_after_the_other():
    """By the training pass and by inference, in texts of different lengths, filled up to a batch."""
    model, variables = subject()
    tokens = texts().tokens.copy()
    tokens[1, 21:] = PADDING
    state = create_sequential_state(model.settings, TEXTS, LENGTH)
    wanted, right = np.zeros((TEXTS, LENGTH)), np.zeros((TEXTS, LENGTH), bool)
    for t in range(LENGTH - 1):
        live = jnp.asarray(tokens[:, t] != PADDING)
        state, logits = decode_step(model, variables, state, jnp.asarray(tokens[:, t]), live)
        log_p = scipy.special.log_softmax(np.asarray(logits), axis=1)
        if t % 8 == 0:  # random tokens alone are hardly ever the most likely ones
            tokens[2, t + 1] = log_p[2].argmax()
        for row in range(TEXTS):
            if (token := tokens[row, t + 1]) != PADDING:
                wanted[row, t + 1] = -log_p[row, token] / math.log(2)
                right[row, t + 1] = log_p[row].argmax() == token
    for by_inference in (False, True):
        found = score(subject(), tokens, prefill=by_inference)
        np.testing.assert_allclose(found.bits, wanted, atol=1e-3)
        np.testing.assert_array_equal(found.correct, right)
    assert 8 <= right.sum() < right.size / 2


def test_differences_are_of_texts_not_of_means():
    row = compared("bits", np.array([1.0, 2.0, 6.0]), np.array([0.5, 1.5, 5.5]))
    assert row["bits"] == 3
    assert row["standard_error"] == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert (row["difference"], row["difference_error"], row["texts"]) == (0.5, 0, 3)
    assert compared("bits", np.array([1.0, 2.0]), None)["difference"] is None


# ---------------------------------------------------------------- replay and prefix hits


@functools.cache
def hits() -> dict[int, dict]:
    return {row["hit"]: row for row in prefix(subject(), texts(), PROMPT, (8, 16, 32, 48), CONTINUATION)}


def test_a_cut_pass_measures_what_the_replay_step_gives():
    window = subject().model.settings.text.sliding_window
    exact, ours = replay(subject(), texts(), [(PROMPT, window)], CONTINUATION)
    assert (exact["replayed"], ours["replayed"]) == (PROMPT, window)
    cold = hits()[0]
    for name in ("bits_per_token", "standard_error"):
        assert ours[name] == pytest.approx(cold[name], abs=1e-4)
        assert abs(ours[name] - exact[name]) > 1e-3
    _, whole = replay(subject(), texts(), [(PROMPT, PROMPT)], CONTINUATION)
    assert whole["difference"] == 0


def test_a_prefix_hit_keeps_entries_before_it_and_nothing_else():
    """A memory that ends at the hit, rings of NaN, then one token after the other."""
    model, variables = subject()
    window, hit = model.settings.text.sliding_window, 32
    prompts = texts().tokens[:, :PROMPT].tolist()
    options = PrefillOptions("replay", (window,))
    state = create_sequential_state(model.settings, TEXTS, LENGTH)
    begun = [prompt[:hit] for prompt in prompts]
    state, _ = encode_prompts(model, variables, state, range(TEXTS), begun, options)
    state = lost_rings(state)
    state, tail = encode_prompts(model, variables, state, range(TEXTS), prompts, options, hit)
    state, logits, _ = replay_decoder(model, variables, state, jnp.arange(TEXTS, dtype=jnp.int32), tail)
    bits = []
    for t in range(PROMPT, PROMPT + CONTINUATION):
        token = jnp.asarray(texts().tokens[:, t])
        bits.append(-jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0] / math.log(2))
        state, logits = decode_step(model, variables, state, token, jnp.ones(TEXTS, bool))
    assert hits()[hit]["bits_per_token"] == pytest.approx(float(np.mean(bits)), abs=1e-4)
    assert abs(hits()[hit]["difference"]) > 1e-4


def test_a_hit_within_the_first_window_costs_nothing():
    for hit in (8, 16):
        assert hits()[hit]["difference"] == pytest.approx(0, abs=1e-5)
    assert hits()[48]["difference"] != 0
    assert hits()[0]["difference"] is None


# ---------------------------------------------------------------- pool and top-k


def test_a_pool_costs_nothing_until_more_entries_are_visible():
    text = subject().model.settings.text
    blocks = text.candidate_topk_blocks  # a program that is there
    inside = blocks * text.candidate_block_size
    rows = pool(subject(), texts(), (blocks,), ((1, inside + 1), (inside + 1, LENGTH)))
    assert [row["blocks"] for row in rows] == [LENGTH // text.candidate_block_size, blocks] * 2
    assert rows[1]["difference"] == pytest.approx(0, abs=1e-5)
    assert abs(rows[3]["difference"]) > 1e-4
    assert rows[0]["difference"] is rows[2]["difference"] is None
    with pytest.raises(ValueError, match="pool sizes: 999 blocks exceed the 32 of 64 tokens"):
        pool(subject(), texts(), (999,), ((1, LENGTH),))


def test_top_k_costs_nothing_until_more_entries_are_visible():
    own = subject().model.settings.text.index_topk
    small, base, early, _ = top_k(subject(), texts(), (own // 2,), ((1, LENGTH), (1, own // 2 + 1)))
    assert (small["entries"], base["entries"], base["difference"]) == (own // 2, own, None)
    assert abs(small["difference"]) > 1e-4
    assert early["difference"] == pytest.approx(0, abs=1e-5)


# ---------------------------------------------------------------- selections


@functools.cache
def selecting() -> Subject:
    """A decoder alone: a Full layer with candidate pool, a Reuse layer, and a Reindex layer."""
    decoder = {
        "num_hidden_layers": 3,
        "compress_ratios": (1, 1, 1),
        "kv_source_layer_ids": (0,),
        "index_source_layer_ids": (0, 2),
        "candidate_source_layer_id": 0,
    }
    return Subject(*random_model(False, **LAYERS | decoder))


def test_the_share_of_a_selection_is_that_of_dense_attention():
    """One query at a time: its window, its visible entries and the sink, head by head."""
    model, variables = selecting()
    settings, text = model.settings, model.settings.text
    layer = settings.table.layers[2]
    tokens = np.resize(texts().tokens, (4, LENGTH))  # the shape that reuse() compiles
    state = create_sequential_state(settings, len(tokens), LENGTH)
    batch = TokenBatch(jnp.asarray(tokens), jnp.full(len(tokens), LENGTH, jnp.int32))
    state, _, _, _, inside = captured_forward(model, variables, state, batch, None)
    captured = by_layer(settings, inside)[layer.index]
    params = retrieval._attention_parameters(model, variables, layer)
    x, selection = captured["attn_in"], captured["topk"]
    slot = settings.table.source_slot(layer.index)
    mass = attention_mass(settings, layer.kind, params, state, jnp.int32(slot), x, selection)

    attention = Attention(settings, layer.kind)
    rope = rotary_table(jnp.arange(LENGTH)[None], csa_frequencies(text))
    queries = np.asarray(attention.apply({"params": params}, x, rope, method="queries")[0])[0]
    window = np.asarray(attention.apply({"params": params}, x, rope, method="window_entries").payload)[0]
    pages, table = source_view(state.memory[1].main, state.page_table, slot)
    entries = np.asarray(gather(pages, settings.formats.main_kv, table[:1], jnp.arange(LENGTH)[None]))[0]
    for t in (0, 3, 30, LENGTH - 1):
        seen = entries[: t + 1]
        near = window[max(0, t - text.sliding_window + 1) : t + 1]
        on = np.zeros(t + 1)
        for head in range(text.num_attention_heads):
            q = queries[t, head] * text.head_dim**-0.5
            total = np.exp(near @ q).sum() + np.exp(seen @ q).sum() + np.exp(float(params["attn_sink"][head]))
            on += np.exp(seen @ q) / total
        own = selection[0, t][selection[0, t] >= 0]
        k = selection.shape[-1]
        assert float(mass.global_share[0, t]) == pytest.approx(on.sum() / text.num_attention_heads, abs=1e-5)
        assert float(mass.chosen[0, t]) == pytest.approx(on[own].sum() / on.sum(), abs=1e-5)
        assert float(mass.best[0, t]) == pytest.approx(np.sort(on)[::-1][:k].sum() / on.sum(), abs=1e-5)
        assert float(mass.even[0, t]) == pytest.approx(min(1, k / (t + 1)))
        assert bool(mass.cut[0, t]) == (t + 1 > k)


def test_layers_are_shown_the_selection_of_their_source():
    rows = reuse(selecting(), texts())
    assert [(row["layer"], row["mode"], row["selected_by"]) for row in rows] == [
        (0, "Full", 0),
        (1, "Reuse", 0),
        (2, "Reindex", 2),
    ]
    for row in rows:
        assert row["even"] < row["best"] < 1
        assert 0 < row["selected"] < row["best"]
        assert row["texts"] == TEXTS
    short = Texts(texts().tokens[:, :8], texts().sizes[:, :8])
    with pytest.raises(DataError, match="texts: of 8 tokens"):
        reuse(selecting(), short)


# ---------------------------------------------------------------- phrases


def test_a_phrase_stands_once_or_twice_so_many_tokens_apart(monkeypatch):
    phrases = [Phrase((900, 901), (902, 903 + i, 910)) for i in range(TEXTS)]
    passed = []

    def fake(_: Subject, tokens: np.ndarray) -> Scores:
        passed.append(tokens)
        column = np.arange(LENGTH)
        return Scores(np.broadcast_to(column, tokens.shape).astype(float), (tokens >= 902) & (tokens != 904))

    monkeypatch.setattr(retrieval, "score", fake)
    rows = needle(subject(), texts(), phrases, (20,), lead=6)
    absent, there = passed
    for i, phrase in enumerate(phrases):
        whole = [*phrase.beginning, *phrase.end]
        assert absent[i, :26].tolist() == texts().tokens[i, :26].tolist()
        assert there[i, 6:11].tolist() == whole
        assert there[i, [*range(6), *range(11, 26)]].tolist() == texts().tokens[i, :21].tolist()
        for tokens in (absent, there):
            assert tokens[i, 26:31].tolist() == whole
            assert (tokens[i, 31:] == PADDING).all()
    assert [row["bits_per_token"] for row in rows] == [29.0, 29.0]  # columns 28, 29, 30
    assert rows[1]["tokens_right"] == pytest.approx((1 + 2 / 3 + 1) / 3)  # 904 is one text's second token
    assert rows[1]["phrases_right"] == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="distances: 60 and a phrase of 5 exceed 64"):
        needle(subject(), texts(), phrases, (60,), lead=6)
    with pytest.raises(DataError, match="distances: 3 is less than a phrase of 5"):
        needle(subject(), texts(), phrases, (3,), lead=6)


def test_names_are_words_with_a_capital_inside_of_sentences():
    sentences = ["And Abram said to Sarai. Then Abram rose, Lot with him."] * 3 + ["Then came Ur and Abram."]
    assert proper_names(sentences, least=3, most=6) == ["Lot", "Sarai"]  # no "Then", no "Ur"; too many of Abram


# ---------------------------------------------------------------- texts and the command


# One layer, of the decoder, with whatever has a rounding of its own.
SHALLOW = SMALL_LAYOUT | {
    "num_hidden_layers": 1,
    "compress_ratios": (1,),
    "kv_source_layer_ids": (0,),
    "index_source_layer_ids": (0,),
    "candidate_source_layer_id": 0,
    "engram_layer_ids": (0,),
}
PHRASE = ["And", "the", "name", "of", "the", "keeper", "was"]
NEEDLES = [[distance, phrase] for distance in (32, 64, 96, 128) for phrase in ("absent", "there")]
SYLLABLES = ("ba", "do", "ke", "lu", "mi", "no", "ra", "su", "ti", "ve", "wa", "zo")


@functools.cache
def documents() -> tuple[str, ...]:
    rng = np.random.default_rng(3)
    words = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(400)]
    names = [word.capitalize() for word in words if len(word) > 3][:12]
    return tuple(" ".join(rng.choice([*words, *names * 4, *PHRASE * 4], 300)) for _ in range(4))


@functools.cache
def tokenizer():
    return train_tokenizer(documents(), 512)


def test_texts_are_beginnings_of_documents_that_are_long_enough():
    short = "ba do"
    chosen = choose_texts([short, *documents()], tokenizer(), 0, 40, 2)
    assert chosen.tokens.shape == (2, 40)
    assert (chosen.tokens[:, 0] == 0).all()
    for tokens, sizes, document in zip(chosen.tokens, chosen.sizes, (documents()[0], documents()[2]), strict=True):
        text = tokenizer().decode(tokens[1:].tolist())
        assert document.startswith(text)
        assert sizes.sum() == len(text.encode())
    with pytest.raises(DataError, match="texts: 5 are wanted, 4 held-out texts have 40 tokens"):
        choose_texts([short, *documents()], tokenizer(), 0, 40, 5)
    with pytest.raises(DataError, match="texts: 1; a standard error needs two"):
        choose_texts(documents(), tokenizer(), 0, 40, 1)


def test_phrases_end_in_three_different_names():
    phrases = random_phrases(tokenizer(), ["Bado", "Luke", "Noti"], 5, 0)
    ends = {tokenizer().decode(list(phrase.end)) for phrase in phrases}
    assert len(ends) > 1
    for end in ends:
        assert sorted(end.replace(".", "").replace("and ", "").strip().split(", ")) == ["Bado", "Luke", "Noti"]
    with pytest.raises(DataError, match="names: 2 where three"):
        random_phrases(tokenizer(), ["Bado", "Luke"], 5, 0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> pathlib.Path:
    """A small random model, packed and as floats, each with its vocabulary, and texts."""
    home = tmp_path_factory.mktemp("quality")
    config = load_config(GOLDEN / "mini8" / "fp8")
    fields = vocabulary_fields(tokenizer())
    config = with_text(config, **SHALLOW, **fields.pop("text_config"))
    config = dataclasses.replace(config, **fields)
    model = Model(Settings.for_training(config, RoundingPolicy.preset("full")))
    params = initial_parameters(model, 0)
    for name in ("packed", "plain"):
        export_checkpoint(home / name, model, params, plain=name == "plain")
        save_tokenizer(tokenizer(), home / name)
    lines = [json.dumps({"text": document}) for document in documents()]
    (home / "texts.jsonl").write_text("\n".join(lines))
    return home


def command(home: pathlib.Path, *arguments: str) -> int:
    shared = ["--texts", "2", "--text", str(home / "texts.jsonl"), "--length", "64", "--continuation", "8"]
    return main(["eval", "quality", "--checkpoint", str(home / "packed"), *shared, *arguments])


def test_the_command_writes_rows_and_tables(checkpoints, capsys):
    paths = {name: checkpoints / f"quality.{name}" for name in ("json", "md")}
    outputs = ["--json", str(paths["json"]), "--markdown", str(paths["md"])]
    plain = ["--plain", f"trained={checkpoints / 'plain'}"]
    twice = ["--reindexed", str(checkpoints / "packed")]
    assert command(checkpoints, "--question", "rounding", "reindexing", *plain, *twice, *outputs) == 0
    results = json.loads(paths["json"].read_text())
    # A model against itself, whose layers are counted.
    modes = [layer.kind.mode for layer in layer_table(load_config(checkpoints / "packed").text).layers]
    counts = {"layers_choose": sum(mode in (Mode.FULL, Mode.REINDEX) for mode in modes)}
    counts["layers_reuse"] = modes.count(Mode.REUSE)
    reindexed, own = results.pop("reindexing")
    assert counts.items() <= own.items()
    assert (reindexed["difference"], own["difference"]) == (None, 0)
    assert 0 < own["bits_per_byte"] == reindexed["bits_per_byte"]
    rows = {(row["weights"], row["rounded"]): row["bits_per_byte"] for row in results.pop("rounding")}
    assert not results
    assert list(rows) == [("trained", "off"), ("trained", "cache"), ("trained", "full"), ("packed", "as stored")]
    # What is stored is what training rounded to; sums in other programs flip a rounding here and there.
    full = rows["trained", "full"]
    assert abs(rows["packed", "as stored"] - full) < 0.1 * abs(rows["trained", "off"] - full)
    table = paths["md"].read_text()
    assert "## Rounding" in table
    assert f"{rows['trained', 'cache']:.4f} ± " in table
    assert f"{rows['trained', 'cache']:.4f} ± " in capsys.readouterr().out


def test_the_command_draws_a_figure_and_asks_what_fits_the_texts(checkpoints, capsys, monkeypatch):
    """Near distances in texts of a training row, far ones in longer texts."""
    pytest.importorskip("matplotlib")
    lengths = []

    def fake(_: Subject, tokens: np.ndarray) -> Scores:
        lengths.append(tokens.shape[1])
        return Scores(np.ones(tokens.shape), np.ones(tokens.shape, bool))

    monkeypatch.setattr(retrieval, "score", fake)
    outputs = ["--json", str(checkpoints / "needle.json"), "--plot", str(checkpoints / "needle.svg")]
    assert command(checkpoints, "--question", "needle", *outputs) == 0
    assert (checkpoints / "needle.svg").read_text().startswith("<?xml")
    rows = json.loads((checkpoints / "needle.json").read_text())["needle"]
    # Windows of 16: one is shorter than a phrase, sixteen leave no room for it.
    assert [[row["distance"], row["phrase"]] for row in rows] == NEEDLES
    assert lengths == [64, 64] + [160] * (len(NEEDLES) - 2)
    assert all(row["phrases_right"] == 1 for row in rows)
    assert "A phrase read once" in capsys.readouterr().out


def test_what_the_command_cannot_do(checkpoints, capsys):
    assert command(checkpoints, "--texts", "9", "--question", "top-k") == 2
    assert "texts: 9 are wanted, 4 held-out texts have 64 tokens" in capsys.readouterr().err
    assert command(checkpoints, "--length", "1000") == 2
    assert "--length: 1000; 2032 positions exceed max_position_embeddings 256" in capsys.readouterr().err
    assert command(checkpoints, "--plot", "figure.gif") == 2
    assert "--plot: figure.gif is neither .png nor .svg" in capsys.readouterr().err
    assert command(checkpoints, "--plain", f"a={checkpoints / 'packed'}", "--question", "rounding") == 2
    assert "has quantised weights" in capsys.readouterr().err
    assert command(checkpoints, "--question", "reindexing") == 2
    assert "--question reindexing: needs --reindexed" in capsys.readouterr().err
    (checkpoints / "packed" / TOKENIZER_FILE).rename(checkpoints / "vocabulary")
    try:
        assert command(checkpoints) == 2
        assert "has no tokenizer.json" in capsys.readouterr().err
    finally:
        (checkpoints / "vocabulary").rename(checkpoints / "packed" / TOKENIZER_FILE)


def test_every_question_has_its_panel(tmp_path):
    pytest.importorskip("matplotlib")
    from dsv41.commands.eval_quality import QUESTIONS
    from dsv41.evaluation.quality_plot import PANELS

    assert list(PANELS) == [question for question in QUESTIONS if question not in ("words", "reindexing")]  # one number
    shared = compared("bits_per_token", np.array([1.0, 2.0]), np.array([1.0, 1.5]))
    shared |= compared("bits_per_byte", np.array([1.0, 2.0]), np.array([1.0, 1.5]))
    row = shared | {"weights": "w", "rounded": "off", "prompt": 48, "replayed": 16, "hit": 16, "distance": 64}
    row |= {"from": 0, "to": 32, "blocks": 4, "entries": 8, "layer": 1, "selected_by": 0, "phrase": "there"}
    row |= {"model": "this", "selected": 0.5, "own_error": 0.1, "best": 0.7, "best_error": 0.1}
    plot_quality({question: [row] for question in QUESTIONS}, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no question"):
        plot_quality({}, tmp_path / "none.png")
