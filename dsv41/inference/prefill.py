"""Running a prompt through the prefill steps: chunks of a few sizes, replay or exact, after a prefix or cold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.engram.feed import EngramFeed
from dsv41.engram.prefetch import Ticket
from dsv41.layers.engram import EngramRows
from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.sharding.steps import REQUESTS, STATE, sharded_step
from dsv41.state.request import ModelState, Segment, create_segment
from dsv41.steps.prefill import Variables, encode_chunk, exact_chunk, replay_decoder


@dataclasses.dataclass(frozen=True)
class ImageSpan:
    """A picture in a prompt.

    Attributes:
      start: position of its first token.
      embeddings: ``[span, d]`` in the activation dtype, what stands at its positions.
    """

    start: int
    embeddings: np.ndarray


def image_spans(tokens: Sequence[int], pictures: Sequence[np.ndarray], settings: Settings) -> tuple[ImageSpan, ...]:
    """Places embeddings ``[span, d]`` of pictures, in order, at the image tokens of a prompt.

    Raises:
      ValueError: the image tokens are not those of these spans.
    """
    image, spans, position = settings.config.image_token_id, [], 0
    for i, embeddings in enumerate(pictures):
        while position < len(tokens) and tokens[position] != image:
            position += 1
        end = position + len(embeddings)
        if end > len(tokens) or any(token != image for token in tokens[position:end]):
            raise ValueError(f"picture {i}: {len(embeddings)} positions of token {image} from {position} on are needed")
        spans.append(ImageSpan(position, np.asarray(embeddings, settings.dtype)))
        position = end
    if image in tokens[position:]:
        raise ValueError(f"image token {image} beyond position {position} belongs to none of {len(pictures)} pictures")
    return tuple(spans)


@dataclasses.dataclass(frozen=True)
class PrefillOptions:
    """How prompts enter.

    Attributes:
      mode: "replay" (the decoder sees the last ``replay_length`` positions) or "exact" (it sees all).
      chunk_sizes: ascending widths that chunks are padded to; each compiles once.
      replay_length: positions that the decoder replays; None: the window. Longer approaches exact.
    """

    mode: str = "replay"
    chunk_sizes: tuple[int, ...] = (16, 128, 1024)
    replay_length: int | None = None

    def __post_init__(self):
        if self.mode not in ("replay", "exact"):
            raise ValueError(f"prefill mode {self.mode!r} is neither 'replay' nor 'exact'")
        if not self.chunk_sizes or min(self.chunk_sizes) < 1 or list(self.chunk_sizes) != sorted(set(self.chunk_sizes)):
            raise ValueError(f"chunk_sizes {self.chunk_sizes} are not ascending positive widths")
        if self.replay_length is not None and self.replay_length < 1:
            raise ValueError(f"replay_length {self.replay_length} is not positive")

    def chunks(self, tokens: int) -> list[tuple[int, int]]:
        """(width, live tokens) of the chunks of so many tokens: full ones of the largest size, then one padded."""
        largest, plan = self.chunk_sizes[-1], []
        while tokens > 0:
            width = next((size for size in self.chunk_sizes if size >= tokens), largest)
            plan.append((width, min(width, tokens)))
            tokens -= width
        return plan


def prefill(
    model: Model,
    variables: Variables,
    state: ModelState,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    options: PrefillOptions,
    cached: int = 0,
    progress: Callable[[np.ndarray], None] | None = None,
    on_taps: Callable[[jax.Array, jax.Array, jax.Array], None] | None = None,
    images: Sequence[Sequence[ImageSpan]] | None = None,
    engram: EngramFeed | None = None,
) -> tuple[ModelState, jax.Array]:
    """Passes prompts into requests that hold pages for them and nothing else.

    Args:
      state: donated.
      rows: the requests, one a prompt; prompts may differ in length. On a mesh those of every batch shard, as many of
        each, by their numbers there.
      prompts: whole prompts, token ids. An empty one belongs to nobody, and its row must be no request's number.
      cached: positions whose global entries are in the requests' pages already (a prefix hit); see
        :func:`encode_prompts`.
      progress: called with the tokens of each prompt in every chunk done, int32 ``[rows]``.
      on_taps: called with what a drafter reads of every decoder pass: taps ``[targets, rows, query, d]``, and the
        start and count int32 ``[rows]`` of their positions.
      images: the pictures of each prompt; None: there are none, and what is compiled for text is used.
      engram: has the rows of Engram's tables; None where the tables are parameters.

    Returns:
      the state, and logits ``[rows, vocab]`` of every prompt's last token.

    Raises:
      ValueError: an empty prompt, a hit that is not shorter than every prompt or not a multiple of every ratio,
        a hit in exact mode.
    """
    if options.mode == "replay":
        state, tail = encode_prompts(model, variables, state, rows, prompts, options, cached, progress, images, engram)
        found = None if engram is None else engram.replay(tail)
        state, logits, taps = replay_decoder(model, variables, state, jnp.asarray(rows, jnp.int32), tail, found)
        if on_taps is not None:
            on_taps(taps, tail.start, tail.count)
        return state, logits
    if cached:
        raise ValueError("exact prefill needs the decoder's rings of the prefix; a hit without them is replayed")
    check_prompts(model.settings, prompts, cached)
    index = jnp.asarray(rows, jnp.int32)
    logits = None
    start = jnp.zeros_like(index)
    batches = chunk_batches(prompts, options, 0, images)
    for batch, ticket in _with_engram(engram, state, rows, batches, all_layers=True):
        state, new, taps = exact_chunk(model, variables, state, index, batch, _fetched(ticket, state))
        logits = new if logits is None else jnp.where((batch.count > 0)[:, None], new, logits)
        if on_taps is not None:
            on_taps(taps, start, batch.count)
            start = start + batch.count
        if progress is not None:
            progress(np.asarray(batch.count))
    return state, logits


def encode_prompts(
    model: Model,
    variables: Variables,
    state: ModelState,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    options: PrefillOptions,
    cached: int = 0,
    progress: Callable[[np.ndarray], None] | None = None,
    images: Sequence[Sequence[ImageSpan]] | None = None,
    engram: EngramFeed | None = None,
) -> tuple[ModelState, Segment]:
    """The encoder's part of a replayed prefill; arguments as of :func:`prefill`.

    After a prefix hit whose window rings are lost the encoder replays up to a window before the hit: global
    writes off below it, local attention cut at the start, n-gram history known from the prompt.

    Returns:
      the state, and the last encoder outputs of every prompt.
    """
    check_prompts(model.settings, prompts, cached)
    window = model.settings.text.sliding_window
    begin = max(0, cached - window)
    index = jnp.asarray(rows, jnp.int32)
    if begin:
        state = _place_after(variables, state, index, prompts, begin, images)
    write_from = jnp.full(index.shape, cached, jnp.int32)
    # Where the state is: bound to no device, the first chunk's tail would compile a step of its own.
    tail = create_segment(model.settings, len(prompts), options.replay_length or window)
    if model.settings.parallel.mesh is None:
        tail = jax.device_put(tail, state.length.sharding)
    batches = chunk_batches(prompts, options, begin, images)
    for batch, ticket in _with_engram(engram, state, rows, batches, all_layers=False):
        found = _fetched(ticket, state)
        state, tail = encode_chunk(model, variables, state, index, tail, batch, write_from, found)
        if progress is not None:
            progress(np.asarray(batch.count))
    return state, tail


def _with_engram(
    engram: EngramFeed | None,
    state: ModelState,
    rows: Sequence[int],
    batches: Iterator[TokenBatch],
    all_layers: bool,
) -> Iterator[tuple[TokenBatch, Ticket | None]]:
    """Each chunk with its Engram rows on the way, or with None where the tables are parameters."""
    if engram is None:
        return ((batch, None) for batch in batches)
    return engram.read_ahead(state, rows, batches, all_layers)


def _fetched(ticket: Ticket | None, state: ModelState) -> EngramRows | None:
    """A chunk's rows; waiting for them hides behind the chunk before, of which ``state`` is an output."""
    return None if ticket is None else ticket.result(behind=state.length)


