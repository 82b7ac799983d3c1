"""How near the reference a run must come, by flavour and rounding."""

from __future__ import annotations

import dataclasses

from dsv41.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Limits:
    """None: reported, not held to anything.

    Attributes:
      logits: largest absolute difference of any value.
      median: median absolute difference of logits.
      rows_within: least share of rows whose largest difference is below 1e-3.
      greedy: least share of rows with the same most likely token.
      selections: least share of rows that choose the same set of entries.
    """

    logits: float | None = None
    median: float | None = None
    rows_within: float | None = None
    greedy: float | None = None
    selections: float | None = None


STRICT = Limits(logits=1e-4, greedy=1.0, selections=1.0)
"""Cache rounding off, float32."""

REPLAY_ROUNDED = Limits(greedy=0.9)
"""Replay of prompts up to 200 tokens with rounding on: flips spread over a long prompt, so only tokens are held."""

LAYER_ABSOLUTE = 1e-4
"""A float32 layer fed the golden's inputs, except where a rounding flipped."""

LAYER_RELATIVE_RMS = 2e-2
"""A bfloat16 layer fed the golden's inputs."""

SHALLOW_LAYERS = 8
"""Up to here one flipped rounding stays local enough for the tighter limits."""


def rounded_limits(config: ModelConfig) -> Limits:
    """Cache rounding on. One flipped E2M1 or E4M3 value changes an element by 6 % or more and others follow, so
    medians and shares are held; in bfloat16 the reference itself moves by 14-25 %, so nothing is."""
    if config.quantization is not None:
        return Limits()
    if config.text.num_hidden_layers <= SHALLOW_LAYERS:
        return Limits(median=1e-5, rows_within=0.6, greedy=0.95)
    return Limits(median=1e-4, greedy=0.9)
