"""What generation takes and gives: requests, checked before any work, and completions with their figures."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

from dsv41.config import ModelConfig
from dsv41.pictures.encoder import EncodedPicture
from dsv41.pictures.files import PictureError, picture_plan
from dsv41.tokens.tokenizer import Tokenizer

PICTURE_PLACEHOLDER = "<｜image｜>"
"""How V4.1's vocabulary spells the image token. The packaged vocabulary is V4's: it spells that id otherwise, and has
these characters at another id."""

_SEEDS = 2**32


class RequestError(ValueError):
    """A request that cannot be served; the message names the field and its value."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt: text. The begin-of-sequence token is put before it, unless the text spells that token itself.
      tokens: token ids, taken as they are; exactly one of ``prompt`` and ``tokens`` is given.
      id: any name, handed back in the completion.
      max_new_tokens: tokens to generate at most.
      temperature: 0 takes the most likely token.
      top_p: in (0, 1]; sampling is cut to the smallest set of most likely tokens that has this mass.
      seed: in [0, 2³²). The same request with the same seed draws the same random numbers in any batch.
      stop: generation ends where the text contains one of these; the text is cut before it.
      images: picture files (PNG, JPEG, GIF or WebP), or pictures that are encoded already. Each stands at its
        placeholder, in order: the image token in ``tokens``, :data:`PICTURE_PLACEHOLDER` in ``prompt``.

    Raises:
      RequestError: a value is of the wrong type or out of range.
    """

    prompt: str | None = None
    tokens: Sequence[int] | None = None
    id: str | int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    images: Sequence[str | os.PathLike[str] | EncodedPicture] = ()

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, reason: str) -> None:
            if not ok:
                raise RequestError(f"{field}: {getattr(self, field)!r} {reason}")

        if (self.prompt is None) == (self.tokens is None):
            given = "both are given" if self.prompt is not None else "neither is given"
            raise RequestError(f"prompt, tokens: exactly one of them is needed, {given}")
        need(self.prompt is None or _is_text(self.prompt), "prompt", "is not a text")
        if self.tokens is not None:
            need(_is_list(self.tokens) and all(map(_is_integer, self.tokens)), "tokens", "is not a list of integers")
            need(len(self.tokens) > 0, "tokens", "is empty")
            object.__setattr__(self, "tokens", tuple(int(token) for token in self.tokens))
        need(self.id is None or isinstance(self.id, str) or _is_integer(self.id), "id", "is neither text nor integer")
        need(_is_integer(self.max_new_tokens), "max_new_tokens", "is not an integer")
        need(self.max_new_tokens >= 1, "max_new_tokens", "is below 1")
        need(_is_number(self.temperature), "temperature", "is not a finite number")
        need(self.temperature >= 0, "temperature", "is below 0")
        need(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "is not a number in (0, 1]")
        need(_is_integer(self.seed) and 0 <= self.seed < _SEEDS, "seed", "is not an integer in [0, 2³²)")
        need(
            _is_list(self.stop) and all(_is_text(s) and s for s in self.stop),
            "stop",
            "is not a list of non-empty texts",
        )
        object.__setattr__(self, "stop", tuple(self.stop))
        need(_is_list(self.images), "images", "is not a list of files or encoded pictures")
        for i, image in enumerate(self.images):
            if not isinstance(image, str | os.PathLike | EncodedPicture):
                raise RequestError(
                    f"images[{i}]: {type(image).__name__} is neither a file's path nor an EncodedPicture"
                )
        object.__setattr__(self, "images", tuple(self.images))

    @property
    def picture_files(self) -> tuple[str | os.PathLike[str], ...]:
        """Those of ``images`` that are yet to be encoded."""
        return tuple(image for image in self.images if not isinstance(image, EncodedPicture))


@dataclasses.dataclass(frozen=True)
class Figures:
    """Times in seconds, sizes in bytes; compilation is in none of the times.

    Attributes:
      prompt_tokens, new_tokens: counts.
      queue_s: from the start of the call until the request got a slot.
      ttft_s: from then until its first token.
      first_inter_token_s: from the first to the second token; None with fewer than two.
      steady_inter_token_s: median of the later distances; None with fewer than three tokens.
      total_s: from the slot to the last token.
      tokens_per_s: new tokens over ``total_s``.
      state_bytes: the request's own state: its pages and its fixed parts.
      batch_state_bytes: the allocated state of all slots, with the whole pool.
    """

    prompt_tokens: int
    new_tokens: int
    queue_s: float
    ttft_s: float
    first_inter_token_s: float | None
    steady_inter_token_s: float | None
    total_s: float
    tokens_per_s: float
    state_bytes: int
    batch_state_bytes: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      id: the request's.
      text: without the end-of-sequence token, cut before a stop text; None if the model has no tokenizer.
      tokens: every token drawn, those that ended the generation included.
      finish_reason: "stop" (end-of-sequence token or stop text) or "length" (``max_new_tokens`` reached).
    """

    id: str | int | None
    text: str | None
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    figures: Figures

    def to_json(self) -> dict[str, Any]:
        """The completion as one JSON object, figures nested."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Event:
    """A token of one request.

    Attributes:
      index: the request's place in the call.
      token: the token drawn.
      text: text that became certain with it; all texts of a request join to its completion's text.
      completion: in the last event of a request, else None.
    """

    index: int
    token: int
    text: str
    completion: Completion | None = None


def prompt_tokens(
    request: Request, config: ModelConfig, tokenizer: Tokenizer | None, max_length: int
) -> tuple[int, ...]:
    """The token ids of a request's prompt, checked against the model; the image token at each position of a picture.

    Args:
      tokenizer: None if the model's vocabulary is not the packaged one.
      max_length: positions that prompt and new tokens may take.

    Raises:
      RequestError: a text where there is no tokenizer, a token outside the vocabulary, pictures and placeholders that
        do not match, a picture that cannot be used, or too many tokens.
    """
    vocab = config.text.vocab_size
    if tokenizer is None and (request.prompt is not None or request.stop):
        field = "stop" if request.prompt is None else "prompt"
        raise RequestError(
            f"{field}: {getattr(request, field)!r} cannot be read: the model's vocabulary of {vocab} tokens is not the "
            "packaged tokenizer's; give the prompt as 'tokens'"
        )
    if request.tokens is not None:
        field, tokens = "tokens", tuple(request.tokens)
    else:
        text = request.prompt.replace(PICTURE_PLACEHOLDER, tokenizer.token_form(config.image_token_id))
        field, tokens = "prompt", tuple(tokenizer.encode(text))
        if tokens[:1] != (config.bos_token_id,):
            tokens = (config.bos_token_id, *tokens)
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise RequestError(f"{field}: token {token} at position {position} is not in the vocabulary of {vocab}")
    if request.images or config.image_token_id in tokens:
        tokens = _with_spans(field, tokens, request, config)
    if len(tokens) + request.max_new_tokens > max_length:
        raise RequestError(
            f"max_new_tokens: {request.max_new_tokens} after a prompt of {len(tokens)} tokens exceed the {max_length} "
            "positions that a request may have"
        )
    return tokens


def _with_spans(field: str, tokens: Sequence[int], request: Request, config: ModelConfig) -> tuple[int, ...]:
    """Tokens with each placeholder repeated over its picture's span."""
    places = [position for position, token in enumerate(tokens) if token == config.image_token_id]
    given = len(request.images)
    if len(places) > given:
        raise RequestError(
            f"{field}: token {config.image_token_id} at position {places[given]} stands for a picture, and "
            f"images[{given}] is not given ({given} for {len(places)} placeholders)"
        )
    if len(places) < given:
        image = request.images[len(places)]
        shown = "an encoded picture" if isinstance(image, EncodedPicture) else repr(os.fspath(image))
        mark = PICTURE_PLACEHOLDER if field == "prompt" else f"token {config.image_token_id}"
        raise RequestError(
            f"images[{len(places)}]: {shown} has no place: {given} are given, and {field} has {len(places)} "
            f"placeholders ({mark})"
        )
    whole: list[int] = []
    done = 0
    for i, (place, image) in enumerate(zip(places, request.images, strict=True)):
        whole += [*tokens[done:place], *[config.image_token_id] * _span(i, image, config)]
        done = place + 1
    return (*whole, *tokens[done:])


def _span(index: int, image: str | os.PathLike[str] | EncodedPicture, config: ModelConfig) -> int:
    """Positions that a picture takes."""
    if not isinstance(image, EncodedPicture):
        try:
            return picture_plan(image, config.vision).span
        except PictureError as error:
            raise RequestError(f"images[{index}]: {error}") from error
    width, limit = image.embeddings.shape[1], config.vision.max_image_tokens
    if width != config.text.hidden_size:
        raise RequestError(f"images[{index}]: embeddings are {width} wide, the model {config.text.hidden_size}")
    if image.span > limit:
        raise RequestError(f"images[{index}]: a span of {image.span} positions exceeds max_image_tokens {limit}")
    return image.span


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    # A string can hold halves of surrogate pairs, which are no text.
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
