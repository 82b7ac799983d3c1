"""Stored numbers to floats, on the host: exact, by rows.

Done in numpy rather than on a device because power-of-two scales may be subnormal, which devices flush to zero.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dsv41.checkpoint.layout import TensorSpec


def decode_rows(spec: TensorSpec, codes: np.ndarray, scales: np.ndarray, offset: int) -> np.ndarray:
    """The float32 values of some rows of a quantised matrix.

    Args:
      spec: the matrix ("F8_E4M3" or "I8", with a block).
      codes: ``[rows, columns]`` stored elements.
      scales: ``[scale rows, scale columns]`` E8M0 bytes: all those whose blocks the rows touch.
      offset: rows between the start of the first scale's block and the first row.

    Returns:
      ``[rows, values]`` float32, each the exact product (a product below 2⁻¹⁴⁹ rounds; scale byte 255 is NaN).
    """
    assert spec.block is not None
    tall, wide = spec.block
    rows = codes.shape[0]
    # Casts, not table lookups: numpy widens the indices of a lookup to 8 bytes each, more than the values take.
    if spec.dtype == "I8":
        values = np.empty((rows, codes.shape[1], 2), np.float32)
        values[:, :, 0] = (codes & 15).view(ml_dtypes.float4_e2m1fn)
        values[:, :, 1] = (codes >> 4).view(ml_dtypes.float4_e2m1fn)
    else:
        values = codes.astype(np.float32)
    steps = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    if tall > 1:
        steps = np.repeat(steps, tall, axis=0)[offset : offset + rows]
    blocks = values.reshape(rows, -1, wide)
    blocks *= steps[..., None]
    return values.reshape(rows, -1)
