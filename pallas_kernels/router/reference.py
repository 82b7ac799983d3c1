"""The router in float64, row by row."""

from __future__ import annotations

import jax
import numpy as np


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    image_bias: jax.Array,
    is_image: jax.Array,
    valid: jax.Array,
    *,
    k: int,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`pallas_kernels.router.route`; weights of rows that are not valid are 0."""
    experts = np.full((x.shape[0], k), weight.shape[0], np.int32)
    weights = np.zeros((x.shape[0], k))
    for row in np.flatnonzero(np.asarray(valid)):
        scores = np.sqrt(np.logaddexp(np.asarray(weight, np.float64) @ np.asarray(x[row], np.float64), 0))
        biased = scores + np.asarray(image_bias if is_image[row] else bias, np.float64)
        experts[row] = np.argsort(-biased, kind="stable")[:k]
        weights[row] = scale * scores[experts[row]] / scores[experts[row]].sum()
    return experts, weights
