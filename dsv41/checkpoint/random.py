"""Random weights as a virtual checkpoint: any rows of any tensor, without a file.

A value depends on the seed, the public name and the configuration only, so that stacking, sharding and the size of
the slices change nothing. Bits come from Philox, one stream a tensor and one counter range a chunk of rows, and turn
into values by tables: only raw bits of a generator are stable over numpy versions.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import statistics

import ml_dtypes
import numpy as np

from dsv41.checkpoint.layout import TensorSpec, checkpoint_layout
from dsv41.checkpoint.safetensors_io import NUMPY_DTYPES, CheckpointError, check_rows
from dsv41.config import ModelConfig

_CHUNK_VALUES = 2**18  # part of what the values are: another chunk size gives another model

# Mean and standard deviation of each kind of tensor; the first pattern that matches the end of the name holds.
# "fan_in" in the third column divides the deviation by √(inputs). The numbers keep every branch of the network
# alive with random weights: logits of order one, gates and mixing weights away from saturation.
_KINDS: tuple[tuple[str, float, float, bool], ...] = (
    (r"norm\d?\.weight|engram\.[qk]_weight", 1.0, 0.2, False),
    (r"attn_sink", 0.3, 0.7, False),
    (r"gate\.bias", 0.0, 0.25, False),
    (r"gate\.bias_vl", 0.0, 0.55, False),
    (r"hc_(attn|ffn)_base", 0.0, 0.6, False),
    (r"hc_(attn|ffn)_scale", 0.9, 0.25, False),
    (r"\.bias", 0.0, 0.1, False),
    (r"markov_head\.embed\.weight", 0.0, 1.0, False),
    (r"markov_head\.head\.weight", 0.0, 0.8, True),
    (r"engram\.embed\.weight", 0.0, 1.3, False),
    (r"embed\.weight|image_\w+", 0.0, 2.8, False),
    (r"head\.weight|compressor\.wgate\.weight", 0.0, 1.5, True),
    (r"weights_proj\.weight", 0.0, 0.37, True),
    (r"experts\.\d+\.w[13]\.weight", 0.0, 1.65, True),
    (r"mtp\.\d+\.ffn\.shared_experts\.w[13]\.weight", 0.0, 1.05, True),
    (r"shared_experts\.w[13]\.weight", 0.0, 1.6, True),
    (r"experts\.(\d+\.)?w2\.weight", 0.0, 0.32, True),
    (r"aligner\.w2\.weight", 0.0, 4.0, True),
    (r"attn\.wo_b\.weight", 0.0, 1.4, True),
    (r"attn\.(indexer\.)?w(q_a|q_b|kv|o_a)\.weight|main_proj\.weight|engram\.wkv\.weight", 0.0, 1.2, True),
    (r"\.weight|hc_(attn|ffn)_fn", 0.0, 1.0, True),
)

# Scales are spread over three powers of two, so that reading one in the wrong place shows.
_SCALE_STEPS = np.array([-1, 0, 0, 1], np.int16)
# Largest standard deviation of codes whose tails the format still holds.
_LARGEST_SPREAD = {"F8_E4M3": 128.0, "I8": 3.0}
_SCALE_RMS = math.sqrt(float(np.mean(4.0**_SCALE_STEPS)))


def moments(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's values."""
    for pattern, mean, deviation, fan_in in _KINDS:
        if re.search(f"({pattern})$", spec.name):
            return mean, deviation / math.sqrt(spec.value_shape[-1]) if fan_in else deviation
    raise CheckpointError(f"{spec.name}: no initial distribution for this kind of tensor")


