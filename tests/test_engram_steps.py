"""Steps whose Engram rows come from outside: the same as with the tables among the parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.checkpoint import CheckpointReader, RandomSource, abstract_parameters, load_checkpoint
from dsv41.checkpoint.placement import flatten_tree
from dsv41.config import load_config
from dsv41.declared import abstract_variables
from dsv41.engram.addresses import NgramHistory
from dsv41.engram.feed import EngramFeed
from dsv41.engram.loading import TABLE_KINDS, open_tables
from dsv41.inference.prefill import ImageSpan, PrefillOptions, prefill
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.steps.acceptance import Rule
from dsv41.steps.decode import generate_step
from dsv41.steps.engram import begin_generate, begin_verify, finish_generate, finish_verify
from dsv41.steps.sampling import create_sampler
from dsv41.steps.verify import verify_step
from tests.conftest import GOLDEN
from tests.helpers import (
    SLOTS,
    SMALL_LAYOUT,
    assert_close,
    copied,
    fresh_state,
    mini8_config,
    owned,
    random_model,
    random_tokens,
    with_text,
)

# The first Engram before the encoder's second layer, another in the decoder; layers that compile soon.
LAYOUT = SMALL_LAYOUT | {
    "num_hidden_layers": 3,
    "compress_ratios": (0, 2, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2),
    "candidate_source_layer_id": None,
    "engram_layer_ids": (1, 2),
    "engram_num_embeddings": (1362, 1552),
}
OPTIONS = PrefillOptions(chunk_sizes=(16,))
PROMPTS = [random_tokens(7, 50).tolist(), random_tokens(8, 37).tolist()]
HIT = 36
WIDTH = mini8_config().text.hidden_size
SPANS = [(20, 9), (24, 3)]
"""Of each prompt a picture's start and length: the first crosses a chunk's edge, the second is near the hit."""
IMAGES = [
    [ImageSpan(start, np.random.default_rng(start).standard_normal((length, WIDTH)).astype(np.float32))]
    for start, length in SPANS
]


def apart(model: Model, variables: dict) -> tuple[Model, dict]:
    """The same model without the tables."""
    outside = Model(dataclasses.replace(model.settings, engram_in_step=False))
    params = {name: leaves for name, leaves in variables["params"].items() if not name.startswith("engram_table_")}
    assert len(params) < len(variables["params"])
    return outside, variables | {"params": params}


def feed_of(model: Model, variables: dict, kind: str = "device") -> EngramFeed:
    """A feed from the tables of :func:`random_model`'s weights."""
    config = model.settings.config
    tables = open_tables(kind, RandomSource(config, 3), config, jax.local_devices()[0])
    return EngramFeed(model.settings, np.asarray(variables["constants"]["token_map"]), tables, SLOTS)


class Run:
    """Slots 1 and 3 of four, from their prompts on."""

    slots = (1, 3)

    def __init__(self, model: Model, variables: dict, feed: EngramFeed | None) -> None:
        self.model, self.variables, self.feed = model, variables, feed
        self.state = fresh_state(model.settings)
        active = np.zeros(SLOTS, bool)
        active[list(self.slots)] = True
        self.active = active
        self.sampler = jax.device_put(create_sampler(SLOTS), jax.local_devices()[0])

    def prefill(self, cached: int = 0, prompts=PROMPTS, options: PrefillOptions = OPTIONS, images=IMAGES) -> np.ndarray:
        """Fills the slots' prompts in; logits of their last tokens."""
        self.state, logits = prefill(
            self.model,
            self.variables,
            self.state,
            self.slots,
            prompts,
            options,
            cached,
            images=images,
            engram=self.feed,
        )
        self.pending(np.argmax(logits, axis=-1))
        return np.asarray(logits)

    def pending(self, tokens: np.ndarray) -> None:
        pending = np.zeros(SLOTS, np.int32)
        pending[list(self.slots)] = tokens
        self.sampler = self.sampler.replace(pending=jax.device_put(pending, self.sampler.seed.sharding))

    def restart(self) -> None:
        """The slots take new requests; their pages keep what is there."""
        self.state = fresh_state(self.model.settings).replace(memory=self.state.memory)

    def step(self) -> np.ndarray:
        """A plain step; the new pending tokens of the live slots."""
        if self.feed is None:
            step = generate_step(self.model, self.variables, self.state, self.sampler, self.active)
        else:
            tokens, count = np.asarray(self.sampler.pending)[:, None], self.active.astype(int)
            state, begun = begin_generate(self.model, self.variables, self.state, self.sampler, self.active)
            rows = self.feed.rows(tokens, count, behind=begun.flow.streams)
            step = finish_generate(self.model, self.variables, state, begun, rows, self.sampler, self.active)
            self.feed.advance(tokens, count)
        self.state, self.sampler, drawn = step
        drawn = np.asarray(drawn)
        if self.feed is not None:
            self.feed.start(drawn[:, None], self.active.astype(int))
        return drawn[list(self.slots)]

    def verify(self, drafts: np.ndarray, depth: np.ndarray) -> np.ndarray:
        """A verify step; the accepted drafts of the live slots."""
        arguments = (jnp.asarray(drafts), None, jnp.asarray(depth), self.active)
        if self.feed is None:
            self.state, self.sampler, outcome = verify_step(
                self.model, Rule.COUPLED, self.variables, self.state, self.sampler, *arguments
            )
        else:
            tokens = np.concatenate([np.asarray(self.sampler.pending)[:, None], drafts], axis=1)
            count = np.where(self.active, 1 + depth, 0)
            self.feed.start(tokens, count)
            state, begun = begin_verify(
                self.model, self.variables, self.state, self.sampler, arguments[0], *arguments[2:]
            )
            rows = self.feed.rows(tokens, count, behind=begun.flow.streams)
            self.state, self.sampler, outcome = finish_verify(
                self.model, Rule.COUPLED, self.variables, state, begun, rows, self.sampler, *arguments
            )
            self.feed.advance(tokens, np.asarray(outcome.consumed))
        return np.asarray(outcome.accepted)[list(self.slots)]


