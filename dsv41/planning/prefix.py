"""What a prompt costs whose beginning is in the memory already, with and without the encoder's rings of that place."""

from __future__ import annotations

import dataclasses
import math

from dsv41.planning.memory import encoder_tail_bytes, global_entry_bytes, state_bytes, token_bytes
from dsv41.settings import Settings

_SNAPSHOT = ("encoder rings", "compressor tails", "n-gram tail")


@dataclasses.dataclass(frozen=True)
class PromptWork:
    """The work of a prompt by replay.

    Attributes:
      cached: tokens of the prompt whose global entries are there, cut back to whole groups of every source.
      encoder, decoder: positions [first, end) that pass each stack.
      token_layers: positions times layers of both stacks.
      new_bytes: of the global entries that the prompt adds.
      load: bytes by part that must be there before the first step: the prefix's pages (shared where they lie; to be
        moved from elsewhere), and of a snapshot what the prompt goes on from.
      copied: bytes of a partly used last page, which is copied before it is written.
    """

    cached: int
    encoder: tuple[int, int]
    decoder: tuple[int, int]
    token_layers: int
    new_bytes: int
    load: dict[str, int]
    copied: int


def prompt_work(settings: Settings, prompt: int, cached: int = 0, rings: bool = True) -> PromptWork:
    """The work of a prompt of ``prompt`` tokens of which the first ``cached`` are in the memory.

    Args:
      rings: a snapshot of the encoder at the end of the prefix is there too. Without it the encoder replays a window
        before that place, with writing off.

    Raises:
      ValueError: more tokens are cached than the prompt has.
    """
    if cached > prompt:
        raise ValueError(f"cached: {cached} tokens are more than the {prompt} of the prompt")
    table, window = settings.table, settings.text.sliding_window
    cached -= cached % math.lcm(*table.ratios)
    encoder = (cached if rings else max(cached - window, 0), prompt)
    decoder = (max(prompt - window, 0), prompt)
    made = sum(prompt // r - cached // r for r in (table.layers[source].kind.ratio for source in table.kv_sources))
    per_token = token_bytes(settings)
    load = {"global memory": round(cached * per_token)} if cached else {}
    if cached and rings:
        state = state_bytes(settings, 1, 0)
        load |= {part: state[part] for part in _SNAPSHOT}
        if decoder[0] < cached:
            load["encoder tail"] = encoder_tail_bytes(settings, 1)
    return PromptWork(
        cached=cached,
        encoder=encoder,
        decoder=decoder,
        token_layers=(encoder[1] - encoder[0]) * len(table.encoder) + (decoder[1] - decoder[0]) * len(table.decoder),
        new_bytes=made * global_entry_bytes(settings),
        load=load,
        copied=round(settings.page_tokens * per_token) if cached % settings.page_tokens else 0,
    )