def check_prompts(settings: Settings, prompts: Sequence[Sequence[int]], cached: int) -> None:
    """Refuses prompts and hits that cannot be prefilled (see :func:`prefill`)."""
    some = any(len(prompt) for prompt in prompts)
    for prompt in prompts:
        if len(prompt) <= cached and (len(prompt) or not some):
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves nothing to prefill after {cached} cached ones")
    if cached != usable_hit(settings, cached):
        raise ValueError(f"a prefix hit of {cached} tokens is not a multiple of the compress ratios")


def chunk_batches(
    prompts: Sequence[Sequence[int]],
    options: PrefillOptions,
    begin: int,
    images: Sequence[Sequence[ImageSpan]] | None = None,
) -> Iterator[TokenBatch]:
    """The chunks of prompts from position ``begin`` on, padded to the options' widths; a span may cross their edges."""
    live = np.array([len(prompt) for prompt in prompts], np.int32)
    done = begin
    for width, _ in options.chunks(int(live.max()) - begin):
        count = np.clip(live - done, 0, width).astype(np.int32)
        tokens = np.zeros((len(prompts), width), np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : count[i]] = prompt[done : done + count[i]]
        batch = TokenBatch(jnp.asarray(tokens), jnp.asarray(count))
        yield _with_images(batch, images, done) if images and any(images) else batch
        done += width


