"""The picture encoder: a vision transformer over patches, and the aligner that makes token embeddings of them.

    patches ──► linear ──► blocks (full attention over one picture) ──► RMSNorm
            ──► cells of r × r patches, channel outermost ──► aligner ──► one embedding a cell
            ──► START, rows of (cells, NEWLINE), END: the picture's span in the sequence

One call encodes one picture. Patches and span are padded to a common width; how much of them lives follows from the
grid, and padded patches reach nothing. Source: model.md, 'Vision'.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from dsv41.layers.linear import Axes, declare
from dsv41.settings import Settings
from pallas_kernels.products import einsum, narrow, wide_linear
from pallas_kernels.tiling import largest_tile, map_query_tiles

_NORM_EPS = 1e-6  # The vision part's own; the configuration states the text model's only.

RotaryTable = tuple[jax.Array, jax.Array]


class BiasedLinear(nn.Module):
    """y = x·Wᵀ (+ b): plain weights [out, in] in the activation dtype, accumulated in float32, rounded once."""

    settings: Settings
    out_features: int
    in_features: int
    axes: tuple[str | None, str | None]
    biased: bool = True

    def setup(self):
        dtype = self.settings.dtype
        self.weight = declare(self, "weight", (self.out_features, self.in_features), dtype, self.axes)
        self.bias = declare(self, "bias", (self.out_features,), dtype, self.axes[:1]) if self.biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in]`` to ``[..., out]`` in x's dtype."""
        y = wide_linear(x, self.weight)
        return narrow(y if self.bias is None else y + self.bias.astype(jnp.float32), x.dtype)


class VisionNorm(nn.Module):
    """RMSNorm with a float32 weight, computed in float32, returned in x's dtype."""

    settings: Settings
    width: int
    axes: Axes = ("vision_embed",)

    def setup(self):
        self.weight = declare(self, "weight", (self.width,), jnp.float32, self.axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _NORM_EPS)
        return narrow(wide * inverse * self.weight, x.dtype)


