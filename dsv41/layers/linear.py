"""The smallest modules: linear maps as the checkpoint stores them, and RMSNorm."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from dsv41.numerics.rounding import straight_through_blocks
from dsv41.settings import Settings
from pallas_kernels.block_linear import block_linear
from pallas_kernels.formats import DenseFormat
from pallas_kernels.products import narrow, wide_linear

Axes = tuple[str | None, ...]


def declare(module: nn.Module, name: str, shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes) -> jax.Array:
    """Declares a parameter with its logical axes: this device's part of the whole ``shape``.

    Initial values are zeros: real ones come from a checkpoint or from :mod:`dsv41.checkpoint.random`, which
    fill the tree that these declarations describe.
    """
    shape = module.settings.parallel.shape(name, axes, shape)
    return module.param(name, nn.with_logical_partitioning(nn.initializers.zeros, axes), shape, dtype)


def declare_parts(module: nn.Module) -> None:
    """Has all modules inside a module declare their parameters, without a step that would use them.

    Flax sets a module up, and so has it declare, when something of it is first read. What runs as a loop declares its
    stacked parameters in one: its class has a method ``declare_in_loop`` that takes a loop's arguments.
    """
    getattr(module, "parts", None)
    own = [value for name, value in vars(module).items() if name != "parent"]
    for part in jax.tree.leaves(own, is_leaf=lambda leaf: isinstance(leaf, nn.Module)):
        if hasattr(part, "declare_in_loop"):
            part.declare_in_loop(None, None, None, None)
        elif isinstance(part, nn.Module):
            declare_parts(part)


class Linear(nn.Module):
    """y = x·Wᵀ with W in the public orientation [out, in], no bias.

    Attributes:
      axes: logical names of (out, in).
      quantised: the checkpoint stores W as FP8 with a scale per 32×32 block, and x is rounded to FP8 first.
    """

    settings: Settings
    out_features: int
    in_features: int
    axes: tuple[str | None, str | None]
    quantised: bool = True

    def setup(self):
        self.weight, self.scale = declare_matrix(
            self, self.settings, (self.out_features, self.in_features), self.axes, self.quantised
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in]`` to ``[..., out]`` in x's dtype, accumulated in float32 (model.md, 'Numbers')."""
        rounding = self.settings.formats.activations if self.quantised else DenseFormat(x.dtype.name)
        weight = rounded_matrix(self.settings, self.weight, self.scale) if self.quantised else self.weight
        return block_linear(x, weight, self.scale, activation_fmt=rounding)


def declare_matrix(
    module: nn.Module, settings: Settings, shape: tuple[int, int], axes: Axes, quantised: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Declares ``weight`` and, where the matrix is kept in FP8, ``scale`` (E8M0 bytes per 32×32 block)."""
    if quantised and settings.packed_weights:
        rows, columns = settings.config.quantization.weight_block_size
        weight = declare(module, "weight", shape, jnp.float8_e4m3fn, axes)
        return weight, declare(module, "scale", (shape[0] // rows, shape[1] // columns), jnp.uint8, axes)
    return declare(module, "weight", shape, settings.dtype, axes), None


def rounded_matrix(settings: Settings, weight: jax.Array, scale: jax.Array | None) -> jax.Array:
    """A quantised linear's matrix as it multiplies: rounded here where it is kept as floats."""
    return straight_through_blocks(weight) if scale is None and settings.rounds("dense_weights") else weight


class WideLinear(nn.Module):
    """y = x·Wᵀ in float32 throughout, whatever W is stored as (router, compressor, head)."""

    settings: Settings
    out_features: int
    in_features: int
    axes: tuple[str | None, str | None]

    def setup(self):
        shape = (self.out_features, self.in_features)
        self.weight = declare(self, "weight", shape, self.settings.dtype, self.axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in]`` to ``[..., out]`` float32."""
        return wide_linear(x, self.weight)


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · weight, in float32, returned in x's dtype."""

    settings: Settings
    width: int
    axis: str | None = None

    def setup(self):
        self.weight = declare(self, "weight", (self.width,), self.settings.dtype, (self.axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.settings.text.rms_norm_eps)
        return narrow(wide * inverse * self.weight.astype(jnp.float32), x.dtype)
