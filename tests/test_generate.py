"""The engine: batches refilled as requests finish, streams, ends, figures; same tokens alone and in any batch."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from dsv41.checkpoint import CheckpointError
from dsv41.config import load_config
from dsv41.inference import engine as engine_module
from dsv41.inference.engine import Engine, EngineOptions
from dsv41.inference.prefill import PrefillOptions
from dsv41.inference.requests import Request, RequestError
from dsv41.inference.slots import Slots
from dsv41.inference.stream import TextStream
from dsv41.loading import checkpoint_token_map
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.state.sizes import state_bytes
from dsv41.tokens.compression import token_map
from dsv41.tokens.tokenizer import Tokenizer
from tests.fixtures_engine import GOLDEN, SMALL_OPTIONS
from tests.helpers import random_tokens

EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


# ---------------------------------------------------------------- the real model


def sampled_requests() -> list[Request]:
    """Of a small vocabulary: sorting a large one for top-p takes most of a step on a CPU."""
    prompts = [random_tokens(i, n).tolist() for i, n in enumerate((5, 2, 9, 33, 8, 6))]
    return [
        Request(tokens=prompt, id=i, max_new_tokens=2 + i % 3, temperature=1.2, top_p=0.95, seed=100 + i)
        for i, prompt in enumerate(prompts)
    ]


def test_a_request_gives_the_same_tokens_alone_and_in_any_batch(small_engine):
    requests = sampled_requests()
    together = [c.tokens for c in small_engine.generate(requests)]
    shuffled = np.random.default_rng(0).permutation(len(requests))
    again = small_engine.generate([requests[i] for i in shuffled])
    assert [c.tokens for c in again] == [together[i] for i in shuffled]
    assert [c.id for c in again] == shuffled.tolist()
    for index in (0, 5):  # one of the first batch, one that came into a used slot
        assert small_engine.generate([requests[index]])[0].tokens == together[index]


def test_seeds_belong_to_requests(default_engine):
    request = Request(prompt="Hello", max_new_tokens=3, temperature=1.5, seed=1)
    same, again, other = default_engine.generate([request, request, dataclasses.replace(request, seed=2)])
    assert same.tokens == again.tokens
    assert same.tokens != other.tokens


def test_streamed_text_is_the_final_text(default_engine, tokenizer):
    requests = [Request(prompt=p, max_new_tokens=12) for p in ("The capital of France", "水は")]
    pieces, tokens, done = {0: "", 1: ""}, {0: [], 1: []}, {}
    for event in default_engine.stream(requests):
        assert event.index not in done
        pieces[event.index] += event.text
        tokens[event.index].append(event.token)
        if event.completion is not None:
            done[event.index] = event.completion
    assert set(done) == {0, 1}
    for index, completion in done.items():
        assert completion.text == pieces[index] == tokenizer.decode(tokens[index])
        assert completion.tokens == tuple(tokens[index])
        assert completion.finish_reason == "length"
    assert default_engine.generate(requests)[1].text == done[1].text


def test_stop_texts_cut_the_text_and_save_tokens(default_engine):
    request = Request(prompt="The capital of France", max_new_tokens=12)
    whole = default_engine.generate([request])[0]
    stop = whole.text[9:14]
    cut = default_engine.generate([dataclasses.replace(request, stop=("not there", stop))])[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert len(cut.tokens) < len(whole.tokens)


def test_text_prompts_begin_with_the_begin_token_once(default_engine, tokenizer):
    bos = default_engine.model.settings.config.bos_token_id
    ids = (bos, *tokenizer.encode("Hello"))
    spelt = tokenizer.token_text(bos) + "Hello"
    forms = [Request(prompt="Hello"), Request(tokens=ids), Request(prompt=spelt)]
    found = default_engine.generate([dataclasses.replace(form, max_new_tokens=4) for form in forms])
    assert len({c.tokens for c in found}) == 1
    assert {c.figures.prompt_tokens for c in found} == {len(ids)}


def test_figures(default_engine):
    requests = [Request(prompt="Hello", max_new_tokens=4), Request(prompt="a", max_new_tokens=1)]
    few, one = default_engine.generate(requests)
    figures, settings = few.figures, default_engine.model.settings
    assert figures.new_tokens == 4
    assert 0 < figures.ttft_s < figures.total_s
    assert figures.ttft_s + figures.first_inter_token_s + 2 * figures.steady_inter_token_s == pytest.approx(
        figures.total_s, rel=1e-6
    )
    assert figures.tokens_per_s == pytest.approx(4 / figures.total_s)
    assert one.figures.first_inter_token_s is None
    assert one.figures.steady_inter_token_s is None
    shape = default_engine.slot_shape([1])
    assert figures.batch_state_bytes == sum(state_bytes(settings, shape.batch, shape.pages, shape.table_pages).values())
    sizes = shape.sizes(settings)
    assert shape.batch * (sizes.request + shape.table_pages * sizes.page) == sizes.batch
    assert one.figures.state_bytes == sizes.request + sizes.page


def test_the_state_covers_what_was_consumed_not_what_was_sampled(default_engine):
    shape = default_engine.slot_shape([1])
    speculation = default_engine._speculation(shape.batch)
    slots = Slots(
        default_engine.model, default_engine.variables, shape, PrefillOptions(chunk_sizes=(128,)), speculation
    )
    (row,) = slots.room_for([12])
    (first,) = slots.open([row], [Request(tokens=[5, 6, 7], max_new_tokens=9)], [[5, 6, 7]])
    assert int(slots._state.length[row]) == 3
    assert int(slots._sampler.pending[row]) == first
    second = slots.step()[row][0]
    assert int(slots._state.length[row]) == 4
    assert int(slots._sampler.pending[row]) == second
    np.testing.assert_array_equal(np.delete(np.asarray(slots._state.length), row), 0)


def test_a_checkpoint_with_its_own_vocabulary(small_engine):
    assert small_engine.tokenizer is None
    requests = [
        Request(tokens=[7 * i + j for j in range(n)], max_new_tokens=5, temperature=0.8, seed=i)
        for i, n in enumerate((9, 16, 3))
    ]
    done = small_engine.generate(requests)
    assert [c.text for c in done] == [None] * 3
    assert all(len(c.tokens) == 5 or c.tokens[-1] == EOS for c in done)
    assert small_engine.generate(requests[2:])[0].tokens == done[2].tokens
    with pytest.raises(RequestError, match=r"request 0: prompt: 'Hello' cannot be read: .* 512 tokens"):
        small_engine.stream([Request(prompt="Hello")])
    with pytest.raises(RequestError, match="stop: "):
        small_engine.stream([Request(tokens=[3], stop=["x"])])


def test_prompts_up_to_the_window_are_the_same_in_replay_and_exact(small_engine):
    exact = Engine(
        small_engine.model,
        small_engine.variables,
        None,
        dataclasses.replace(SMALL_OPTIONS, prefill=PrefillOptions("exact", SMALL_OPTIONS.prefill.chunk_sizes)),
    )
    requests = [Request(tokens=range(20, 20 + n), max_new_tokens=6) for n in (1, 15, 16)]
    assert [c.tokens for c in exact.generate(requests)] == [c.tokens for c in small_engine.generate(requests)]


def test_prefill_progress_counts_the_prompt(small_engine):
    seen = {0: 0, 1: 0}
    requests = [Request(tokens=range(40, 40 + n), max_new_tokens=1) for n in (35, 7)]
    small_engine.generate(requests, lambda index, count: seen.update({index: seen[index] + count}))
    assert seen == {0: 35, 1: 7}


# ---------------------------------------------------------------- the loop, with scripted tokens in place of the model


class ScriptedSlots(Slots):
    """Slots whose request r draws the tokens of ``script[r.id]``; pages, slots and order are the real ones."""

    script: dict[str, list[int]]
    most_open = 0

    width = 1  # tokens that a step commits for each request, as far as the script goes

    def __init__(self, model, variables, shape, options, speculation, engram):
        super().__init__(model, variables, shape, options)
        self._tokens = {}

    def warm_up(self, chunks):
        pass

    def _first_tokens(self, rows, requests, prompts, progress, pictures):
        self._tokens |= {row: iter(self.script[request.id]) for row, request in zip(rows, requests, strict=True)}
        return [next(self._tokens[row]) for row in rows]

    def step(self):
        type(self).most_open = max(self.most_open, int(self._open.sum()))
        tokens = [[-1]] * len(self._open)  # a free slot's token must not be looked at
        for row in np.flatnonzero(self._open):
            tokens[row] = list(itertools.islice(self._tokens[row], self.width))
        return tokens


@pytest.fixture
def scripted(default_engine, monkeypatch):
    """A function (options, script) -> engine that draws scripted tokens."""

    def make(options: EngineOptions, script: dict[str, list[int]]) -> Engine:
        ScriptedSlots.script, ScriptedSlots.most_open = script, 0
        monkeypatch.setattr(engine_module, "Slots", ScriptedSlots)
        return Engine(default_engine.model, default_engine.variables, default_engine.tokenizer, options)

    return make


def test_the_end_token_ends_and_is_no_text(scripted, tokenizer):
    words = tokenizer.encode("one two three")
    engine = scripted(EngineOptions(max_batch=2), {"a": [*words, EOS, 9999], "b": [EOS], "c": words})
    requests = [Request(prompt="x", id=i, max_new_tokens=n) for i, n in (("a", 9), ("b", 9), ("c", len(words)))]
    a, b, c = engine.generate(requests)
    assert (a.text, a.tokens, a.finish_reason) == ("one two three", (*words, EOS), "stop")
    assert (b.text, b.tokens, b.finish_reason) == ("", (EOS,), "stop")
    assert (c.text, c.tokens, c.finish_reason) == ("one two three", tuple(words), "length")


def test_what_a_step_commits_beyond_the_end_is_dropped(scripted, tokenizer, monkeypatch):
    monkeypatch.setattr(ScriptedSlots, "width", 4)
    words = tokenizer.encode("one two three")
    script = {"a": [*words, EOS, 9999, 9999], "b": words * 3, "c": words}
    engine = scripted(EngineOptions(max_batch=2), script)
    requests = [Request(prompt="x", id="a", max_new_tokens=30), Request(prompt="x", id="b", stop=["two"])]
    a, b, c = engine.generate([*requests, Request(prompt="x", id="c", max_new_tokens=len(words))])
    assert (a.text, a.tokens, a.finish_reason) == ("one two three", (*words, EOS), "stop")
    assert (b.text, b.finish_reason) == ("one ", "stop")
    assert c.tokens == tuple(words)


def test_an_end_token_at_the_length_limit_is_a_stop(scripted, tokenizer):
    words = tokenizer.encode("one two")
    engine = scripted(EngineOptions(), {"a": [*words, EOS]})
    assert engine.generate([Request(prompt="x", id="a", max_new_tokens=len(words) + 1)])[0].finish_reason == "stop"


def test_slots_are_refilled_as_requests_finish(scripted):
    script = {str(i): [500 + i] * (1 + 3 * (i % 4)) for i in range(13)}
    engine = scripted(EngineOptions(max_batch=4), script)
    requests = [Request(tokens=[9], id=str(i), max_new_tokens=len(script[str(i)])) for i in range(13)]
    assert [c.tokens for c in engine.generate(requests)] == [tuple(script[str(i)]) for i in range(13)]
    assert ScriptedSlots.most_open == 4


def test_requests_wait_for_pages(scripted):
    # The pool holds two of these requests though there are four slots.
    engine = scripted(EngineOptions(max_batch=4, pool_tokens=256), {str(i): [700 + i] * 100 for i in range(5)})
    requests = [Request(tokens=[9] * 20, id=str(i), max_new_tokens=100) for i in range(5)]
    assert [c.tokens[0] for c in engine.generate(requests)] == [700, 701, 702, 703, 704]
    assert ScriptedSlots.most_open == 2
    with pytest.raises(RequestError, match=r"request 0: max_new_tokens: 300 .* never fit into the pool of 256 tokens"):
        engine.stream([Request(tokens=[9], max_new_tokens=300)])


def test_batch_buckets(default_engine):
    def shape(options: EngineOptions, lengths):
        return Engine(default_engine.model, default_engine.variables, None, options).slot_shape(lengths)

    free = EngineOptions(max_batch=6, max_length=1000)
    assert [shape(free, [10] * n).batch for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 6, 6]
    assert [shape(free, [n]).table_pages for n in (1, 64, 65, 200, 600, 1000)] == [1, 1, 2, 4, 16, 16]
    fixed = dataclasses.replace(free, deterministic=True)
    assert {shape(fixed, [n] * n) for n in (1, 3, 9)} == {shape(fixed, [1000] * 6)}


@pytest.mark.parametrize(("max_length", "size"), [(None, 1024), (1024, 1024), (1000, 128), (20, 16), (8, 16)])
def test_deterministic_prefill_has_one_chunk_size(default_engine, max_length, size):
    options = EngineOptions(max_length=max_length, deterministic=True)
    engine = Engine(default_engine.model, default_engine.variables, None, options)
    assert engine._prefill.chunk_sizes == (size,)


# ---------------------------------------------------------------- text


def pieces_of(tokenizer: Tokenizer, text: str, stop: list[str]) -> tuple[list[str], bool]:
    stream, pieces = TextStream(tokenizer, stop), []
    for token in tokenizer.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream.stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three four", ["two th"], "one "),
        ("one two three four", ["four", "three"], "one two "),
        ("one two", ["two three"], "one two"),  # begun, never finished: given out at the end
        ("aaab", ["aab"], "a"),
        ("abcabcabd", ["abcabd"], "abc"),
        ("naïve 水の音 ends", ["の"], "naïve 水"),
        ("nothing", [], "nothing"),
        ("xy", ["xy", "y"], ""),
    ],
)
def test_stop_texts(tokenizer, text, stop, expected):
    pieces, stopped = pieces_of(tokenizer, text, stop)
    assert "".join(pieces) == expected
    assert stopped == any(s in text for s in stop)


@pytest.mark.parametrize("stop", ["END", "ENDEND", "E", "D", "NDE"])
def test_no_part_of_a_stop_text_is_given_out(tokenizer, stop):
    text = "some E and EN and N words, then " + stop + " and more"
    pieces, _ = pieces_of(tokenizer, text, [stop])
    given, final = "", text[: text.index(stop)]
    for piece in pieces:
        given += piece
        assert final.startswith(given)
    assert given == final


# ---------------------------------------------------------------- requests that are refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of them is needed, neither is given"),
        ({"prompt": "a", "tokens": [3]}, "exactly one of them is needed, both are given"),
        ({"prompt": 3}, "prompt: 3 is not a text"),
        ({"prompt": "\ud800"}, "prompt: '\\ud800' is not a text"),
        ({"tokens": []}, "tokens: [] is empty"),
        ({"tokens": "abc"}, "tokens: 'abc' is not a list of integers"),
        ({"tokens": [1, 2.5]}, "tokens: [1, 2.5] is not a list of integers"),
        ({"tokens": [True]}, "tokens: [True] is not a list of integers"),
        ({"prompt": "a", "id": 1.5}, "id: 1.5 is neither text nor integer"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens: 0 is below 1"),
        ({"prompt": "a", "max_new_tokens": "9"}, "max_new_tokens: '9' is not an integer"),
        ({"prompt": "a", "temperature": -0.1}, "temperature: -0.1 is below 0"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature: nan is not a finite number"),
        ({"prompt": "a", "top_p": 0}, "top_p: 0 is not a number in (0, 1]"),
        ({"prompt": "a", "top_p": 1.01}, "top_p: 1.01 is not a number in (0, 1]"),
        ({"prompt": "a", "seed": -1}, "seed: -1 is not an integer in"),
        ({"prompt": "a", "seed": 2**32}, "seed: 4294967296 is not an integer in"),
        ({"prompt": "a", "stop": "x"}, "stop: 'x' is not a list of non-empty texts"),
        ({"prompt": "a", "stop": [""]}, "stop: [''] is not a list of non-empty texts"),
    ],
)
def test_bad_requests_are_refused(fields, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        Request(**fields)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(tokens=[5, 129_280]), "request 1: tokens: token 129280 at position 1 is not in the vocabulary"),
        (Request(tokens=[-1], id="x"), "request 1 (id 'x'): tokens: token -1 at position 0 is not in the vocabulary"),
        (Request(tokens=[5, 129_264]), "request 1: tokens: token 129264 at position 1 stands for a picture"),
        (
            Request(tokens=[5] * 200, max_new_tokens=57),
            "request 1: max_new_tokens: 57 after a prompt of 200 tokens exceed the 256 positions",
        ),
    ],
)
def test_requests_that_the_model_cannot_serve_are_refused_before_any_work(default_engine, request_, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        default_engine.stream([Request(tokens=[5]), request_])


def test_a_text_that_spells_the_picture_token_is_refused(default_engine, tokenizer):
    text = "look: " + tokenizer.token_text(129_264)
    with pytest.raises(RequestError, match=r"prompt: token 129264 at position \d stands for a picture"):
        default_engine.stream([Request(prompt=text)])


@pytest.mark.parametrize("fields", [{"max_batch": 0}, {"max_length": 0}, {"pool_tokens": -5}])
def test_bad_options_are_refused(fields):
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"{name}: {value} is below 1"):
        EngineOptions(**fields)


def test_a_length_beyond_the_model_is_refused(default_engine):
    with pytest.raises(ValueError, match="max_length: 8193 exceeds max_position_embeddings 8192"):
        Engine(default_engine.model, default_engine.variables, None, EngineOptions(max_length=8193))


def test_nothing_to_do(default_engine):
    assert default_engine.generate([]) == []


# ---------------------------------------------------------------- token maps


def test_the_map_of_the_packaged_vocabulary_is_computed(default_engine, tokenizer):
    np.testing.assert_array_equal(default_engine.variables["constants"]["token_map"], token_map(tokenizer))


def test_token_map_beside_or_above_the_checkpoint(tmp_path):
    config, path = load_config(GOLDEN / "mini8" / "fp8"), tmp_path / "model"
    path.mkdir()
    ids = np.load(GOLDEN / "mini8" / "token_map.npy")
    with pytest.raises(CheckpointError, match=r"no token_map\.npy there or one directory above"):
        checkpoint_token_map(config, path, None)
    np.save(tmp_path / "token_map.npy", ids)
    np.testing.assert_array_equal(checkpoint_token_map(config, path, None), ids)
    np.save(path / "token_map.npy", ids[::-1])
    np.testing.assert_array_equal(checkpoint_token_map(config, path, None), ids[::-1])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(511, np.int32), r"int32 \[511\] where integers \[512\] are needed"),
        (np.zeros(512, np.float32), r"float32 \[512\] where integers \[512\] are needed"),
        (np.full(512, 347), r"ids 347 … 347 outside 0 … 346"),
        (np.full(512, -1), r"ids -1 … -1 outside 0 … 346"),
    ],
)
def test_token_maps_that_do_not_fit_are_refused(tmp_path, ids, message):
    np.save(tmp_path / "token_map.npy", ids)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_token_map(load_config(GOLDEN / "mini8" / "fp8"), tmp_path, None)


def test_models_of_equal_settings_share_compiled_steps():
    config = load_config(GOLDEN / "mini8" / "fp8")
    assert hash(Model(Settings.default(config))) == hash(Model(Settings.default(config)))
