"""What a training run moves, and one move: optimiser, balance of the experts, average; nothing if it is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding

from dsv41.checkpoint.placement import ParameterTree, flatten_tree
from dsv41.training.balance import BIAS_RATE, update_biases
from dsv41.training.optimizers import Group, Groups, gradient_norm, trained_gradients, update_ema
from dsv41.training.placement import alike

Metrics = dict[str, jax.Array]


@struct.dataclass
class TrainState:
    """What a training run moves.

    Attributes:
      step: int32 scalar, updates made or skipped so far.
      params: float32 masters of the parameters.
      optimizer: the optimiser's state.
      ema: an average of ``params``; None without.
    """

    step: jax.Array
    params: ParameterTree
    optimizer: optax.OptState
    ema: ParameterTree | None


def masters(params: ParameterTree) -> ParameterTree:
    """Float parameters as float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


class Update(NamedTuple):
    """How masters move; hashable.

    Attributes:
      optimizer: see :func:`~dsv41.training.optimizers.make_optimizer`.
      groups: which parameters it trains (:func:`~dsv41.training.optimizers.parameter_groups`), as pairs.
      bias_rate: what a step moves a router's bias by.
      ema: decay of the average; 0: none.
    """

    optimizer: optax.GradientTransformation
    groups: tuple
    bias_rate: float = BIAS_RATE
    ema: float = 0.0

    @classmethod
    def of(
        cls, optimizer: optax.GradientTransformation, groups: Groups, bias_rate: float = BIAS_RATE, ema: float = 0.0
    ) -> Update:
        """From a mapping of groups."""
        return cls(optimizer, tuple(groups.items()), bias_rate, ema)

    def begin(self, params: ParameterTree) -> TrainState:
        """The state before the first step; ``params`` are float32 masters, which it keeps."""
        ema = jax.tree.map(jnp.copy, params) if self.ema else None
        where = {path: x.sharding for path, x in flatten_tree(params).items()}
        init, wanted = self.optimizer.init, None
        divided = all(isinstance(sharding, NamedSharding) for sharding in where.values())
        if divided:
            wanted = alike(jax.eval_shape(init, params), where)
        state = TrainState(jnp.int32(0), params, jax.jit(init, out_shardings=wanted)(params), ema)
        # Arrays that are bound to no device would compile the step twice: what it returns is bound.
        return jax.device_put(state, alike(state, where) if divided else next(iter(where.values())))

    def __call__(
        self,
        state: TrainState,
        gradient: ParameterTree,
        loss: jax.Array,
        text: Mapping[str, jax.Array],
        image: Mapping[str, jax.Array],
    ) -> tuple[TrainState, Metrics]:
        """The next state.

        Args:
          gradient: float32, of the whole step; loss: its scalar.
          text, image: tokens of each expert by router, see :func:`~dsv41.training.balance.update_biases`.

        Returns:
          the state; and float32 scalars: ``gradient_norm`` before clipping; ``skipped``, 1 if the loss or a gradient of
          a trained parameter was not finite: then the state is as it was, but for its number; ``bad``, the place of the
          first such gradient among the sorted paths of the parameters, −1 without one.
        """
        groups = dict(self.groups)
        flat = flatten_tree(trained_gradients(gradient, groups))
        finite = jnp.stack([jnp.all(jnp.isfinite(flat[path])) for path in sorted(flat)])
        norm = gradient_norm(gradient, groups)
        # The norm is not finite where any gradient is not. XLA would compute all their flags again at each leaf below.
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
        free = {"/".join(p[:-1]) for p, how in groups.items() if how.group is Group.ROUTER_BIAS}
        loads = ({router: load for router, load in of.items() if router in free} for of in (text, image))
        params = update_biases(optax.apply_updates(state.params, updates), *loads, self.bias_rate)
        ema = None if state.ema is None else update_ema(state.ema, params, self.ema)
        before = (state.params, state.optimizer, state.ema)
        kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), (params, optimizer, ema), before)
        metrics = {"gradient_norm": norm, "skipped": ~sound, "bad": jnp.where(jnp.all(finite), -1, jnp.argmin(finite))}
        return TrainState(state.step + 1, *kept), {name: x.astype(jnp.float32) for name, x in metrics.items()}


def max_load(text: Mapping[str, jax.Array], image: Mapping[str, jax.Array]) -> jax.Array:
    """The largest expert's load over its router's mean, over all routers."""
    loads = [text[router] + image[router] for router in text]
    return jnp.max(jnp.stack([jnp.max(x / jnp.maximum(jnp.mean(x, axis=-1, keepdims=True), 1)) for x in loads]))
