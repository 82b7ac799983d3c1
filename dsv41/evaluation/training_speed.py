"""What a training pass takes: time and memory of forward and backward, under each policy of recomputation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv41.config import ModelConfig
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.training.forward import TrainBatch, forward
from dsv41.training.initial import initial_parameters
from dsv41.training.losses import LossConfig, cross_entropy
from dsv41.training.placement import as_declared
from dsv41.training.step import Counts, Recipe, loss_and_gradient
from dsv41.training.update import Update


def measure_training(
    config: ModelConfig, preset: str, rows: int, length: int, remats: Sequence[str], repeats: int
) -> Iterator[dict[str, Any]]:
    """Times the loss of random rows, without and with its gradient.

    Args:
      preset: of the rounding policy.
      rows, length: of the batch, every row one text.
      remats: of :data:`~dsv41.settings.REMAT`.
      repeats: timings; the median counts.

    Returns:
      for each policy of recomputation ``forward_ms``, ``both_ms`` and their ratio, ``tokens_per_s`` of both,
      ``parameters_mb`` (float32 masters), ``temporaries_mb`` that the compiler reserves for both, ``compile_s``.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, config.text.vocab_size - 3, (rows, length)).astype(np.int32)
    targets = np.concatenate([tokens[:, 1:], np.full((rows, 1), -1, np.int32)], axis=1)
    batch = TrainBatch(*map(jnp.asarray, (tokens, targets, np.zeros_like(tokens))))
    for remat in remats:
        model = Model(Settings.for_training(config, RoundingPolicy.preset(preset), remat))
        params = initial_parameters(model, 0)
        ids = np.arange(config.text.vocab_size, dtype=np.int32) % np.int32(config.text.engram_compressed_vocab_size)
        constants, counts = {"token_map": jnp.asarray(ids)}, Counts.of(batch)
        recipe = Recipe(model, LossConfig(), Update(optax.identity(), ()))

        def loss(params, constants, batch, counts, model=model):
            variables = {"params": as_declared(model, params), "constants": constants}
            outputs = forward(model, variables, batch)
            return cross_entropy(model, variables, outputs.hidden, batch.targets).loss / counts.targets

        def both(params, constants, batch, counts, recipe=recipe):
            return loss_and_gradient(recipe, params, constants, batch, None, counts)

        arguments = (params, constants, batch, counts)
        began = time.perf_counter()
        compiled = jax.jit(both).lower(*arguments).compile()
        compile_s = time.perf_counter() - began
        forward_ms = _median_ms(jax.jit(loss).lower(*arguments).compile(), arguments, repeats)
        both_ms = _median_ms(compiled, arguments, repeats)
        yield {
            "remat": remat,
            "rows": rows,
            "length": length,
            "forward_ms": forward_ms,
            "both_ms": both_ms,
            "both_over_forward": both_ms / forward_ms,
            "tokens_per_s": rows * length / both_ms * 1e3,
            "parameters_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6,
            "temporaries_mb": compiled.memory_analysis().temp_size_in_bytes / 1e6,
            "compile_s": compile_s,
        }


def _median_ms(compiled: Any, arguments: tuple, repeats: int) -> float:
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3
