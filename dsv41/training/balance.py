"""Balance of the experts: the rule that moves the routers' biases, and the loss within a document.

The biases choose experts and never weigh them, so no gradient reaches them: after each step they move by a fixed
amount toward balance. The loss, small, only keeps single documents from extremes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.checkpoint.placement import ParameterTree, flatten_tree, unflatten_tree

BIAS_RATE = 0.001
"""How far a step moves a bias (training.md, 'Losses and routing')."""

_SUM_FLOOR = 1e-20  # Under the sum of a token's scores, as in the routing weights.


def update_biases(
    params: ParameterTree,
    loads_text: Mapping[str, jax.Array],
    loads_image: Mapping[str, jax.Array],
    rate: float = BIAS_RATE,
) -> ParameterTree:
    """bias += rate · sign(mean load − load) for each expert, text and image biases each from their own loads.

    An expert whose load is the mean does not move, and so none does in a modality without any token.

    Args:
      params: float32 parameters; the routers' leaves are ``bias`` (text) and ``bias_vl`` (image).
      loads_text, loads_image: tokens that chose each expert, int32 or float32 ``[..., experts]`` in the shape of the
        bias, by router (its path in ``params``, joined by "/": ``encoder/groups_0/runs_0/ffn/gate``). They count the
        whole batch: summed over micro-batches and devices. A router that is not named keeps its bias.
      rate: what a bias moves by.

    Returns:
      the parameters with new biases; every other leaf is the same array.

    Raises:
      ValueError: a name that is no router's, or a load whose shape is not the bias's; both are named.
    """
    leaves = flatten_tree(params)
    for name, loads in (("bias", loads_text), ("bias_vl", loads_image)):
        for router, load in loads.items():
            path = (*router.split("/"), name)
            if path not in leaves:
                raise ValueError(f"{router}: no router of this path has a {name}")
            bias = leaves[path]
            if load.shape != bias.shape:
                raise ValueError(f"{router}: loads of shape {load.shape} for a {name} of shape {bias.shape}")
            leaves[path] = bias + rate * _shortage(load)
    return unflatten_tree(leaves)


def _shortage(load: jax.Array) -> jax.Array:
    """sign(mean − load) over the last axis, float32; without the division, which would make equal loads differ."""
    load = load.astype(jnp.float32)
    return jnp.sign(jnp.sum(load, axis=-1, keepdims=True) - load.shape[-1] * load)


class SequenceBalance(NamedTuple):
    """What adds up over micro-batches; the loss is ``total / tokens``.

    Attributes:
      total: float32 ``[]``, Σ over documents of tokens · Σ_e f_e · P_e.
      tokens: float32 ``[]``, tokens of these documents.
    """

    total: jax.Array
    tokens: jax.Array


def sequence_balance(scores: jax.Array, chosen: jax.Array, documents: jax.Array) -> SequenceBalance:
    """The balance loss of one router's documents, 1 where experts are used and scored evenly (DeepSeek-V3, eq. 17-20).

    Of a document with T tokens, k choices each, among E experts::

        f_e = E / (k·T) · Σ_t 1[e chosen at t]        P_e = 1/T · Σ_t scores_e(t) / Σ_e' scores_e'(t)
        loss = Σ_e f_e · P_e

    Documents are averaged by their tokens. So the loss, like the cross-entropy, is a mean over tokens, which neither
    padding nor the places of documents in rows and micro-batches change; and short documents, which cannot be
    balanced (T·k below E), have little weight.

    Args:
      scores: float32 ``[rows, length, experts]``, positive, before the bias. Differentiable.
      chosen: int32 ``[rows, length, k]``, distinct experts of each token; constants, as f_e is.
      documents: int32 ``[rows, length]``, column at which the token's document begins, −1 at padding, where scores and
        choices may hold anything.
    """
    rows, _, experts = scores.shape
    valid = documents >= 0
    # Padded scores are replaced before anything is computed of them: a NaN would come back through its own gradient.
    scores = jnp.where(valid[..., None], scores, 1.0)
    probability = scores / (jnp.sum(scores, axis=-1, keepdims=True) + _SUM_FLOOR)
    live = valid.astype(jnp.float32)
    # A document is known by its row and first column.
    row, start = jnp.arange(rows)[:, None], jnp.maximum(documents, 0)
    mass = jnp.zeros_like(scores).at[row, start].add(probability * live[..., None])
    count = jnp.zeros_like(scores).at[row[..., None], start[..., None], chosen].add(live[..., None])
    tokens = jnp.zeros_like(live).at[row, start].add(live)
    per_document = jnp.sum(count * mass, axis=-1) / jnp.maximum(tokens, 1.0)
    return SequenceBalance(experts / chosen.shape[-1] * jnp.sum(per_document), jnp.sum(live))
