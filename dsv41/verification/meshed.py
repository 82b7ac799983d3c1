"""Verification on a mesh: logits of every case against the reference, through the steps that run divided.

What lies inside the layers is compared on one device (:mod:`dsv41.verification.run`); here it is the joining of parts
that is in question, which no value inside a layer escapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np

from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.requests import sequential_state
from dsv41.sharding.steps import REQUESTS, STATE, VARIABLES, sharded_step
from dsv41.steps.decode import forward_tokens
from dsv41.verification.end_to_end import SLOTS, bucket, capacity, compare_logits, image_flags
from dsv41.verification.golden import Golden, GoldenError
from dsv41.verification.limits import STRICT, rounded_limits
from dsv41.verification.table import Row

_forward = sharded_step(1, (2,), (VARIABLES, STATE, REQUESTS), (STATE, REQUESTS))(forward_tokens)


def verify_on_mesh(
    golden: Golden, parallel: Parallel, page_tokens: int, progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Rows for the logits of the directory's cases; float goldens with cache rounding off and on, others as they are.

    Raises:
      GoldenError: the directory has no logits.
      MeshError: the model does not fit the mesh.
    """
    rows: list[Row] = []
    with jax.default_matmul_precision("highest"):
        for name, rounding in (("expected_noquant", False), ("expected", True)):
            if not golden.has(name):
                continue
            settings = Settings.default(golden.config, cache_rounding=rounding, page_tokens=page_tokens)
            model = Model(dataclasses.replace(settings, parallel=parallel))
            variables = golden.variables(model)
            cases = sorted({n.split(".")[0] for n in golden.tensors(name) if n.endswith(".prefill.logits")})
            ours, wanted = [], []
            for case in cases:
                progress(f"{'rounding on' if rounding else 'rounding off'}, case {case}")
                ours += _logits(model, variables, golden, case)
                vocab = ours[-1].shape[-1]
                wanted += [golden.tensors(name)[f"{case}.{part}.logits"].reshape(-1, vocab) for part in _PARTS]
            limits = rounded_limits(golden.config) if rounding else STRICT
            group = f"rounding {'on' if rounding else 'off'}"
            label = "logits of all cases"
            rows += compare_logits(group, label, np.concatenate(ours), np.concatenate(wanted), limits)
    if not rows:
        raise GoldenError(f"{golden.directory}: no expected logits")
    return rows


_PARTS = ("prefill", "decode")


def _logits(model: Model, variables: Mapping, golden: Golden, case: str) -> list[np.ndarray]:
    """Logits of the prompt and of the steps after it, ``[rows · positions, vocab]`` and ``[steps · rows, vocab]``."""
    expected, prompt = golden.tensors("expected"), golden.prompt_length(case)
    ids = expected[f"{case}.input_ids"]
    rows, total = ids.shape
    slots = max(SLOTS, model.settings.parallel.parts("batch"))
    state = sequential_state(model.settings, slots, capacity(golden))

    def batch(tokens: np.ndarray, width: int, flags: np.ndarray | None = None) -> TokenBatch:
        grid = np.zeros((slots, width), np.int32)
        grid[:rows, : tokens.shape[1]] = tokens
        count = np.where(np.arange(slots) < rows, tokens.shape[1], 0).astype(np.int32)
        if flags is None:
            return TokenBatch(grid, count)
        embed = expected[f"{case}.prefill.embed"]
        is_image, embeddings = np.zeros(grid.shape, bool), np.zeros((*grid.shape, embed.shape[-1]), np.float32)
        is_image[:rows, :prompt], embeddings[:rows, :prompt] = flags, embed
        return TokenBatch(grid, count, is_image, embeddings)

    chunk = batch(ids[:, :prompt], bucket(prompt), image_flags(golden, case))
    state, logits = _forward(model, variables, state, chunk)
    steps = []
    for position in range(prompt, total):
        state, step = _forward(model, variables, state, batch(ids[:, position : position + 1], 1))
        steps.append(np.asarray(step)[:rows, 0])
    vocab = logits.shape[-1]
    return [np.asarray(logits)[:rows, :prompt].reshape(-1, vocab), np.stack(steps).reshape(-1, vocab)]