@functools.cache
def _normal(levels: int) -> np.ndarray:
    """Standard normal values at ``levels`` equally likely quantiles, float32, scaled to unit variance."""
    normal = statistics.NormalDist()
    half = [normal.inv_cdf((i + 0.5) / levels) for i in range(levels // 2)]
    values = np.array(half + [-x for x in reversed(half)])
    return (values / values.std()).astype(np.float32)


def _code_step(dtype: str, deviation: float) -> tuple[int, float]:
    """Exponent of the scale, and the deviation of the codes that is left beside it."""
    deviation /= _SCALE_RMS
    exponent = math.ceil(math.log2(deviation / _LARGEST_SPREAD[dtype]))
    return exponent, deviation / 2.0**exponent


@functools.lru_cache(maxsize=256)
def _fp8_codes(deviation: float) -> np.ndarray:
    """E4M3 code of each byte of randomness."""
    _, spread = _code_step("F8_E4M3", deviation)
    return (_normal(256) * np.float32(spread)).astype(ml_dtypes.float8_e4m3fn)


@functools.lru_cache(maxsize=256)
def _fp4_codes(deviation: float) -> np.ndarray:
    """Two E2M1 codes for each 16 bits of randomness."""
    _, spread = _code_step("I8", deviation)
    codes = (_normal(256) * np.float32(spread)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return (codes | codes[:, None] << 4).reshape(-1)


def code_table(spec: TensorSpec) -> np.ndarray:
    """Equally likely codes of a quantised tensor: 2^8 E4M3 bytes, or 2^16 bytes of two E2M1 codes."""
    return (_fp4_codes if spec.dtype == "I8" else _fp8_codes)(moments(spec)[1])


def scale_table(weight: TensorSpec) -> np.ndarray:
    """Equally likely E8M0 bytes of the scales of a quantised tensor, four of them."""
    exponent, _ = _code_step(weight.dtype, moments(weight)[1])
    return (127 + exponent + _SCALE_STEPS).astype(np.uint8)


class RandomSource:
    """A checkpoint of random weights in the layout of ``config`` (a :class:`TensorSource`).

    Args:
      config: with ``quantization`` the tensors are codes and scales, without it floats.
      seed: any integer; another seed gives other values everywhere.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._layout = checkpoint_layout(config)
        self._weights = {spec.scale_name: spec for spec in self._layout.values() if spec.block is not None}
        self._seed = seed

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored dtype and shape of every tensor, by name."""
        return {name: (spec.dtype, spec.shape) for name, spec in self._layout.items()}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Rows of a tensor, ``[rows, ...]``; costs the chunks that the rows touch.

        Raises:
          CheckpointError: no such tensor, or rows outside it.
        """
        spec = self._layout.get(name)
        if spec is None:
            raise CheckpointError(f"{name}: no tensor of this configuration")
        start, stop = check_rows(name, spec.shape, rows)
        width = math.prod(spec.shape[1:])
        height = max(1, _CHUNK_VALUES // width)
        key = np.frombuffer(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:16], "<u8")
        out = np.empty((stop - start, *spec.shape[1:]), NUMPY_DTYPES[spec.dtype])
        for chunk in range(start // height, -(-stop // height)):
            first = chunk * height
            low, high = max(start, first), min(stop, first + height, spec.shape[0])
            # The values of a chunk are drawn from its first row on, whichever rows are asked for.
            values = self._draw(spec, np.random.Philox(key=key, counter=[0, 0, 0, chunk]), (high - first) * width)
            out[low - start : high - start] = values.reshape(-1, *spec.shape[1:])[low - first :]
        return out

    def _draw(self, spec: TensorSpec, bits: np.random.Philox, count: int) -> np.ndarray:
        if spec.dtype in ("F32", "BF16"):
            mean, deviation = moments(spec)
            draws = _draws(bits, count, "<u2")
            values = _normal(2**16)[draws] * np.float32(deviation) + np.float32(mean)
            return values.astype(NUMPY_DTYPES[spec.dtype])
        if spec.dtype == "I8":
            return code_table(spec)[_draws(bits, count, "<u2")]
        draws = _draws(bits, count, "u1")
        if spec.dtype == "F8_E8M0":
            return scale_table(self._weights[spec.name])[draws & 3]
        return code_table(spec)[draws]


def _draws(bits: np.random.Philox, count: int, dtype: str) -> np.ndarray:
    """``count`` random integers of a little-endian dtype of up to 8 bytes, the same on any machine."""
    words = -(-count * np.dtype(dtype).itemsize // 8)
    return bits.random_raw(words).astype("<u8", copy=False).view(dtype)[:count]
