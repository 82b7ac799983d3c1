"""Mixture of experts: sqrt-softplus router with a text and an image bias, routed and shared experts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from dsv41.layers.linear import Linear, declare
from dsv41.numerics.rounding import straight_through
from dsv41.settings import Settings
from dsv41.sharding.experts import over_experts
from pallas_kernels.expert_matmul import ExpertWeights, expert_matmul
from pallas_kernels.formats import FP4_E8M0, Format
from pallas_kernels.products import narrow, wide_linear
from pallas_kernels.router import expert_scores, route


class Routing(NamedTuple):
    """Chosen experts ``[..., k]`` int32, best first, and their weights ``[..., k]`` float32."""

    experts: jax.Array
    weights: jax.Array


class Router(nn.Module):
    """√softplus(x·Gᵀ); the bias chooses, the unbiased scores weigh (model.md, 'MoE')."""

    settings: Settings
    num_experts: int
    chosen: int

    def setup(self):
        shape = (self.num_experts, self.settings.text.hidden_size)
        self.weight = declare(self, "weight", shape, self.settings.dtype, (None, "embed"))
        self.bias = declare(self, "bias", (self.num_experts,), jnp.float32, (None,))
        self.bias_vl = declare(self, "bias_vl", (self.num_experts,), jnp.float32, (None,))

    def __call__(self, x: jax.Array, is_image: jax.Array, valid: jax.Array | None = None) -> Routing:
        """Routes ``[batch, query, d]``; positions with ``is_image`` [batch, query] choose by the image bias.

        Positions that are not ``valid`` [batch, query] go to expert number ``num_experts``, which is nobody: padded
        rows cost no expert and cannot reach live ones.
        """
        valid = jnp.ones_like(is_image) if valid is None else valid
        chosen = route(
            rearrange(x, "b s d -> (b s) d"),
            self.weight,
            self.bias,
            self.bias_vl,
            is_image.reshape(-1),
            valid.reshape(-1),
            k=self.chosen,
            scale=self.settings.text.routed_scaling_factor,
        )
        routing = Routing(*(c.reshape(*x.shape[:2], -1) for c in chosen))
        if self.is_mutable_collection("statistics"):
            self.sow("statistics", "scores", expert_scores(wide_linear(x, self.weight)))
            self.sow("statistics", "experts", routing.experts)
        return routing


class ExpertMatrix(nn.Module):
    """One of the three matrices of all routed experts, FP4 or plain: ``[experts, out, in]``."""

    settings: Settings
    num_experts: int
    out_features: int
    in_features: int
    axes: tuple[str | None, str | None]

    def setup(self):
        lead, axes = (self.num_experts, self.out_features), ("experts", *self.axes)
        if self.settings.packed_weights:
            packed, scales = FP4_E8M0.payload_width(self.in_features), FP4_E8M0.scale_width(self.in_features)
            self.weight = declare(self, "weight", (*lead, packed), jnp.uint8, axes)
            self.scale = declare(self, "scale", (*lead, scales), jnp.uint8, axes)
        else:
            self.weight = declare(self, "weight", (*lead, self.in_features), self.settings.dtype, axes)
            self.scale = None

    def __call__(self) -> ExpertWeights:
        if self.scale is None and self.settings.rounds("expert_weights"):
            return ExpertWeights(straight_through(FP4_E8M0, self.weight), None)
        return ExpertWeights(self.weight, self.scale)


class ExpertMatrices(NamedTuple):
    """The routed experts' matrices of one layer, or of several on a leading axis."""

    w1: ExpertWeights
    w3: ExpertWeights
    w2: ExpertWeights

    @classmethod
    def stacked(cls, params: Mapping[str, Any], loops: int) -> ExpertMatrices:
        """The matrices ``[layers, experts, ...]`` in the parameters of :class:`Experts` under ``loops`` loops."""

        def flat(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(-1, *leaf.shape[loops:])

        return cls(*(ExpertWeights(flat(params[w]["weight"]), flat(params[w]["scale"])) for w in cls._fields))


class Experts(nn.Module):
    """The routed experts: w1 (gate), w3 (up), w2 (down), stacked."""

    settings: Settings
    num_experts: int

    def setup(self):
        text = self.settings.text
        wide, inner = text.hidden_size, text.moe_intermediate_size
        self.w1 = ExpertMatrix(self.settings, self.num_experts, inner, wide, ("expert_mlp", "embed"))
        self.w3 = ExpertMatrix(self.settings, self.num_experts, inner, wide, ("expert_mlp", "embed"))
        self.w2 = ExpertMatrix(self.settings, self.num_experts, wide, inner, ("embed", "expert_mlp"))

    def __call__(
        self, x: jax.Array, routing: Routing, stacked: ExpertMatrices | None = None, layer: jax.Array | None = None
    ) -> jax.Array:
        """Σ over the chosen experts for rows ``[rows, d]``: ``[rows, d]`` float32, of this device's inner columns.

        Args:
          stacked: matrices of several layers, of which ``layer`` is read; None: this module's own.
        """
        matrices = ExpertMatrices(self.w1(), self.w3(), self.w2()) if stacked is None else stacked
        compute = functools.partial(
            _compute, limit=self.settings.text.swiglu_limit, activation_fmt=self.settings.formats.activations
        )
        params = (matrices, None if stacked is None else layer)
        return over_experts(
            self.settings.parallel, x, routing.experts, routing.weights, self.num_experts, compute, params
        )


def _compute(
    params: tuple[ExpertMatrices, jax.Array | None],
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    *,
    limit: float,
    activation_fmt: Format,
) -> jax.Array:
    """What one device's experts make of rows (:data:`~dsv41.sharding.exchange.Compute`)."""
    matrices, layer = params
    static = {"limit": limit, "activation_fmt": activation_fmt}
    return expert_matmul(x, experts, weights, *matrices, layer=layer, **static)


class SharedExpert(nn.Module):
    """The expert that every token passes, without a routing weight; of its inner columns this device's."""

    settings: Settings

    def setup(self):
        text = self.settings.text
        inner = text.moe_intermediate_size * text.n_shared_experts
        self.w1 = Linear(self.settings, inner, text.hidden_size, ("mlp", "embed"))
        self.w3 = Linear(self.settings, inner, text.hidden_size, ("mlp", "embed"))
        self.w2 = Linear(self.settings, text.hidden_size, inner, ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        limit = self.settings.text.swiglu_limit
        gate = jnp.minimum(self.w1(x).astype(jnp.float32), limit)
        up = jnp.clip(self.w3(x).astype(jnp.float32), -limit, limit)
        return self.w2(narrow(nn.silu(gate) * up, x.dtype))


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared expert; sums in float32."""

    settings: Settings
    num_experts: int
    chosen: int

    def setup(self):
        self.gate = Router(self.settings, self.num_experts, self.chosen)
        self.experts = Experts(self.settings, self.num_experts)
        self.shared_experts = SharedExpert(self.settings)

    def __call__(
        self,
        x: jax.Array,
        is_image: jax.Array,
        valid: jax.Array,
        stacked: ExpertMatrices | None = None,
        layer: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """``[batch, query, d]`` to the same; rows that are not ``valid`` [batch, query] reach no expert.

        ``stacked`` and ``layer``: see :class:`Experts`.
        """
        routing = self.gate(x, is_image, valid)
        flat = Routing(*(rearrange(r, "b s k -> (b s) k") for r in routing))
        # Neither reads what the other makes: the shared expert's products can run while rows of the routed ones travel.
        y = self.experts(rearrange(x, "b s d -> (b s) d"), flat, stacked, layer).reshape(x.shape)
        shared = self.shared_experts(x).astype(jnp.float32)
        y = narrow(y + shared, x.dtype)
        # Routed and shared experts have their inner columns divided alike: one sum serves both.
        return self.settings.parallel.sum(y, "mlp"), routing
