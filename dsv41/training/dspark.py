"""Fine-tuning the drafter on a frozen backbone: blocks from random anchors, all of a batch at once.

A block after column t of a text is what inference would draft there: the ring holds the text's last W entries up to t,
the block is token t+1 and noise, and the Markov head sees the true tokens, which stand for accepted drafts. Position k
of a block (k = 1, 2, …) is compared with the backbone's own distribution at column t+k, and with the token there::

    loss = Σ w_k (0.1 · CE + 0.9 · TV + 1.0 · BCE) / Σ w_k        w_k = exp(−(k−1) / γ)
    TV = ½ Σ_v |p(v) − q(v)|                                      of backbone p and draft q; 1 − TV is the chance
    BCE of the confidence with 1 − TV, a constant                 that the backbone accepts the draft

Entries of all columns are made once and gathered for each anchor. Nothing here has a gradient into the backbone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from dsv41.checkpoint.placement import ParameterTree
from dsv41.config import ConfigError
from dsv41.inference.calibration import fit_temperatures
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.sharding.load import expert_load
from dsv41.state.ring import Ring
from dsv41.steps.draft import block_embeddings
from dsv41.training.forward import Outputs, TrainBatch, Variables
from dsv41.training.statistics import find
from pallas_kernels.tiling import TEMPORARY_BYTES, map_query_tiles, pad_axis


@dataclasses.dataclass(frozen=True)
class DsparkConfig:
    """``dspark``: how a drafter is trained.

    Attributes:
      anchors: blocks that each row drafts, at random columns; a row with fewer columns to draft from drafts fewer.
      gamma: γ, in positions; infinite: all positions of a block weigh the same.
      cross_entropy, total_variation, confidence: factors of the three losses.
      calibrate: whether confidences are calibrated on held-out texts when the training is over.
    """

    anchors: int = 64
    gamma: float = 4.0
    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    calibrate: bool = True

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ConfigError(f"dspark.anchors: {self.anchors} is not positive")
        if not self.gamma > 0:
            raise ConfigError(f"dspark.gamma: {self.gamma} is not positive")
        for name in ("cross_entropy", "total_variation", "confidence"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"dspark.{name}: {value} is not a number from 0 on")


class DraftTerms(NamedTuple):
    """Every block position, ``[rows, anchors, block]``; zeros where it is not live.

    Attributes:
      cross_entropy: −log q(true token), nats, float32.
      total_variation: ½ Σ|p − q|, float32.
      confidence: logit, float32.
      live: bool, the text goes on there.
    """

    cross_entropy: jax.Array
    total_variation: jax.Array
    confidence: jax.Array
    live: jax.Array


class DraftSums(NamedTuple):
    """What adds up over micro-batches, float32, of this device's rows; the loss is ``loss / weight``.

    Attributes:
      loss: ``[]``, of the weighted losses with their factors.
      cross_entropy, total_variation, confidence: ``[]``, each weighted by position alone.
      weight: ``[]``, of the positions' weights.
      survival: ``[block]``, of Π(1 − TV) over the positions up to each, which is the chance that it is accepted.
      blocks: ``[block]``, blocks that have each position.
      loads: live positions that chose each expert ``[experts]``, over all parts of the batch, by router (its path
        among the drafter's parameters, joined by "/"), for :func:`~dsv41.training.balance.update_biases`.
    """

    loss: jax.Array
    cross_entropy: jax.Array
    total_variation: jax.Array
    confidence: jax.Array
    weight: jax.Array
    survival: jax.Array
    blocks: jax.Array
    loads: Mapping[str, jax.Array]


def draft_losses(
    model: Model,
    drafter: Drafter,
    options: DsparkConfig,
    variables: Variables,
    drafter_params: ParameterTree,
    outputs: Outputs,
    batch: TrainBatch,
    key: jax.Array,
) -> DraftSums:
    """The losses of a batch.

    Args:
      variables: the backbone's; drafter_params: in the modules' dtypes.
      outputs: of the backbone's pass over ``batch``.
      key: chooses the anchors; shards of a batch need keys of their own.
    """
    columns = choose_anchors(key, batch, options.anchors)
    terms, loads = draft_terms(model, drafter, variables, drafter_params, outputs, batch, columns)
    return sum_terms(options, terms, loads)


def choose_anchors(key: jax.Array, batch: TrainBatch, count: int) -> jax.Array:
    """Columns to draft after, distinct ones of each row: int32 ``[rows, count]``; −1: there are no more.

    All columns are as likely whose next one is of the same text and has a target.
    """
    after = (batch.documents[:, :-1] == batch.documents[:, 1:]) & (batch.documents[:, :-1] >= 0)
    usable = after & (batch.targets[:, 1:] >= 0)
    order = jnp.where(usable, jax.random.uniform(key, usable.shape), jnp.inf)
    columns = jnp.argsort(order, axis=1)[:, :count].astype(jnp.int32)
    columns = jnp.where(jnp.take_along_axis(usable, columns, axis=1), columns, -1)
    return pad_axis(columns, 1, count - columns.shape[1], -1)


def draft_terms(
    model: Model,
    drafter: Drafter,
    variables: Variables,
    drafter_params: ParameterTree,
    outputs: Outputs,
    batch: TrainBatch,
    columns: jax.Array,
) -> tuple[DraftTerms, Mapping[str, jax.Array]]:
    """Drafts after the columns int32 ``[rows, anchors]`` (−1: none); arguments as of :func:`draft_losses`.

    Returns:
      the terms, and the routers' loads, see :class:`DraftSums`.
    """
    text = model.settings.text
    variables, taps, backbone = lax.stop_gradient((variables, outputs.taps, outputs.hidden))
    drafting = {"params": drafter_params}
    (rows, anchors), length, block = columns.shape, batch.tokens.shape[1], text.dspark_block_size

    def at(values: jax.Array, places: jax.Array) -> jax.Array:
        """``[rows, length]`` at columns ``[rows, …]``."""
        return jnp.take_along_axis(values, places.reshape(rows, -1), axis=1).reshape(places.shape)

    chosen, begin = columns >= 0, at(batch.documents, jnp.maximum(columns, 0))
    places = columns[..., None] + 1 + jnp.arange(block, dtype=jnp.int32)
    inside = chosen[..., None] & (places < length)
    places = jnp.where(inside, places, 0)
    tokens, targets = at(batch.tokens, places), at(batch.targets, places)
    inside &= (at(batch.documents, places) == begin[..., None]) & (targets >= 0)
    # What follows the first missing position would follow an unknown token.
    live = jnp.cumprod(inside, axis=-1).astype(bool)

    ring = _rings(drafter, drafting, taps, batch.documents, columns, begin)
    x = block_embeddings(model, variables, jnp.where(chosen, tokens[..., 0], 0).reshape(-1))
    start = jnp.where(chosen, columns + 1 - begin, 0).reshape(-1)
    hidden, sown = drafter.apply(drafting, x, ring, start, method="hidden", mutable=["statistics"])
    counted = live.reshape(-1, block)
    loads = {
        "/".join(path): expert_load(
            router["experts"], text.dspark_n_routed_experts, model.settings.parallel, counted
        ).astype(jnp.float32)
        for path, router in find(sown["statistics"], "experts").items()
    }

    backbone = jnp.take_along_axis(backbone, places.reshape(rows, -1, 1), axis=1)
    parts = (hidden, backbone, tokens, jnp.maximum(targets, 0), live)
    n = rows * anchors * block
    parts = [part.reshape(n, *shape) for part, shape in zip(parts, ((-1,), (-1,), (), (), ()), strict=True)]
    terms = _by_tiles(model, drafter, variables, drafting, parts)
    return DraftTerms(*(term.reshape(live.shape) for term in terms), live), loads


def _rings(
    drafter: Drafter,
    drafting: Variables,
    taps: jax.Array,
    documents: jax.Array,
    columns: jax.Array,
    begin: jax.Array,
) -> Ring:
    """What inference would hold after each column: rings of ``[rows · anchors]`` requests, oldest entry first."""
    length, window = documents.shape[1], drafter.settings.text.sliding_window
    valid = documents >= 0
    positions = jnp.where(valid, jnp.arange(length, dtype=jnp.int32) - documents, 0)
    taps = jnp.where(valid[:, :, None], taps, 0)  # padding may hold anything
    entries = drafter.apply(drafting, taps, positions, method="entries")
    seen = columns[..., None] + 1 - window + jnp.arange(window, dtype=jnp.int32)
    held = (columns >= 0)[..., None] & (seen >= begin[..., None])
    places = rearrange(jnp.where(held, seen, 0), "r a w -> 1 r (a w) 1")

    def gather(leaf: jax.Array) -> jax.Array:
        leaf = jnp.take_along_axis(leaf, places, axis=2)
        return rearrange(leaf, "s r (a w) x -> s (r a) w x", w=window)

    held_positions = jnp.where(held, seen - begin[..., None], -1)
    return Ring(entries.map(gather), rearrange(held_positions, "r a w -> (r a) w"))


def _by_tiles(
    model: Model, drafter: Drafter, variables: Variables, drafting: Variables, parts: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross-entropy, total variation and confidence of positions, float32 ``[n]`` each, zeros where they are not live.

    Logits exist for a few positions at a time, and are made again in the backward pass.

    Args:
      parts: the drafter's hidden values ``[n, d]``, the backbone's normalised ones ``[n, d]``, tokens int32 ``[n]``,
        targets int32 ``[n]``, live bool ``[n]``.
    """

    def some(_, hidden: jax.Array, backbone: jax.Array, tokens: jax.Array, targets: jax.Array, live: jax.Array):
        hidden, backbone = (jnp.where(live[..., None], x, 0) for x in (hidden, backbone))
        bias = drafter.apply(drafting, tokens, method="markov")
        normed = drafter.apply(drafting, hidden, method="norm")
        log_q = jax.nn.log_softmax(model.apply(variables, normed, method="logits") + bias.logits)
        p = jax.nn.softmax(model.apply(variables, backbone, method="logits"))
        cross_entropy = -jnp.take_along_axis(log_q, targets[..., None], axis=-1)[..., 0]
        total_variation = 0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1)
        confidence = drafter.apply(drafting, hidden, bias.embedding, method="confidence")
        return tuple(jnp.where(live, term, 0) for term in (cross_entropy, total_variation, confidence))

    tile = max(1, TEMPORARY_BYTES // (4 * model.settings.text.vocab_size))
    terms = map_query_tiles(some, tile, tuple(part[None] for part in parts), differentiable=True)
    return tuple(term[0] for term in terms)


def sum_terms(options: DsparkConfig, terms: DraftTerms, loads: Mapping[str, jax.Array]) -> DraftSums:
    """Weighs the terms and adds them up."""
    live = terms.live.astype(jnp.float32)
    weight = live * jnp.exp(-jnp.arange(live.shape[-1], dtype=jnp.float32) / options.gamma)
    accepted = lax.stop_gradient(1 - terms.total_variation)
    binary = jax.nn.softplus(terms.confidence) - accepted * terms.confidence
    cross_entropy, total_variation, confidence = (
        jnp.sum(weight * term) for term in (terms.cross_entropy, terms.total_variation, binary)
    )
    loss = (
        options.cross_entropy * cross_entropy
        + options.total_variation * total_variation
        + options.confidence * confidence
    )
    survival = jnp.sum(live * jnp.cumprod(accepted, axis=-1), axis=(0, 1))
    return DraftSums(
        loss,
        cross_entropy,
        total_variation,
        confidence,
        jnp.sum(weight),
        survival,
        jnp.sum(live, axis=(0, 1)),
        loads,
    )


def calibrate(held_out: Iterable[DraftTerms]) -> np.ndarray:
    """Temperatures of the confidences, float64 ``[block]``, see :func:`~dsv41.inference.calibration.fit_temperatures`.

    Raises:
      ValueError: a confidence is not finite.
    """
    parts = [[np.asarray(x).reshape(-1, x.shape[-1]) for x in terms] for terms in held_out]
    _, total_variation, confidence, live = (np.concatenate(x) for x in zip(*parts, strict=True))
    return fit_temperatures(confidence, 1 - total_variation, live)


def draft_metrics(sums: DraftSums) -> dict[str, jax.Array]:
    """Numbers for the curve, float32 ``[]``, from sums over the whole batch; NaN where nothing was drafted.

    ``draft_survival_k`` is the expected share of blocks of which position k is accepted, ``draft_accepted`` the
    expected number of accepted drafts of a block. They take the true tokens for the accepted drafts: what is really
    accepted tells :mod:`dsv41.evaluation.acceptance`.
    """
    means = {
        "draft_loss": sums.loss / sums.weight,
        "draft_cross_entropy": sums.cross_entropy / sums.weight,
        "draft_total_variation": sums.total_variation / sums.weight,
        "draft_confidence": sums.confidence / sums.weight,
        "draft_accepted": jnp.sum(sums.survival) / sums.blocks[0],
    }
    by_position = sums.survival / sums.blocks
    return means | {f"draft_survival_{k + 1}": by_position[k] for k in range(len(by_position))}
