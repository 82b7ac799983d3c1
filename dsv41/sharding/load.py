"""How many tokens each expert gets: what biases of a balanced routing move by, and what devices wait for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from dsv41.layer_table import locate, stack_plan
from dsv41.model import Model, TokenBatch, split_of
from dsv41.settings import Settings
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.split import WHOLE, Split
from dsv41.sharding.steps import REQUESTS, STATE, VARIABLES, Kind, sharded_step
from dsv41.state.request import ModelState, commit_encoder
from dsv41.steps.prefill import Variables


def expert_load(
    experts: jax.Array, num_experts: int, parallel: Parallel, counted: jax.Array | None = None, split: Split = WHOLE
) -> jax.Array:
    """Tokens of each expert, over all parts of the batch.

    Args:
      experts: int32 ``[batch, query, k]`` of this device's requests and columns, as routed; num_experts and beyond is
        nobody's.
      counted: bool ``[batch, query]``, the tokens that count, as those of one modality; None: all.
      split: of the columns.

    Returns:
      int32 ``[experts]``, equal on all devices.
    """
    if counted is not None:
        experts = jnp.where(counted[..., None], experts, num_experts)
    chosen = experts.reshape(-1, 1) == jnp.arange(num_experts)
    places = (*parallel.places("batch"), *split.places)
    load = jnp.sum(chosen, axis=0, dtype=jnp.int32)
    return lax.psum(load, places) if places else load


def layer_loads(settings: Settings, captured: tuple, split: Split = WHOLE) -> jax.Array:
    """Tokens of each expert in each layer.

    Args:
      captured: what the encoder's and the decoder's pass sowed (``mutable=["intermediates"]``).
      split: of the pass's columns.

    Returns:
      int32 ``[layers, experts]``.
    """
    loads = []
    stacks = (settings.table.encoder, settings.table.decoder)
    for name, rows, tree in zip(("encoder", "decoder"), stacks, captured, strict=True):
        plan = stack_plan(rows)
        for row in rows:
            address = locate(plan, row.index)
            (routed,) = tree["intermediates"][name][f"groups_{address.group}"][f"runs_{address.run}"]["router_idx"]
            chosen = routed[address.index]
            loads.append(expert_load(chosen, settings.text.n_routed_experts, settings.parallel, split=split))
    return jnp.stack(loads)


@sharded_step(
    static=1,
    donate=(),
    arguments=(VARIABLES, STATE, REQUESTS),
    results=Kind(lambda statics, parallel: PartitionSpec()),
)
def load_step(model: Model, variables: Variables, state: ModelState, batch: TokenBatch) -> jax.Array:
    """Tokens of each expert in each layer, int32 ``[layers, experts]``, when ``batch`` follows on ``state``.

    All tokens pass all layers; the state stays what it was.
    """
    (segment, delta), encoder = model.apply(variables, state, batch, method="encode", mutable=["intermediates"])
    state = commit_encoder(state, delta, batch.count)
    _, decoder = model.apply(variables, state, segment, method="decode", mutable=["intermediates"])
    return layer_loads(model.settings, (encoder, decoder), split_of(model.settings, batch.tokens.shape[1]))


def imbalance(load: np.ndarray, devices: int = 1) -> np.ndarray:
    """The largest load over the mean load, ``[...]`` float64; 1 is balanced, 0 is no load at all.

    Args:
      load: ``[..., experts]``.
      devices: that hold the experts in equal parts: the loads are then theirs, which a step waits for; 1: the
        experts' own.
    """
    load = np.asarray(load, np.float64)
    if devices > 1:
        load = load.reshape(*load.shape[:-1], devices, -1).sum(-1)
    mean = load.mean(-1)
    return np.divide(load.max(-1), mean, out=np.zeros_like(mean), where=mean > 0)
