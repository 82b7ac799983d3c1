"""What a trained model's approximations cost, in bits of held-out text: rounding, replay, prefix hits, pool, top-k.

Every question compares ways to compute the same tokens of the same texts, so a row has the mean over texts, and the
mean of the differences from its baseline text by text, which are far more certain than the means.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.evaluation.replay import beginnings
from dsv41.inference.prefill import PrefillOptions, encode_prompts
from dsv41.layer_table import Mode
from dsv41.model import Model, TokenBatch
from dsv41.numerics.rounding import POLICY_PRESETS, RoundingPolicy
from dsv41.settings import Settings
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.steps.decode import forward_tokens
from dsv41.steps.prefill import Variables, decode_and_commit, encode_and_commit, replay_decoder
from dsv41.tokens.tokenizer import Tokenizer
from dsv41.training.corpora import DataError
from dsv41.training.forward import TrainBatch, forward

Row = dict[str, Any]

PADDING = -1
_BATCH_ROWS = 8
"""Texts that pass through the model together; a last batch is filled up, so that each length compiles once."""


class Subject(NamedTuple):
    """A model and its weights; variants of it share them."""

    model: Model
    variables: Variables


@dataclasses.dataclass(frozen=True)
class Texts:
    """Beginnings of texts that the model was not trained on.

    Attributes:
      tokens: int32 ``[texts, length]``, each from the begin token on.
      sizes: int32 ``[texts, length]``, bytes that each token adds to its text; 0 for the begin token.
    """

    tokens: np.ndarray
    sizes: np.ndarray


def choose_texts(documents: Sequence[str], tokenizer: Tokenizer, begin: int, length: int, count: int) -> Texts:
    """Beginnings of ``count`` documents, spread evenly over those that are long enough.

    Args:
      length: tokens of each, the begin token ``begin`` included.

    Raises:
      DataError: fewer documents have so many tokens, or less than two are wanted: then nothing tells their spread.
    """
    if count < 2:
        raise DataError(f"texts: {count}; a standard error needs two")
    tokens = beginnings(documents, tokenizer, begin, length, count)
    size = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)], np.int32)
    sizes = size[tokens]
    sizes[:, 0] = 0
    return Texts(tokens, sizes)


# ---------------------------------------------------------------- scores and their means


class Scores(NamedTuple):
    """Of each token given those before it; the first one has none before it: 0 bits, False.

    Attributes:
      bits: float64 ``[texts, length]``.
      correct: bool ``[texts, length]``, the token is the most likely one.
    """

    bits: np.ndarray
    correct: np.ndarray


def _scores(model: Model, variables: Variables, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Nats float32 and "most likely" of targets ``[rows, length]``; logits exist for a row at a time."""

    def row(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, target = inputs
        return _nats(model.apply(variables, x, method="logits"), target)

    return jax.lax.map(row, (hidden, targets))


def _nats(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    at = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - at, at >= logits.max(axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _forward_scores(model: Model, variables: Variables, batch: TrainBatch, cut: jax.Array):
    return _scores(model, variables, forward(model, variables, batch, cut).hidden, batch.targets)


@functools.partial(jax.jit, static_argnums=0)
def _prefill_scores(model: Model, variables: Variables, batch: TrainBatch, cut: jax.Array):
    """The same by inference: one chunk of an exact prefill through pages, rings and tails; ``cut`` is not read."""
    del cut
    state = create_sequential_state(model.settings, *batch.tokens.shape)
    count = jnp.sum(batch.documents >= 0, axis=1, dtype=jnp.int32)
    state, segment = encode_and_commit(model, variables, state, TokenBatch(batch.tokens, count))
    _, decoded = decode_and_commit(model, variables, state, segment)
    return _scores(model, variables, decoded.hidden, batch.targets)


def score(subject: Subject, tokens: np.ndarray, cut: int | None = None, prefill: bool = False) -> Scores:
    """Passes texts through the model.

    Args:
      tokens: int32 ``[texts, length]``, :data:`PADDING` behind a text's end.
      cut: position from which the decoder's windows are cut, as by a replay that begins there; None: nowhere.
      prefill: by the inference path instead of the training pass.
    """
    texts, length = tokens.shape
    run = _prefill_scores if prefill else _forward_scores
    cuts = jnp.full(_BATCH_ROWS, length if cut is None else cut, jnp.int32)
    parts = []
    for first in range(0, texts, _BATCH_ROWS):
        rows = np.full((_BATCH_ROWS, length), PADDING, np.int32)
        part = tokens[first : first + _BATCH_ROWS]
        rows[: len(part)] = part
        live = rows != PADDING
        targets = np.concatenate([rows[:, 1:], np.full_like(rows[:, :1], PADDING)], axis=1)
        batch = TrainBatch(
            *map(jnp.asarray, (np.where(live, rows, 0), targets, np.where(live, 0, -1).astype(np.int32)))
        )
        found = [np.asarray(leaf)[: len(part), :-1] for leaf in run(*subject, batch, cuts)]
        parts.append([np.where(live[: len(part), 1:], leaf, 0) for leaf in found])
    nats, correct = (np.pad(np.concatenate(leaves), ((0, 0), (1, 0))) for leaves in zip(*parts, strict=True))
    return Scores(nats.astype(np.float64) / math.log(2), correct)


def per_byte(scores: Scores, texts: Texts, begin: int, end: int) -> np.ndarray:
    """Bits a byte of tokens ``begin`` … ``end − 1``, float64 ``[texts]``."""
    return scores.bits[:, begin:end].sum(1) / texts.sizes[:, begin:end].sum(1)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over texts, and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def compared(unit: str, values: np.ndarray, baseline: np.ndarray | None) -> Row:
    """Columns of a row: mean and standard error, of the values and of how far they are above the baseline's.

    Args:
      unit: name of the values.
      values, baseline: ``[texts]``; without a baseline the last two columns are None.
    """
    mean, error = mean_and_error(values)
    difference = (None, None) if baseline is None else mean_and_error(values - baseline)
    return {
        unit: mean,
        "standard_error": error,
        "difference": difference[0],
        "difference_error": difference[1],
        "texts": len(values),
    }


def variant(subject: Subject, **text: Any) -> Subject:
    """The same weights under other fields of ``text_config``, none of which sizes a parameter."""
    settings = subject.model.settings
    config = dataclasses.replace(settings.config, text=dataclasses.replace(settings.text, **text))
    return Subject(Model(dataclasses.replace(settings, config=config)), subject.variables)


# ---------------------------------------------------------------- questions


def rounding(packed: Subject | None, plain: Mapping[str, Subject], texts: Texts) -> list[Row]:
    """Bits a byte of whole texts under each rounding policy, and of the packed checkpoint by inference.

    Args:
      packed: the checkpoint with packed weights; compared with "full" of the first run in ``plain``, which should be
        the one that it was exported from.
      plain: float weights of training runs by name, each compared with its own "off".
    """
    length = texts.tokens.shape[1]
    rows: list[Row] = []
    own: np.ndarray | None = None
    for name, subject in plain.items():
        off: np.ndarray | None = None
        for preset in POLICY_PRESETS:
            settings = Settings.for_training(subject.model.settings.config, RoundingPolicy.preset(preset))
            model = Model(dataclasses.replace(settings, page_tokens=subject.model.settings.page_tokens))
            values = per_byte(score(Subject(model, subject.variables), texts.tokens), texts, 1, length)
            rows.append({"weights": name, "rounded": preset} | compared("bits_per_byte", values, off))
            off = values if preset == "off" else off
            own = values if preset == "full" and own is None else own
    if packed is not None:
        values = per_byte(score(packed, texts.tokens, prefill=True), texts, 1, length)
        rows.append({"weights": "packed", "rounded": "as stored"} | compared("bits_per_byte", values, own))
    return rows


def replay(subject: Subject, texts: Texts, cuts: Sequence[tuple[int, int]], continuation: int) -> list[Row]:
    """Bits a token of what follows a prompt, after an exact prefill and after bounded replays of its end.

    Args:
      cuts: prompt lengths, and how many positions the decoder replays.
      continuation: tokens after the prompt, teacher-forced.
    """
    exact = score(subject, texts.tokens)
    rows: list[Row] = []
    for prompt in dict.fromkeys(prompt for prompt, _ in cuts):
        after = slice(prompt, prompt + continuation)
        wanted = exact.bits[:, after].mean(1)
        rows.append({"prompt": prompt, "replayed": prompt} | compared("bits_per_token", wanted, None))
        for length in (length for p, length in cuts if p == prompt):
            values = score(subject, texts.tokens, cut=prompt - length).bits[:, after].mean(1)
            rows.append({"prompt": prompt, "replayed": length} | compared("bits_per_token", values, wanted))
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _continued(model: Model, variables: Variables, state: ModelState, logits: jax.Array, tokens: jax.Array):
    """Nats ``[batch, continuation]`` of tokens: the first by the prefill's logits, the others by consuming them."""
    count = jnp.full(tokens.shape[:1], tokens.shape[1] - 1, jnp.int32)
    _, more = forward_tokens(model, variables, state, TokenBatch(tokens[:, :-1], count))
    return _nats(jnp.concatenate([logits[:, None], more], axis=1), tokens)[0]


def prefix(subject: Subject, texts: Texts, prompt: int, hits: Sequence[int], continuation: int) -> list[Row]:
    """Bits a token of what follows a prompt whose first ``hit`` tokens have their global entries, and nothing else.

    The steps are inference's: the encoder replays the window before the hit, without writing, and goes on; then the
    decoder replays the last window of the prompt. The baseline is the same prompt without a hit.

    Args:
      hits: multiples of every compression ratio, below ``prompt``.

    Raises:
      ValueError: a hit is neither.
    """
    model, variables = subject
    text, count = model.settings.text, len(texts.tokens)
    index, requests = jnp.arange(count, dtype=jnp.int32), range(count)
    options = PrefillOptions("replay", (text.sliding_window,))
    prompts = texts.tokens[:, :prompt].tolist()
    following = jnp.asarray(texts.tokens[:, prompt : prompt + continuation])
    memory: Any = None
    baseline: np.ndarray | None = None
    rows: list[Row] = []
    for hit in (0, *hits):
        state = create_sequential_state(model.settings, count, prompt + continuation)
        if hit:
            # Entries behind the hit are there as well: nobody sees them before they are written again.
            state = state.replace(memory=jax.device_put(jax.tree.map(jnp.array, memory), jax.local_devices()[0]))
        state, tail = encode_prompts(model, variables, state, requests, prompts, options, hit)
        if not hit:
            memory = jax.tree.map(np.array, state.memory)
        state, logits, _ = replay_decoder(model, variables, state, index, tail)
        nats = np.asarray(_continued(model, variables, state, logits, following), np.float64)
        values = nats.mean(1) / math.log(2)
        rows.append({"prompt": prompt, "hit": hit} | compared("bits_per_token", values, baseline))
        baseline = values if baseline is None else baseline
    return rows


def pool(subject: Subject, texts: Texts, sizes: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[Row]:
    """Bits a byte under other sizes of the candidate pool; the baseline is a pool of all blocks: full reindexing.

    Args:
      sizes: blocks of the pool.
      ranges: from which position to below which tokens count, a row each.

    Raises:
      ValueError: the model has no pool.
    """
    text, table = subject.model.settings.text, subject.model.settings.table
    if text.candidate_source_layer_id is None:
        raise ValueError("candidate_source_layer_id: the model has no candidate pool")
    tokens = text.candidate_block_size * table.layers[text.candidate_source_layer_id].kind.ratio
    every = -(-texts.tokens.shape[1] // tokens)
    if too_large := [size for size in sizes if size > every]:
        raise ValueError(f"pool sizes: {too_large[0]} blocks exceed the {every} of {texts.tokens.shape[1]} tokens")
    of = {size: score(variant(subject, candidate_topk_blocks=size), texts.tokens) for size in (every, *sizes)}
    return [
        {"from": begin, "to": end, "blocks": size, "entries": size * text.candidate_block_size}
        | compared("bits_per_byte", values, None if size == every else per_byte(of[every], texts, begin, end))
        for begin, end in ranges
        for size, values in ((size, per_byte(scores, texts, begin, end)) for size, scores in of.items())
    ]


def top_k(subject: Subject, texts: Texts, sizes: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[Row]:
    """Bits a byte if each query attends to so many entries; the baseline is the configuration's number.

    Args:
      ranges: from which position to below which tokens count, a row each.
    """
    own = subject.model.settings.text.index_topk
    of = {size: score(variant(subject, index_topk=size), texts.tokens) for size in sorted({own, *sizes})}
    return [
        {"from": begin, "to": end, "entries": size}
        | compared("bits_per_byte", values, None if size == own else per_byte(of[own], texts, begin, end))
        for begin, end in ranges
        for size, values in ((size, per_byte(scores, texts, begin, end)) for size, scores in of.items())
    ]


def reindexing(reusing: Subject, reindexed: Subject, texts: Texts) -> list[Row]:
    """Bits a byte of whole texts of a model that reuses selections, against one trained alike that reuses none.

    Two trainings differ by more than their layouts: the standard error over texts knows nothing of that.
    """
    rows: list[Row] = []
    baseline: np.ndarray | None = None
    for subject in (reindexed, reusing):
        kinds = [layer.kind for layer in subject.model.settings.table.layers]
        choose, reuse = sum(kind.selects for kind in kinds), sum(kind.mode is Mode.REUSE for kind in kinds)
        values = per_byte(score(subject, texts.tokens), texts, 1, texts.tokens.shape[1])
        rows.append({"layers_choose": choose, "layers_reuse": reuse} | compared("bits_per_byte", values, baseline))
        baseline = values
    return rows