def _with_images(batch: TokenBatch, images: Sequence[Sequence[ImageSpan]], start: int) -> TokenBatch:
    """The chunk from position ``start`` on with the parts of image spans that lie in it."""
    rows, width = batch.tokens.shape
    one = next(span.embeddings for row in images for span in row)
    is_image = np.zeros((rows, width), bool)
    embeddings = np.zeros((rows, width, one.shape[1]), one.dtype)
    for i, row in enumerate(images):
        for span in row:
            low, high = max(span.start, start), min(span.start + len(span.embeddings), start + width)
            if low < high:
                is_image[i, low - start : high - start] = True
                embeddings[i, low - start : high - start] = span.embeddings[low - span.start : high - span.start]
    return batch.replace(is_image=jnp.asarray(is_image), embeddings=jnp.asarray(embeddings))


def usable_hit(settings: Settings, cached: int) -> int:
    """The longest part of a prefix hit that ends where no source has an open group: no position appends twice."""
    step = math.lcm(*settings.table.ratios) if settings.table.ratios else 1
    return cached // step * step


def _place_after(
    variables: Variables,
    state: ModelState,
    rows: jax.Array,
    prompts: Sequence[Sequence[int]],
    begin: int,
    images: Sequence[Sequence[ImageSpan]] | None,
) -> ModelState:
    """Moves empty requests to position ``begin``: rings stay empty, the n-gram history is known from the prompt."""
    reach = state.ngram_tail.shape[1]
    history = np.full((len(prompts), reach), -1, np.int32)
    token_map = np.asarray(variables["constants"]["token_map"])
    for i, prompt in enumerate(prompts):
        before = prompt[max(0, begin - reach) : begin]
        if len(before):
            history[i, reach - len(before) :] = token_map[np.asarray(before)]
        for span in () if images is None else images[i]:
            # Image positions are no words: n-grams end at them.
            low, high = max(span.start, begin - reach), min(span.start + len(span.embeddings), begin)
            if low < high:
                history[i, reach + low - begin : reach + high - begin] = -1
    return state.replace(
        length=state.length.at[rows].set(begin), ngram_tail=state.ngram_tail.at[rows].set(jnp.asarray(history))
    )


@sharded_step(1, (1,), (STATE, REQUESTS, REQUESTS), STATE)
def clear_requests(model: Model, state: ModelState, cleared: jax.Array, page_table: jax.Array) -> ModelState:
    """Empties request slots for new requests and installs the whole page table.

    Args:
      state: donated.
      cleared: bool ``[batch]``.
      page_table: int32 ``[batch, table_pages]``.
    """

    def where(axis: int, leaf: jax.Array, empty: float) -> jax.Array:
        return jnp.where(cleared.reshape(*(1,) * axis, -1, *(1,) * (leaf.ndim - axis - 1)), empty, leaf)

    empty = lambda ring: ring.replace(positions=where(0, ring.positions, -1))  # noqa: E731
    return state.replace(
        page_table=page_table,
        encoder_ring=empty(state.encoder_ring),
        decoder_ring=empty(state.decoder_ring),
        tails=jax.tree.map(lambda leaf: where(1, leaf, 0.0), state.tails),
        ngram_tail=where(0, state.ngram_tail, -1),
        length=where(0, state.length, 0),
    )
