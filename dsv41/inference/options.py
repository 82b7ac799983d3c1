"""How an engine runs: everything that is decided before requests come."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dsv41.config import ModelConfig
from dsv41.inference.prefill import PrefillOptions


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine batches.

    Attributes:
      max_batch: requests that decode together at most. A call with fewer uses the next smaller power of two that
        holds them.
      max_length: positions (prompt and new tokens) that a request may have; None: the model's maximum.
      pool_tokens: tokens of memory that all requests share; None: enough for every slot to hold a longest request.
        With less, requests wait until others have finished.
      prefill: how prompts enter.
      deterministic: one compiled shape for every call (all slots, the longest length, one chunk size), so that a
        request gives the same tokens alone and in any batch. Without it matrix products of another shape may differ
        in their last bits. Steps are as wide as the verification of a whole block of drafts, so that speculation
        changes nothing either.
      speculative: drafts of the DSpark drafter that a step verifies for each request: a number of 1 … the model's
        block size, "auto" for as many as pay, None for no speculation. Greedy tokens stay what they are (without
        ``deterministic`` up to ties within rounding); sampled ones keep the model's distribution.
      engram: where the rows of Engram's tables lie: "device" in its memory, as all weights do; "pinned" in the host's
        memory; "mapped" in the checkpoint's file. From the host they are read ahead, a step in two parts meanwhile.
    """

    max_batch: int = 8
    max_length: int | None = None
    pool_tokens: int | None = None
    prefill: PrefillOptions = dataclasses.field(default_factory=PrefillOptions)
    deterministic: bool = False
    speculative: int | Literal["auto"] | None = None
    engram: Literal["device", "pinned", "mapped"] = "device"

    def __post_init__(self) -> None:
        for field in ("max_batch", "max_length", "pool_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}: {value} is below 1")

    def length_limit(self, config: ModelConfig) -> int:
        """Positions that a request may have.

        Raises:
          ValueError: ``max_length`` is beyond the model's positions.
        """
        positions = config.text.max_position_embeddings
        if self.max_length is not None and self.max_length > positions:
            raise ValueError(f"max_length: {self.max_length} exceeds max_position_embeddings {positions}")
        return self.max_length or positions

    def prefill_options(self, config: ModelConfig) -> PrefillOptions:
        """The chunk sizes in use: one alone in deterministic mode, the largest that is not longer than a request."""
        sizes = self.prefill.chunk_sizes
        if not self.deterministic:
            return self.prefill
        limit = self.length_limit(config)
        fitting = [size for size in sizes if size <= limit]
        return dataclasses.replace(self.prefill, chunk_sizes=(fitting[-1] if fitting else sizes[0],))

    def check_speculation(self, config: ModelConfig) -> None:
        """Whether the model can draft as deep as ``speculative`` says.

        Raises:
          ValueError: it has no drafter, or the depth is outside its block.
        """
        depth, text = self.speculative, config.text
        if depth is None:
            return
        if not text.num_nextn_predict_layers:
            raise ValueError(f"speculative: {depth!r}, but the model has no drafter (num_nextn_predict_layers 0)")
        if depth != "auto" and (isinstance(depth, bool) or not isinstance(depth, int)):
            raise ValueError(f"speculative: {depth!r} is neither 'auto' nor a number of drafts")
        if depth != "auto" and not 1 <= depth <= text.dspark_block_size:
            raise ValueError(f"speculative: {depth} is outside 1 … {text.dspark_block_size} (dspark_block_size)")


DEFAULT_OPTIONS = EngineOptions()