def assert_same(a: Run, b: Run) -> None:
    for slot in a.slots:
        assert_close(owned(a.state, slot), owned(b.state, slot))


@pytest.fixture(scope="module")
def pair():
    """A random model, cache rounding off, with its tables among its parameters, and without."""
    model, variables = random_model(False, **LAYOUT)
    return (model, variables), apart(model, variables)


def test_a_generation_is_the_same(pair):
    """Prompts of several chunks with pictures, plain steps, a verify step that accepts some drafts, plain steps."""
    inside, outside = pair
    with feed_of(*outside) as feed:
        a, b = Run(*inside, None), Run(*outside, feed)
        np.testing.assert_allclose(a.prefill(), b.prefill(), rtol=0, atol=1e-4)
        assert_same(a, b)
        for _ in range(4):
            np.testing.assert_array_equal(a.step(), b.step())
        assert_same(a, b)
        # What plain decoding gives next is drafted, with a wrong token for one request.
        ahead = Run(*inside, None)
        ahead.state, ahead.sampler = copied(a.state), copied(a.sampler)
        drafts = np.zeros((SLOTS, 2), np.int32)
        drafts[list(a.slots)] = np.stack([ahead.step(), ahead.step()], axis=1)
        drafts[3, 1] = (drafts[3, 1] + 1) % 490
        depth = np.array([0, 2, 0, 2], np.int32)
        for run in (a, b):
            assert run.verify(drafts, depth).tolist() == [2, 1]
        assert_same(a, b)
        for _ in range(3):
            np.testing.assert_array_equal(a.step(), b.step())
        assert_same(a, b)
        total = feed.report()
    columns = outside[0].settings.text.engram_columns
    # Chunks of 16 read for the encoder's Engram, the replay for the decoder's, all steps for both.
    asked = (4 * 2 * 16 + 2 * outside[0].settings.text.sliding_window + 2 * SLOTS * (7 + 3)) * columns
    assert total.rows_asked == asked
    assert 0 < total.rows_read < total.rows_asked
    assert total.lookup_s > 0
    assert total.lookup_s == pytest.approx(total.hidden_s + total.waited_s)


def test_requests_that_come_and_go_between_steps(pair):
    """What was begun for the next step is dropped where a slot has another request by then; after a prefix hit,
    n-grams reach before what is computed."""
    inside, outside = pair
    with feed_of(*outside) as feed:
        a, b = Run(*inside, None), Run(*outside, feed)
        for run in (a, b):
            run.prefill()
        np.testing.assert_array_equal(a.step(), b.step())
        for run in (a, b):
            run.restart()
        np.testing.assert_allclose(a.prefill(HIT), b.prefill(HIT), rtol=0, atol=1e-4)
        for _ in range(3):
            np.testing.assert_array_equal(a.step(), b.step())
        assert_same(a, b)


def test_exact_prefill_reads_for_both_stacks(pair):
    """Prompts within the window, where replay is exact too."""
    _, outside = pair
    picture = ImageSpan(4, IMAGES[0][0].embeddings)
    short = {"prompts": [prompt[:14] for prompt in PROMPTS], "images": [[picture], []]}
    with feed_of(*outside) as feed:
        exact = dataclasses.replace(OPTIONS, mode="exact")
        a, b = Run(*outside, feed), Run(*outside, feed)
        np.testing.assert_allclose(a.prefill(**short), b.prefill(options=exact, **short), rtol=0, atol=1e-4)
        assert_same(a, b)


