"""What queries find beyond their window: attention mass on selections, and a phrase that they have seen once."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.evaluation.quality import PADDING, Row, Subject, Texts, compared, mean_and_error, score
from dsv41.layer_table import Layer, LayerKind, Mode, locate, stack_plan
from dsv41.layers.attention import Attention
from dsv41.model import Model, TokenBatch
from dsv41.numerics.rotary import csa_frequencies, rotary_table
from dsv41.settings import Settings
from dsv41.state.memory import source_view
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.tokens.tokenizer import Tokenizer
from dsv41.training.corpora import DataError
from dsv41.verification.capture import by_layer, captured_forward
from pallas_kernels.paged_memory import gather

_BATCH_ROWS = 4
"""Texts whose logits over all entries exist together."""

# ---------------------------------------------------------------- reuse of selections


class Mass(NamedTuple):
    """Per query, ``[rows, length]``.

    Attributes:
      global_share: of all attention, what falls on global entries if every visible one can be seen.
      chosen: of that the part on the layer's selection; best: on the best selection of that size; even: on any of
        that size if the layer looked at all entries alike.
      cut: bool, more entries are visible than a selection holds; others lose nothing.
    """

    global_share: jax.Array
    chosen: jax.Array
    best: jax.Array
    even: jax.Array
    cut: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def attention_mass(
    settings: Settings,
    kind: LayerKind,
    params: Any,
    state: ModelState,
    slot: jax.Array,
    x: jax.Array,
    selection: jax.Array,
) -> Mass:
    """Where a layer's heads would look if they saw all visible entries, against what they are shown.

    Args:
      kind: the layer's; it reads global entries.
      params: its attention's parameters.
      state: after the texts have passed, each from position 0 on; slot: the layer's KV source in it.
      x: its normalised input ``[rows, length, d]``.
      selection: int32 ``[rows, length, k]``, −1 = nothing.
    """
    text, formats = settings.text, settings.formats
    length, k = x.shape[1], selection.shape[2]
    position = jnp.arange(length, dtype=jnp.int32)
    rope = rotary_table(jnp.broadcast_to(position, x.shape[:2]), csa_frequencies(text))
    layer = Attention(settings, kind)
    queries, _ = layer.apply({"params": params}, x, rope, method="queries")
    window = formats.window.decode(layer.apply({"params": params}, x, rope, method="window_entries"), jnp.float32)
    pages, page_table = source_view(state.memory[kind.ratio].main, state.page_table, slot)
    every = jnp.broadcast_to(jnp.arange(length // kind.ratio, dtype=jnp.int32), (len(x), length // kind.ratio))
    entries = gather(pages, formats.main_kv, page_table, every[:, None])[:, 0]

    def logits(keys: jax.Array, seen: jax.Array) -> jax.Array:
        products = jnp.einsum("bshd,bnd->bshn", queries.astype(jnp.float32), keys) * text.head_dim**-0.5
        return jnp.where(seen[None, :, None], products, -jnp.inf)

    back = position[:, None] - position
    visible = (position + 1) // kind.ratio
    local = logits(window, (back >= 0) & (back < text.sliding_window))
    remote = logits(entries, jnp.arange(entries.shape[1]) < visible[:, None])
    sink = jnp.broadcast_to(params["attn_sink"][:, None], (*local.shape[:3], 1))
    total = jax.nn.logsumexp(jnp.concatenate([local, remote, sink], axis=-1), axis=-1, keepdims=True)
    mass = jnp.sum(jnp.exp(remote - total), axis=2)  # over heads
    on = jnp.take_along_axis(mass, jnp.clip(selection, 0, mass.shape[-1] - 1), axis=-1)
    whole = jnp.sum(mass, axis=-1)
    share = lambda part: jnp.sum(part, axis=-1) / jnp.maximum(whole, 1e-20)  # noqa: E731
    best = jax.lax.top_k(mass, min(k, mass.shape[-1]))[0]
    even = jnp.broadcast_to(k / jnp.maximum(visible, k), whole.shape)
    cut = jnp.broadcast_to(visible > k, whole.shape)
    return Mass(whole / text.num_attention_heads, share(jnp.where(selection >= 0, on, 0)), share(best), even, cut)


def reuse(subject: Subject, texts: Texts) -> list[Row]:
    """Of each layer's attention to global entries the share that its selection holds, and the best one would.

    Queries count that see more entries than a selection holds. The best selection of a query is that of the layer's
    own logits; ``own_error`` and ``best_error`` are standard errors over texts. A Reuse layer is shown what its index
    source chose, which selected for itself.

    Raises:
      DataError: no text is so long that a selection leaves an entry out.
    """
    model, variables = subject
    table = model.settings.table
    readers = [layer for layer in table.layers if layer.kind.mode is not Mode.WINDOW]
    length, k = texts.tokens.shape[1], model.settings.text.index_topk
    if all_selected := [layer.index for layer in readers if length // layer.kind.ratio <= k]:
        raise DataError(f"texts: of {length} tokens, from which layer {all_selected[0]} selects all entries")
    found: dict[int, list[np.ndarray]] = collections.defaultdict(list)
    for first in range(0, len(texts.tokens), _BATCH_ROWS):
        part = texts.tokens[first : first + _BATCH_ROWS]
        tokens = np.resize(part, (_BATCH_ROWS, part.shape[1]))  # filled up by texts again
        state = create_sequential_state(model.settings, *tokens.shape)
        batch = TokenBatch(jnp.asarray(tokens), jnp.full(_BATCH_ROWS, tokens.shape[1], jnp.int32))
        state, _, _, _, inside = captured_forward(model, variables, state, batch, None)
        captured = by_layer(model.settings, inside)
        for layer in readers:
            mass = attention_mass(
                model.settings,
                layer.kind,
                _attention_parameters(model, variables, layer),
                state,
                jnp.int32(table.source_slot(layer.index)),
                captured[layer.index]["attn_in"],
                captured[layer.index if layer.kind.selects else layer.index_source]["topk"],
            )
            cut = np.asarray(mass.cut)[: len(part)]
            means = [np.where(cut, np.asarray(m)[: len(part)], 0).sum(1) / cut.sum(1) for m in mass[:4]]
            found[layer.index].append(np.stack(means))
    rows: list[Row] = []
    for layer in readers:
        everywhere, chosen, best, even = np.concatenate(found[layer.index], axis=1)
        own, own_error = mean_and_error(chosen)
        most, best_error = mean_and_error(best)
        rows.append(
            {
                "layer": layer.index,
                "mode": layer.kind.mode.value,
                "selected_by": layer.index if layer.kind.selects else layer.index_source,
                "global_share": float(everywhere.mean()),
                "selected": own,
                "own_error": own_error,
                "best": most,
                "best_error": best_error,
                "even": float(even.mean()),
                "texts": len(chosen),
            }
        )
    return rows


def _attention_parameters(model: Model, variables: Any, layer: Layer) -> Any:
    table = model.settings.table
    encoder = layer.index < table.decoder_start
    stack, rows = ("encoder", table.encoder) if encoder else ("decoder", table.decoder)
    address = locate(stack_plan(rows), layer.index)
    params = variables["params"][stack][f"groups_{address.group}"][f"runs_{address.run}"]["attn"]
    return jax.tree.map(lambda leaf: leaf[address.index], params)


# ---------------------------------------------------------------- a phrase that was seen once


@dataclasses.dataclass(frozen=True)
class Phrase:
    """A sentence whose end nothing but having read it tells: token ids of its beginning and of its end."""

    beginning: tuple[int, ...]
    end: tuple[int, ...]


def proper_names(texts: Sequence[str], least: int = 5, most: int = 100) -> list[str]:
    """Names that occur from ``least`` to ``most`` times, sorted: words with a capital inside of sentences."""
    inside = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}\b")
    counts = collections.Counter(name for text in texts for name in inside.findall(text))
    return sorted(name for name, count in counts.items() if least <= count <= most)


def random_phrases(tokenizer: Tokenizer, names: Sequence[str], count: int, seed: int) -> list[Phrase]:
    """Phrases of three different names each.

    Raises:
      DataError: fewer names than three.
    """
    if len(names) < 3:
        raise DataError(f"names: {len(names)} where three are needed")
    rng = np.random.default_rng(seed)
    beginning = tuple(tokenizer.encode(" And the name of the keeper was"))
    drawn = [rng.choice(len(names), 3, replace=False) for _ in range(count)]
    return [
        Phrase(beginning, tuple(tokenizer.encode(" {}, and {}, and {}.".format(*(names[i] for i in three)))))
        for three in drawn
    ]


def needle(subject: Subject, texts: Texts, phrases: Sequence[Phrase], distances: Sequence[int], lead: int) -> list[Row]:
    """Bits a token of a phrase's end, if the phrase stands in the text already and if it does not.

    After ``lead`` tokens of its text comes the phrase, then text, and ``distance`` tokens after its first token the
    phrase again, of which the end counts. Without it the text stands in its place. The share of ends that are the
    most likely tokens one after the other is what greedy decoding would get right.

    Args:
      phrases: one a text.

    Raises:
      DataError: a text is too short for a distance, or a distance for a phrase.
    """
    length = texts.tokens.shape[1]
    rows: list[Row] = []
    for distance in distances:
        at = lead + distance
        baseline: np.ndarray | None = None
        for there in (False, True):
            tokens = np.full((len(phrases), length), PADDING, np.int32)
            spans: list[slice] = []
            for row, text, phrase in zip(tokens, texts.tokens, phrases, strict=True):
                whole = [*phrase.beginning, *phrase.end]
                if at + len(whole) > length:
                    raise DataError(f"distances: {distance} and a phrase of {len(whole)} exceed {length} tokens")
                if distance < len(whole):
                    raise DataError(f"distances: {distance} is less than a phrase of {len(whole)} tokens")
                before = [*text[:lead], *whole, *text[lead : at - len(whole)]] if there else text[:at]
                row[: at + len(whole)] = [*before, *whole]
                spans.append(slice(at + len(phrase.beginning), at + len(whole)))
            scores = score(subject, tokens)
            bits = np.array([row[span].mean() for row, span in zip(scores.bits, spans, strict=True)])
            right = [row[span] for row, span in zip(scores.correct, spans, strict=True)]
            rows.append(
                {"distance": distance, "phrase": "there" if there else "absent"}
                | compared("bits_per_token", bits, baseline)
                | {
                    "tokens_right": float(np.mean([r.mean() for r in right])),
                    "phrases_right": float(np.mean([r.all() for r in right])),
                }
            )
            baseline = bits
    return rows
