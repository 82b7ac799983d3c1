"""The learning rate over a run: linear warm-up, constant, cosine to a final value."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from dsv41.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Updates are numbered from 1.

    Attributes:
      peak: learning rate of the constant part.
      final: learning rate of the last update.
      warmup: the update that first has the peak; before it the rate is proportional to the update's number.
      decay_from: the last update that has the peak; the cosine starts there.
      steps: the last update; later ones keep the final rate. Equal to ``decay_from``: the rate never decays.
    """

    peak: float = 2.6e-4
    final: float = 2.6e-5
    warmup: int = 2000
    decay_from: int
    steps: int

    def __post_init__(self):
        for name in ("peak", "final"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"schedule.{name}: {value} is not a positive number")
        if self.final > self.peak:
            raise ConfigError(f"schedule.final: {self.final} is above schedule.peak {self.peak}")
        if self.steps < 1:
            raise ConfigError(f"schedule.steps: {self.steps} is not positive")
        if self.warmup < 0:
            raise ConfigError(f"schedule.warmup: {self.warmup} is negative")
        if self.decay_from < self.warmup:
            raise ConfigError(f"schedule.decay_from: {self.decay_from} is before the end of warmup {self.warmup}")
        if self.decay_from > self.steps:
            raise ConfigError(f"schedule.decay_from: {self.decay_from} is after the last of {self.steps} steps")


def make_schedule(config: ScheduleConfig) -> optax.Schedule:
    """The rate by the number of updates already made (int32 ``[]``, from 0), as Optax counts: float32 ``[]``."""
    parts, boundaries = [optax.constant_schedule(config.peak)], []
    if config.warmup:
        parts.insert(0, optax.linear_schedule(0.0, config.peak, config.warmup))
        boundaries.append(config.warmup)
    if config.decay_from < config.steps:
        length = config.steps - config.decay_from
        parts.append(optax.cosine_decay_schedule(config.peak, length, alpha=config.final / config.peak))
        boundaries.append(config.decay_from)
    numbered = optax.join_schedules(parts, boundaries)

    def schedule(done: jax.Array | int) -> jax.Array:
        return jnp.asarray(numbered(done + 1), jnp.float32)

    return schedule