@pytest.mark.parametrize("layer", [0, 1], ids=["before the first layer", "in the decoder"])
def test_a_step_is_cut_wherever_the_first_engram_is(layer):
    """Nothing but the embedding precedes the rows, or the whole encoder does."""
    two = {
        "num_hidden_layers": 2,
        "compress_ratios": (0, 1),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1,),
        "candidate_source_layer_id": None,
    }
    model, variables = random_model(False, **SMALL_LAYOUT | two | {"engram_layer_ids": (layer,)})
    outside = apart(model, variables)
    with feed_of(*outside) as feed:
        a, b = Run(model, variables, None), Run(*outside, feed)
        for tokens in random_tokens(1, 6, 2):
            a.pending(tokens)
            b.pending(tokens)
            np.testing.assert_array_equal(a.step(), b.step())
        assert_same(a, b)


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_every_table_gives_the_keys_and_values_of_the_parameters(kind):
    """The public FP8 checkpoint, to the bit."""
    source, config = CheckpointReader(GOLDEN / "mini8" / "fp8"), load_config(GOLDEN / "mini8" / "fp8")
    model = Model(Settings.default(config))
    wanted = abstract_variables(model)
    names = ("engram_1", "engram_table_1")
    variables = {
        "params": load_checkpoint(source, config, {name: wanted[name] for name in names}),
        "constants": {"token_map": jnp.asarray(np.load(GOLDEN / "mini8" / "token_map.npy"))},
    }
    outside, rest = apart(model, variables)
    seen = np.random.default_rng(0).integers(-1, config.text.engram_compressed_vocab_size, (2, 9, 4)).astype(np.int32)
    history = NgramHistory(config.text, np.asarray(variables["constants"]["token_map"]), 1)
    tables = open_tables(kind, source, config, jax.local_devices()[0])
    rows = {layer: tables[layer].lookup(ids) for layer, ids in history.rows_of(seen).items()}
    found = outside.apply(rest, (1,), seen, rows, method="engram_inputs")
    for ours, theirs in zip(found, model.apply(variables, (1,), seen, method="engram_inputs"), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
        assert np.isfinite(ours.astype(jnp.float32)).all()


# Without tables


def test_a_tree_without_tables_loads_without_reading_them():
    config = load_config(GOLDEN / "mini8" / "fp8")
    model = Model(Settings.default(config, engram_in_step=False))
    target = abstract_variables(model)
    wanted = flatten_tree(abstract_parameters(config, parts=("text",)))
    assert flatten_tree(target).keys() == {path for path in wanted if path[0] != "engram_table_1"}
    read = []

    class Spied(CheckpointReader):
        def read(self, name, rows=None):
            read.append(name)
            return super().read(name, rows)

    load_checkpoint(Spied(GOLDEN / "mini8" / "fp8"), config, target)
    assert "layers.1.engram.wkv.weight" in read
    assert not [name for name in read if name.startswith("layers.1.engram.embed")]


def test_the_official_tables_are_no_parameters_of_a_model_without():
    """In fewer layers, which are declared sooner: the tables are those of all forty."""
    official = load_config(GOLDEN.parents[2] / "configs" / "deepseek-v4.1-flash")
    sizes = {"engram_num_embeddings": official.text.engram_num_embeddings}
    config = with_text(official, **LAYOUT | sizes)

    def parameters(in_step: bool) -> int:
        leaves = jax.tree.leaves(abstract_variables(Model(Settings.default(config, engram_in_step=in_step))))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    assert parameters(True) - parameters(False) == sum(config.text.engram_num_embeddings) * 264


@pytest.mark.parametrize("rows", [None, {1: None}])
def test_rows_that_are_not_given_are_missed(rows):
    settings = Settings.default(with_text(mini8_config(), **LAYOUT), engram_in_step=False)
    variables = {"constants": {"token_map": jnp.zeros((settings.text.vocab_size,), jnp.int32)}}
    seen = jnp.zeros((1, 1, settings.text.engram_max_ngram_size), jnp.int32)
    with pytest.raises(ValueError, match=r"engram_rows: layers \[2\] are not given, and their tables are no param"):
        Model(settings).apply(variables, (2,), seen, rows, method="engram_inputs")


def test_settings_with_and_without_tables_differ():
    settings = Settings.default(with_text(mini8_config()))
    other = dataclasses.replace(settings, engram_in_step=False)
    assert settings != other
    assert hash(settings) != hash(other)