def grid_rotary(grid: jax.Array, count: int, head_dim: int, base: float) -> RotaryTable:
    """Cosines and sines ``[count, head_dim / 2]`` float32 of patches in row-major order.

    Frequencies of a patch's row take the first half of the columns, those of its column the second.
    """
    quarter = head_dim // 4
    frequencies = np.power(np.float64(base), -np.arange(quarter) / quarter).astype(np.float32)
    index = jnp.arange(count, dtype=jnp.int32)
    places = jnp.stack([index // grid[1], index % grid[1]], axis=-1).astype(jnp.float32)
    angles = (places[..., None] * frequencies).reshape(count, head_dim // 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotate_halves(x: jax.Array, table: RotaryTable) -> jax.Array:
    """Rotates all of ``x`` [patch, heads, head_dim]: element i is paired with element i + head_dim / 2."""
    cos, sin = (t[:, None] for t in table)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return narrow(jnp.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1), x.dtype)


class VisionAttention(nn.Module):
    """Full attention over the live patches of one picture."""

    settings: Settings

    def setup(self):
        width = self.settings.config.vision.hidden_size
        self.wqkv = BiasedLinear(self.settings, 3 * width, width, ("vision_heads", "vision_embed"))
        self.wo = BiasedLinear(self.settings, width, width, ("vision_embed", "vision_heads"))

    def __call__(self, x: jax.Array, valid: jax.Array, table: RotaryTable) -> jax.Array:
        """``[patch, width]`` to the same; patches that are not ``valid`` [patch] are no keys.

        One tile of queries is scored at a time, so that memory grows with the patches, not with their square.
        """
        heads = self.settings.config.vision.num_attention_heads
        q, k, v = rearrange(self.wqkv(x), "n (three h d) -> three n h d", three=3, h=heads)
        q, k = rotate_halves(q, table), rotate_halves(k, table)
        scale = q.shape[-1] ** -0.5

        def one_tile(_: jax.Array | int, q: jax.Array) -> jax.Array:
            logits = jnp.where(valid, einsum("qhd,nhd->hqn", q[0], k) * scale, -jnp.inf)
            probability = narrow(jax.nn.softmax(logits, axis=-1), v.dtype)
            return narrow(einsum("hqn,nhd->qhd", probability, v), x.dtype)[None]

        tile = largest_tile(q.shape[0], lambda t: 4 * heads * t * k.shape[0])
        attended = map_query_tiles(one_tile, tile, (q[None],))[0]
        return self.wo(rearrange(attended, "n h d -> n (h d)"))


class VisionMLP(nn.Module):
    """SwiGLU without bias; w1 holds the gate's rows, then those of the up projection."""

    settings: Settings

    def setup(self):
        vision = self.settings.config.vision
        width, inner = vision.hidden_size, vision.intermediate_size
        self.w1 = BiasedLinear(self.settings, 2 * inner, width, ("vision_mlp", "vision_embed"), biased=False)
        self.w2 = BiasedLinear(self.settings, width, inner, ("vision_embed", "vision_mlp"), biased=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[patch, width]`` to the same."""
        gate, up = jnp.split(self.w1(x), 2, axis=-1)
        gate = narrow(nn.silu(gate.astype(jnp.float32)), x.dtype)
        return self.w2(gate * up)


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    settings: Settings

    def setup(self):
        width = self.settings.config.vision.hidden_size
        self.norm1, self.norm2 = VisionNorm(self.settings, width), VisionNorm(self.settings, width)
        self.attn, self.mlp = VisionAttention(self.settings), VisionMLP(self.settings)

    def __call__(self, x: jax.Array, valid: jax.Array, table: RotaryTable) -> tuple[jax.Array, None]:
        x = x + self.attn(self.norm1(x), valid, table)
        return x + self.mlp(self.norm2(x)), None


class PatchEmbed(nn.Module):
    """One linear map of a flattened patch."""

    settings: Settings

    def setup(self):
        vision = self.settings.config.vision
        self.proj = BiasedLinear(self.settings, vision.hidden_size, 3 * vision.patch_size**2, ("vision_embed", None))

    def __call__(self, patches: jax.Array) -> jax.Array:
        return self.proj(patches)


class VisionTower(nn.Module):
    """Patch embedding, the blocks as one loop, final norm."""

    settings: Settings

    def setup(self):
        vision = self.settings.config.vision
        self.patch_embed = PatchEmbed(self.settings)
        self.blocks = nn.scan(
            VisionBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=vision.num_hidden_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
            check_constancy_invariants=False,  # as in the stacks of layers: it would trace the body twice
        )(self.settings)
        self.norm = VisionNorm(self.settings, vision.hidden_size)

    def __call__(self, patches: jax.Array, grid: jax.Array) -> jax.Array:
        """``[patch, 3 · patch_size²]`` of a grid (rows, columns) to ``[patch, width]``; padding may hold anything."""
        vision = self.settings.config.vision
        count = patches.shape[0]
        valid = jnp.arange(count) < grid[0] * grid[1]
        # Zeroed once, here: what padding holds may be NaN, and a key's weight of 0 would not undo it.
        x = self.patch_embed(jnp.where(valid[:, None], patches, 0).astype(self.settings.dtype))
        head_dim = vision.hidden_size // vision.num_attention_heads
        x, _ = self.blocks(x, valid, grid_rotary(grid, count, head_dim, vision.rope_theta))
        return self.norm(x)


class Aligner(nn.Module):
    """Linear, exact GELU, linear: a cell of r × r patches to the model's width."""

    settings: Settings

    def setup(self):
        vision, d = self.settings.config.vision, self.settings.text.hidden_size
        cell = vision.hidden_size * vision.downsample_ratio**2
        self.w1 = BiasedLinear(self.settings, d, cell, ("embed", None))
        self.w2 = BiasedLinear(self.settings, d, d, ("embed", None))

    def __call__(self, cells: jax.Array) -> jax.Array:
        """``[cell, width · r²]`` to ``[cell, d]``."""
        hidden = nn.gelu(self.w1(cells).astype(jnp.float32), approximate=False)
        return self.w2(narrow(hidden, cells.dtype))


def gather_cells(x: jax.Array, grid: jax.Array, ratio: int, count: int) -> jax.Array:
    """Cells of patches ``[patch, width]`` in reading order, ``[count, width · ratio²]``, the channel outermost.

    A grid that the ratio does not divide is continued with zeros, at the bottom and on the right.
    """
    columns = -(-grid[1] // ratio)
    index = jnp.arange(count, dtype=jnp.int32)[:, None]
    inside = np.arange(ratio**2, dtype=np.int32)
    row = index // columns * ratio + inside // ratio
    column = index % columns * ratio + inside % ratio
    exists = (row < grid[0]) & (column < grid[1])
    picked = jnp.where(exists[..., None], x[jnp.where(exists, row * grid[1] + column, 0)], 0)
    return rearrange(picked, "cell inside width -> cell (width inside)")


class PictureEncoder(nn.Module):
    """The whole vision part; its parameters are the checkpoint's ``vision``, ``aligner`` and ``image_*``."""

    settings: Settings

    def setup(self):
        d, dtype = self.settings.text.hidden_size, self.settings.dtype
        self.vision = VisionTower(self.settings)
        self.aligner = Aligner(self.settings)
        self.image_start, self.image_newline, self.image_end = (
            declare(self, name, (d,), dtype, ("embed",)) for name in ("image_start", "image_newline", "image_end")
        )

    def __call__(self, patches: jax.Array, grid: jax.Array, width: int) -> jax.Array:
        """Embeddings of a picture's span.

        Args:
          patches: ``[patch, 3 · patch_size²]``, those of the grid in row-major order first, then padding.
          grid: int32 ``[2]``, rows and columns of patches.
          width: positions that the span is padded to; not below its own.

        Returns:
          ``[width, d]`` in the activation dtype; zeros beyond the span.
        """
        ratio = self.settings.config.vision.downsample_ratio
        x = self.vision(patches, grid)
        rows = self.aligner(gather_cells(x, grid, ratio, width))
        self.sow("intermediates", "vit_out", x)
        self.sow("intermediates", "image_rows", rows)

        lines, columns = -(-grid[0] // ratio), -(-grid[1] // ratio)
        position = jnp.arange(width, dtype=jnp.int32)
        line, column = (position - 1) // (columns + 1), (position - 1) % (columns + 1)
        last = lines * (columns + 1) + 1
        cells = rows[jnp.clip(line * columns + column, 0, width - 1)]
        span = jnp.where((column == columns)[:, None], self.image_newline, cells)
        span = jnp.where((position == 0)[:, None], self.image_start, span)
        span = jnp.where((position == last)[:, None], self.image_end, span)
        return jnp.where((position <= last)[:, None], span, 0)
