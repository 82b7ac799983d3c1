"""A small run for the trainer's tests: a step with real arithmetic, its data, and a child process to send signals to.

``python -m tests.train_process DIRECTORY STEPS SAVE_EVERY PACE`` runs it in a directory; each batch takes PACE seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
import time
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv41.training.trainer import Outcome, Trainer, TrainerConfig

WIDTH = 8
# Enough that writing it takes a while, and that rounding it off would show.
BALLAST = 2_000_000
_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@flax.struct.dataclass
class State:
    """What a training step takes and gives."""

    step: jax.Array
    params: Any
    optimizer: Any
    ema: Any


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of the small run."""

    trainer: TrainerConfig
    seed: int = 0


class Batches:
    """Batches of random numbers, each from its own number; ``poisoned`` ones spoil the gradient of the second matrix,
    and those in ``lost`` the loss."""

    def __init__(self, seed: int = 0, poisoned: tuple[int, ...] = (), lost: tuple[int, ...] = (), pace: float = 0):
        self._given, self._seed, self._poisoned, self._lost, self._pace = 0, seed, poisoned, lost, pace

    def __next__(self) -> dict[str, np.ndarray]:
        time.sleep(self._pace)
        self._given += 1
        x = np.random.default_rng((self._seed, self._given)).normal(size=(16, WIDTH)).astype(np.float32)
        poison = np.float32(np.nan if self._given in self._poisoned else 0)
        return {"x": np.full_like(x, np.nan) if self._given in self._lost else x, "poison": poison}

    def get_state(self) -> dict[str, int]:
        return {"given": self._given}

    def set_state(self, state: dict[str, int]) -> None:
        self._given = state["given"]


def fresh_state(ballast: int = 1) -> State:
    """The state to begin with; ``ballast`` numbers lie beside what is trained."""
    rng = np.random.default_rng(7)
    weights = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(2)]
    params = {"params": {"first": {"weight": weights[0]}, "second": {"weight": weights[1]}}}
    extra = jnp.asarray(rng.normal(size=ballast), jnp.float32)
    return State(jnp.int32(0), params, (_OPTIMIZER.init(params), extra, optax.EmptyState()), None)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
    """Regression of a fixed function by two matrices; a step that is not finite changes nothing but its number."""

    def loss_of(params: Any) -> jax.Array:
        first, second = params["params"]["first"]["weight"], params["params"]["second"]["weight"]
        return jnp.mean((jnp.tanh(batch["x"] @ first) @ second - jnp.sin(batch["x"])) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    gradients["params"]["second"]["weight"] += batch["poison"]
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)])
    good = finite.all() & jnp.isfinite(loss)
    inner, extra, empty = state.optimizer
    updates, inner_after = _OPTIMIZER.update(gradients, inner, state.params)
    # The ballast takes part: a checkpoint of a wrong one bends the curve.
    after = (optax.apply_updates(state.params, updates), (inner_after, extra * 1.01, empty))
    params, optimizer = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, (state.params, state.optimizer))
    metrics = {
        "loss": loss,
        "tokens": jnp.float32(16),
        "gradient_norm": optax.tree.norm(gradients),
        "ballast": optimizer[1].sum(),
        "skipped": 1.0 - good,
        "bad": jnp.where(jnp.isfinite(loss), jnp.argmin(finite), -1),
    }
    return State(state.step + 1, params, optimizer, state.ema), metrics


def evaluate(state: State) -> dict[str, Any]:
    """A number that is the state's alone."""
    return {"norm": optax.tree.norm(state.params)}


def run(
    directory: pathlib.Path, data: Batches, ballast: int = 1, seed: int = 0, fresh: bool = False, **options: Any
) -> Outcome:
    """Runs the trainer in a directory."""
    config = Config(TrainerConfig(**options), seed)
    state = fresh_state(ballast)
    return Trainer(train_step, state, data, evaluate, config.trainer, directory, config, fresh).run()


def main() -> int:
    directory, steps, save_every, pace = sys.argv[1:]
    outcome = run(
        pathlib.Path(directory),
        Batches(pace=float(pace)),
        ballast=BALLAST,
        steps=int(steps),
        save_every=int(save_every),
        evaluate_every=5,
        keep=2,
    )
    return 0 if outcome.reason == "finished" else 128 + (outcome.signal or 0)


if __name__ == "__main__":
    sys.exit(main())
