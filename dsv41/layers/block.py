"""One layer: (Engram,) attention and mixture of experts, each behind a hyper-connection."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from dsv41.layer_table import LayerKind, Mode
from dsv41.layers.attention import Attention
from dsv41.layers.engram import add_engram, engram_gate
from dsv41.layers.flow import Flow, LayerInputs, LayerOutputs, Step
from dsv41.layers.linear import RMSNorm, declare_parts
from dsv41.layers.mhc import cross, declare_hyper_connection, mix_streams, update_streams
from dsv41.layers.moe import ExpertMatrices, MixtureOfExperts
from dsv41.settings import Settings
from dsv41.state.tail import Projections
from pallas_kernels.mhc import Update
from pallas_kernels.products import narrow


class Block(nn.Module):
    """A backbone layer.

    Attributes:
      kind: the layer's mode and ratio.
      has_engram: whether an Engram precedes any of the layers that share this module in a loop.
      has_tap: whether DSpark reads the stream entering any of them.
      appends: whether a Full layer writes its global entries itself. The decoder's does not: its entries are
        written when encoder outputs are projected, and replay must never append.
    """

    settings: Settings
    kind: LayerKind
    has_engram: bool = False
    has_tap: bool = False
    appends: bool = True

    def setup(self):
        settings, text = self.settings, self.settings.text
        self.attn = Attention(settings, self.kind)
        self.attn_norm = RMSNorm(settings, text.hidden_size, "embed")
        self.ffn = MixtureOfExperts(settings, text.n_routed_experts, text.num_experts_per_tok)
        self.ffn_norm = RMSNorm(settings, text.hidden_size, "embed")
        self.hc_attn = declare_hyper_connection(self, settings, "attn")
        self.hc_ffn = declare_hyper_connection(self, settings, "ffn")

    def declare_in_loop(self, flow: None, inputs: None, step: None, experts: None) -> tuple[None, None]:
        """See :func:`~dsv41.layers.linear.declare_parts`."""
        declare_parts(self)
        return None, None

    def write_memory(self, flow: Flow, inputs: LayerInputs, step: Step) -> tuple[Flow, Projections | None]:
        """Appends this KV source's entries for the streams that enter it, without running the layer."""
        x = self.attn_norm(mix_streams(flow.streams, flow.mix))
        return self.attn.write_memory(x, flow, inputs, step)

    def __call__(
        self, flow: Flow, inputs: LayerInputs, step: Step, experts: ExpertMatrices | None = None
    ) -> tuple[Flow, LayerOutputs]:
        """Runs the layer.

        Args:
          experts: the routed experts of all layers of a loop, ``[layers, experts, ...]``, to be read at
            ``inputs.expert_slot``; None: the layer's own. A loop's own slice of them would be a copy in every step.
        """
        if self.has_engram:
            flow = self._engram(flow, inputs, step)
        if self.has_tap:
            mean = narrow(jnp.mean(flow.streams.astype(jnp.float32), axis=-2), flow.taps.dtype)
            flow = flow.replace(taps=flow.taps.at[inputs.tap_slot].set(mean, mode="drop"))

        _, x, c = cross(flow.streams, flow.mix, self.hc_attn, self.attn_norm)
        projections = None
        if self.kind.mode is Mode.FULL and self.appends:
            flow, projections = self.attn.write_memory(x, flow, inputs, step)
        flow, attended = self.attn(x, flow, inputs, step)
        self.sow("intermediates", "attn_in", x)
        self.sow("intermediates", "attn_out", attended.y)

        update = Update(attended.y, c.post, c.comb)
        streams, x, c = cross(flow.streams, c.pre, self.hc_ffn, self.ffn_norm, update)
        valid = step.split.own(step.valid)
        y, routing = self.ffn(x, step.is_image, valid, experts, inputs.expert_slot)
        flow = flow.replace(streams=update_streams(streams, y, c), mix=c.pre)
        self.sow("intermediates", "ffn_out", y)
        self.sow("intermediates", "router_idx", routing.experts)
        self.sow("intermediates", "router_w", routing.weights)
        self.sow("intermediates", "layer", flow.streams)
        self.sow("intermediates", "pre_mix", flow.mix)
        return flow, LayerOutputs(attended.entries, projections)

    def _engram(self, flow: Flow, inputs: LayerInputs, step: Step) -> Flow:
        """Adds the Engram if this iteration of the loop is the layer that has one."""
        streams = flow.streams

        def present(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
            engram = jax.tree.map(lambda t: t[slot], step.engram)
            gate = engram_gate(streams, engram, ~step.is_image)
            return add_engram(streams, engram, gate), gate

        def absent(_: jax.Array) -> tuple[jax.Array, jax.Array]:
            return streams, jnp.zeros(streams.shape[:-1], jnp.float32)

        streams, gate = lax.cond(inputs.engram_slot >= 0, present, absent, inputs.engram_slot)
        self.sow("intermediates", "engram_gate", gate)
        return flow.replace(streams=streams)
