"""Bounded replay against exact prefill: same global memory, other decoder rings, how far apart are the logits?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dsv41.config import ModelConfig
from dsv41.inference.prefill import PrefillOptions, prefill
from dsv41.model import Model
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.steps.prefill import Variables
from dsv41.tokens.tokenizer import Tokenizer
from dsv41.training.corpora import DataError
from dsv41.verification.table import divergence, greedy_agreement


def random_prompts(config: ModelConfig, length: int, count: int, seed: int) -> np.ndarray:
    """Prompts ``[count, length]`` int32 of uniformly drawn ids, special and image ids left out."""
    special = [config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id]
    ids = np.setdiff1d(np.arange(config.text.vocab_size), special)
    return np.random.default_rng(seed).choice(ids, (count, length)).astype(np.int32)


def text_prompts(ids: Sequence[int], length: int, count: int) -> np.ndarray:
    """Consecutive pieces ``[count, length]`` int32 of a text's token ids."""
    return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def beginnings(documents: Sequence[str], tokenizer: Tokenizer, begin: int, length: int, count: int) -> np.ndarray:
    """Beginnings ``[count, length]`` int32 of documents, spread evenly over those that are long enough.

    Args:
      begin: id of the begin token, the first of each.

    Raises:
      DataError: fewer documents have so many tokens.
    """
    encoded = [ids for ids in tokenizer.encode_batch(documents) if len(ids) >= length - 1]
    if len(encoded) < count:
        raise DataError(f"texts: {count} are wanted, {len(encoded)} held-out texts have {length} tokens")
    chosen = [encoded[i * len(encoded) // count] for i in range(count)]
    return np.array([[begin, *ids[: length - 1]] for ids in chosen], np.int32)


def compare_replay(
    model: Model, variables: Variables, prompts: np.ndarray, length: int, chunk: int, replay_length: int | None = None
) -> dict[str, Any]:
    """Prefills the first ``length`` tokens of all prompts both ways.

    Args:
      prompts: int32 ``[prompts, at least length]``.
      chunk: prefill chunk width.
      replay_length: positions replayed by the decoder; None: the window.

    Returns:
      the length, mean and largest absolute difference of the last position's logits, mean and largest KL divergence
      (nats) from exact to replay, share of prompts with the same most likely token, and whether the global memory
      is the same bytes.
    """
    count = len(prompts)
    state_tokens = -(-prompts.shape[1] // model.settings.page_tokens) * model.settings.page_tokens

    def run(mode: str) -> tuple[ModelState, np.ndarray]:
        options = PrefillOptions(mode, (chunk,), replay_length if mode == "replay" else None)
        state = create_sequential_state(model.settings, count, state_tokens)
        state, logits = prefill(model, variables, state, range(count), prompts[:, :length].tolist(), options)
        return state, np.asarray(logits)

    (replay_state, replay), (exact_state, exact) = run("replay"), run("exact")
    difference = np.abs(replay - exact)
    kl_mean, kl_max = divergence(replay, exact)
    same = jax.tree.map(
        lambda a, b: bool(np.array_equal(np.asarray(a), np.asarray(b))), replay_state.memory, exact_state.memory
    )
    return {
        "length": length,
        "mean_abs": float(difference.mean()),
        "max_abs": float(difference.max()),
        "kl_mean": kl_mean,
        "kl_max": kl_max,
        "same_token": greedy_agreement(replay, exact),
        "same_memory": all(jax.tree.leaves(same)),
    }
