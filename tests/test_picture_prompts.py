"""Pictures in prompts: placeholders, chunk edges, the engine, files and lines."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from dsv41 import cli
from dsv41.checkpoint import CheckpointError
from dsv41.config import load_config
from dsv41.defaults import default_config
from dsv41.inference.engine import Engine
from dsv41.inference.prefill import ImageSpan, PrefillOptions, _place_after, chunk_batches, image_spans, prefill
from dsv41.inference.requests import PICTURE_PLACEHOLDER, Request, RequestError, prompt_tokens
from dsv41.model import Model
from dsv41.pictures.encoder import EncodedPicture, Pictures
from dsv41.pictures.files import picture_plan
from dsv41.settings import Settings
from dsv41.tokens.tokenizer import Tokenizer
from dsv41.verification.golden import Golden
from dsv41.verification.vision import golden_picture, golden_pictures
from tests.conftest import GOLDEN
from tests.helpers import (
    ALL_SLOTS,
    SLOTS,
    SMALL_LAYOUT,
    TWO_LAYERS,
    assert_close,
    fresh_state,
    mini8_config,
    owned,
    poison_contents,
    random_model,
    random_tokens,
)
from tests.test_cli import DEFAULT_FLAGS, MINI8, ROOT

pytestmark = pytest.mark.usefixtures("random_engines_made_once")

SHAPES = GOLDEN.parent / "pictures" / "shapes.png"
IMAGE = 500  # the image token of the small vocabularies


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


def encoded(span: int, seed: int = 0, width: int | None = None) -> EncodedPicture:
    d = mini8_config().text.hidden_size if width is None else width
    return EncodedPicture(np.random.default_rng(seed).normal(0, 2.8, (span, d)).astype(np.float32))


def tokens_of(request: Request, limit: int = 256) -> tuple[int, ...]:
    return prompt_tokens(request, mini8_config(), None, limit)


# Placeholders


def test_placeholders_become_spans():
    span = picture_plan(SHAPES, mini8_config().vision).span
    assert span == 2 * (3 + 1) + 2
    request = Request(tokens=[IMAGE, 7, IMAGE, IMAGE, 8, IMAGE], images=[SHAPES, encoded(4), encoded(6), str(SHAPES)])
    image = [IMAGE]
    assert tokens_of(request) == (*image * span, 7, *image * 4, *image * 6, 8, *image * span)
    assert request.picture_files == (SHAPES, str(SHAPES))


def test_a_text_spells_the_placeholder_as_the_model_does(tokenizer):
    config = default_config()
    span = picture_plan(SHAPES, config.vision).span
    found = prompt_tokens(Request(prompt=f"a{PICTURE_PLACEHOLDER}b", images=[SHAPES]), config, tokenizer, 256)
    assert found == (0, *tokenizer.encode("a"), *[config.image_token_id] * span, *tokenizer.encode("b"))
    packaged = tokenizer.token_form(config.image_token_id)
    assert packaged != PICTURE_PLACEHOLDER  # the packaged vocabulary is an older one
    assert prompt_tokens(Request(prompt=f"a{packaged}b", images=[SHAPES]), config, tokenizer, 256) == found


@pytest.mark.parametrize(
    ("tokens", "images", "message"),
    [
        ([IMAGE, 5, IMAGE], [SHAPES], r"tokens: token 500 at position 2 stands for a picture, and images\[1\] is not"),
        ([5, IMAGE], [], r"token 500 at position 1 .* images\[0\] is not given \(0 for 1 placeholders\)"),
        ([IMAGE], [SHAPES, "b.png"], r"images\[1\]: 'b\.png' has no place: 2 are given, and tokens has 1 placeholders"),
        ([5], [encoded(4)], r"images\[0\]: an encoded picture has no place: .* 0 placeholders \(token 500\)"),
        ([IMAGE, IMAGE], [SHAPES, "none.png"], r"images\[1\]: none\.png: No such file or directory"),
        ([IMAGE], [__file__], r"images\[0\]: .*test_picture_prompts\.py: no picture in the format"),
        ([IMAGE], [encoded(4, width=7)], r"images\[0\]: embeddings are 7 wide, the model 128"),
        ([IMAGE], [encoded(65)], r"images\[0\]: a span of 65 positions exceeds max_image_tokens 64"),
        ([IMAGE] * 5, [encoded(64)] * 5, r"max_new_tokens: 128 after a prompt of 320 tokens exceed the 256 positions"),
    ],
)
def test_pictures_and_placeholders_must_match(tokens, images, message):
    with pytest.raises(RequestError, match=message):
        tokens_of(Request(tokens=tokens, images=images))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("a.png", r"images: 'a\.png' is not a list of files or encoded pictures"),
        (None, "images: None is not a list"),
        ([SHAPES, 3], r"images\[1\]: int is neither a file's path nor an EncodedPicture"),
        ([np.zeros((4, 128))], r"images\[0\]: ndarray is neither"),
    ],
)
def test_images_are_a_list_of_files(images, message):
    with pytest.raises(RequestError, match=message):
        Request(tokens=[IMAGE], images=images)


# Chunks


def test_spans_lie_at_their_tokens():
    settings = Settings.default(mini8_config())
    pictures = [encoded(n, n).embeddings for n in (4, 5)]
    for tokens, starts in (([IMAGE] * 9, (0, 4)), ([7, *[IMAGE] * 4, 8, 9, *[IMAGE] * 5], (1, 7))):
        spans = image_spans(tokens, pictures, settings)
        assert tuple(span.start for span in spans) == starts
        for span, embeddings in zip(spans, pictures, strict=True):
            np.testing.assert_array_equal(span.embeddings, embeddings)
    for tokens in ([IMAGE] * 8, [IMAGE] * 10, [*[IMAGE] * 3, 5, *[IMAGE] * 6], []):
        with pytest.raises(ValueError, match=r"picture \d: |image token 500 beyond"):
            image_spans(tokens, pictures, settings)


@pytest.mark.parametrize("width", [1, 3, 8, 64])
def test_chunks_carry_their_parts_of_the_spans(width):
    rows = [[ImageSpan(2, encoded(9, 1).embeddings), ImageSpan(11, encoded(4, 2).embeddings)], []]
    prompts, begin = [list(range(20)), list(range(13))], 5
    batches = list(chunk_batches(prompts, PrefillOptions(chunk_sizes=(width,)), begin, rows))
    flags = np.concatenate([np.asarray(batch.is_image) for batch in batches], axis=1)
    values = np.concatenate([np.asarray(batch.embeddings) for batch in batches], axis=1)
    wanted = np.zeros((2, begin + flags.shape[1]), bool)
    wanted[0, 2:15] = True
    np.testing.assert_array_equal(flags, wanted[:, begin:])
    whole = np.concatenate([span.embeddings for span in rows[0]])
    np.testing.assert_array_equal(values[0, : 15 - begin], whole[begin - 2 :])


def test_text_has_no_image_arrays():
    """Else every prompt would run, and compile, the steps of pictures."""
    for images in (None, [[], []]):
        for batch in chunk_batches([[1, 2], [3]], PrefillOptions(), 0, images):
            assert batch.is_image is None
            assert batch.embeddings is None


def test_history_after_a_prefix_blocks_pictures():
    model = Model(Settings.default(mini8_config()))
    reach = model.settings.text.engram_max_ngram_size - 1
    ids = np.arange(512, dtype=np.int32)[::-1].copy()
    variables = {"constants": {"token_map": jnp.asarray(ids)}}
    prompt = list(range(20))
    for start, stop in ((0, 3), (8, 10), (9, 14), (5, 11), (11, 15), (8, 9)):
        span = ImageSpan(start, encoded(stop - start).embeddings)
        state = _place_after(variables, fresh_state(model.settings), jnp.array([2]), [prompt], 10, [[span]])
        wanted = [-1 if start <= p < stop else ids[p] for p in range(10 - reach, 10)]
        np.testing.assert_array_equal(state.ngram_tail[2], wanted)


def test_a_span_may_be_cut_by_a_chunk_at_any_position():
    """Two pictures side by side move over the edges of chunks of 16; equal to one chunk, rounding off."""
    model, variables = random_model(False, **SMALL_LAYOUT | TWO_LAYERS)
    pictures = [encoded(7, 1).embeddings, encoded(4, 2).embeddings]

    def run(chunk: int, begins: range):
        state = poison_contents(fresh_state(model.settings))
        prompts, images = [], []
        for begin in begins:
            text = random_tokens(begin, 40).tolist()
            prompts.append(text[:begin] + [IMAGE] * 11 + text[begin:])
            images.append(image_spans(prompts[-1], pictures, model.settings))
        options = PrefillOptions(chunk_sizes=(chunk,))
        return prefill(model, variables, state, ALL_SLOTS, prompts, options, images=images)

    for begin in range(4, 4 + 12, SLOTS):
        begins = range(begin, begin + SLOTS)
        (one, wanted), (many, found) = run(64, begins), run(16, begins)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
        for slot in ALL_SLOTS:
            assert_close(owned(many, slot), owned(one, slot))


def test_golden_prompts_from_their_patches(rounded_mini8):
    """Patches to logits: what verification compares part by part, through the drivers that users run."""
    model, variables = rounded_mini8
    golden = Golden(GOLDEN / "mini8" / "f32", GOLDEN / "mini8" / "fp8")
    encoder, expected = golden_pictures(golden), golden.tensors("expected")
    prompts, images, wanted = [], [], []
    for case, count in (("C1", 1), ("C2", 1), ("C3", 2)):
        logits = expected[f"{case}.prefill.logits"]
        prompts.append(expected[f"{case}.input_ids"][0, : logits.shape[1]].tolist())
        spans = [encoder.encode(golden_picture(golden, case, n)[0]).embeddings for n in range(count)]
        images.append(image_spans(prompts[-1], spans, model.settings))
        assert [span.start for span in images[-1]] == [golden_picture(golden, case, n)[1] for n in range(count)]
        wanted.append(logits[0, -1])
    options = PrefillOptions("exact", (64,))
    state = fresh_state(model.settings)
    _, found = prefill(model, variables, state, ALL_SLOTS[:3], prompts, options, images=images)
    errors = np.abs(np.asarray(found) - np.stack(wanted))
    # A rounding may flip (see dsv41.verification.limits), which moves logits by some 1e-3, but hardly in all prompts;
    # embeddings that are off by a thousandth move those of every prompt by 0.09 and more.
    assert errors.max() <= 2e-2
    assert errors.max(-1).min() <= 1e-4


# The engine


def test_the_vision_part_is_loaded_with_the_first_picture(monkeypatch):
    loaded = []
    monkeypatch.setattr(Pictures, "__init__", lambda *_, **__: loaded.append(1))
    monkeypatch.setattr(Engine, "_run", lambda *_: iter(()))
    engine = Engine(Model(Settings.default(mini8_config())), {}, None, load_pictures=Pictures)
    list(engine.stream([Request(tokens=[5]), Request(tokens=[IMAGE], images=[encoded(4)])]))
    with pytest.raises(RequestError, match=r"images\[0\]: none\.png"):
        engine.stream([Request(tokens=[IMAGE], images=[SHAPES]), Request(tokens=[IMAGE], images=["none.png"])])
    assert not loaded
    for _ in range(2):
        list(engine.stream([Request(tokens=[IMAGE], images=[SHAPES])]))
    assert len(loaded) == 1


def test_an_engine_without_vision_takes_encoded_pictures_only():
    engine = Engine(Model(Settings.default(mini8_config())), {}, None)
    with pytest.raises(RequestError, match="request 0: images: this engine has no vision part"):
        engine.stream([Request(tokens=[IMAGE], images=[SHAPES])])


def test_pictures_reach_the_text(default_engine, tmp_path):
    """The same tokens from a file and from its embeddings, alone and beside a text; others from another picture."""
    prompt = f"See {PICTURE_PLACEHOLDER} here: "
    mirrored = tmp_path / "mirrored.png"
    with Image.open(SHAPES) as image:
        ImageOps.mirror(image).save(mirrored)
    request = Request(prompt=prompt, images=[SHAPES], max_new_tokens=5)
    text = Request(prompt="Hello", max_new_tokens=4)
    alone = default_engine.generate([request])[0]
    length = len(prompt_tokens(request, default_config(), default_engine.tokenizer, 256))
    assert alone.figures.prompt_tokens == length
    elsewhere = Pictures.random(default_config()).read(SHAPES)
    other = Request(prompt=prompt, images=[mirrored], max_new_tokens=5)
    given = Request(prompt=prompt, images=[elsewhere], max_new_tokens=5)
    found = default_engine.generate([text, given, other, request])
    assert found[0].tokens == default_engine.generate([text])[0].tokens
    assert found[1].tokens == found[3].tokens == alone.tokens
    assert found[2].tokens != alone.tokens


# Files and lines


def run_cli(capsys, *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_with_a_picture(capsys, default_engine):
    """The README's line, in the shapes that the shared engine has compiled."""
    line = re.search(r"^dsv41 (generate .*--image .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)[1]
    argv = shlex.split(line)
    file = argv.index("--image") + 1
    argv[file] = ROOT / argv[file]
    code, out, _ = run_cli(capsys, *argv, *DEFAULT_FLAGS)
    request = Request(
        prompt=argv[argv.index("--prompt") + 1],
        images=[argv[file]],
        max_new_tokens=int(argv[argv.index("--max-new-tokens") + 1]),
    )
    assert (code, out) == (0, default_engine.generate([request])[0].text + "\n")


def test_lines_name_pictures_beside_their_file(capsys, tmp_path, default_engine):
    folder = tmp_path / "prompts"
    folder.mkdir()
    shutil.copy(SHAPES, folder / "a.png")
    prompts = [f"one {PICTURE_PLACEHOLDER}", f"{PICTURE_PLACEHOLDER} two"]
    lines = [{"prompt": prompt, "images": [name]} for prompt, name in zip(prompts, ("a.png", str(SHAPES)), strict=True)]
    source, out = folder / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["generate", "--prompts", source, "--out", out, "--max-new-tokens", 3, *DEFAULT_FLAGS]
    code, _, err = run_cli(capsys, *arguments)
    assert code == 0, err
    found = {line["id"]: line["tokens"] for line in map(json.loads, out.read_text().splitlines())}
    wanted = default_engine.generate([Request(prompt=p, images=[SHAPES], max_new_tokens=3) for p in prompts])
    assert [found[1], found[2]] == [list(completion.tokens) for completion in wanted]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"tokens": [IMAGE], "images": ["none.png"]}, r"in\.jsonl:1: images\[0\]: .*none\.png: No such file"),
        ({"tokens": [IMAGE], "images": "a.png"}, r"in\.jsonl:1: images: 'a\.png' is not a list"),
        ({"tokens": [IMAGE], "images": [1]}, r"in\.jsonl:1: images\[0\]: int is neither a file's path"),
        ({"tokens": [IMAGE, IMAGE], "images": [str(SHAPES)]}, r"in\.jsonl:1: tokens: token 500 at position 1 stands"),
    ],
)
def test_bad_lines_are_refused_before_any_work(capsys, tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(Engine, "from_checkpoint", None)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line) + "\n")
    code, stdout, err = run_cli(capsys, "generate", "--prompts", source, "--out", out, "--checkpoint", MINI8)
    assert (code, stdout) == (2, "")
    assert re.search(message, err), err
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "a", "--image", "x.png"], r"images\[0\]: 'x\.png' has no place: 1 are given, and prompt has 0"),
        (["--prompt", PICTURE_PLACEHOLDER, "--image", "x.png"], r"images\[0\]: x\.png: No such file"),
        (["--prompt", PICTURE_PLACEHOLDER], r"images\[0\] is not given \(0 for 1 placeholders\)"),
        (["--prompts", "a", "--out", "b", "--image", "x.png"], "--image: a line of --prompts names its own pictures"),
    ],
)
def test_bad_options_are_refused_before_any_work(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(Engine, "random", None)
    code, _, err = run_cli(capsys, "generate", "--random", *argv)
    assert code == 2
    assert re.search(message, err), err


def test_an_engine_finds_the_vision_part_of_its_checkpoint(small_engine, small_checkpoint):
    ours, alone = small_engine._load_pictures(), Pictures.from_checkpoint(small_checkpoint)
    assert ours.settings is small_engine.model.settings
    jax.tree.map(np.testing.assert_array_equal, ours.params, alone.params)


def test_a_checkpoint_without_vision_is_named():
    config = load_config(GOLDEN / "mini8" / "fp8")
    engine = Engine(
        Model(Settings.default(config)), {}, None, load_pictures=lambda: Pictures(Settings.default(config), NoTensors())
    )
    with pytest.raises(CheckpointError, match=r"missing: vision\.patch_embed"):
        engine.stream([Request(tokens=[IMAGE], images=[SHAPES])])


class NoTensors:
    """An empty checkpoint."""

    def specs(self) -> dict:
        return {}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        raise AssertionError(name)
