"""A training run from its configuration file: which model, data, optimiser and step it is made of."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dsv41.config import load_config
from dsv41.declared import declared_variables, padded_leaves
from dsv41.inference.calibration import write_calibration
from dsv41.layers.dspark import Drafter
from dsv41.loading import checkpoint_variables, model_tokenizer
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.sharding.parallel import SINGLE, Parallel
from dsv41.tokens.tokenizer import Tokenizer
from dsv41.training.balance import BIAS_RATE
from dsv41.training.config import TrainConfigError
from dsv41.training.data import DataConfig, TrainingBatches, load_documents
from dsv41.training.draft_step import DraftRecipe, draft_train_step
from dsv41.training.dspark import DsparkConfig, calibrate
from dsv41.training.export import copy_vocabulary, export_checkpoint, export_drafter
from dsv41.training.fit import check_blocks, check_rows
from dsv41.training.forward import TrainBatch, alignment
from dsv41.training.held_out import Evaluate, backbone_metrics, best_params, drafter_metrics, drafter_terms, placed
from dsv41.training.losses import LossConfig
from dsv41.training.optimizers import OptimizerConfig, make_optimizer, parameter_groups
from dsv41.training.packing import Documents
from dsv41.training.placement import spread
from dsv41.training.schedules import ScheduleConfig, make_schedule
from dsv41.training.sources import ModelSource, first_draft_masters, first_masters, require_weights
from dsv41.training.step import Recipe, train_step
from dsv41.training.trainer import Metrics, Trainer, TrainerConfig
from dsv41.training.update import TrainState, Update, masters


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """``policy``: what is rounded; see :class:`~dsv41.numerics.rounding.RoundingPolicy`.

    Attributes:
      preset: "off", "cache" or "full"; the other fields, where they are given, differ from it.
    """

    preset: Literal["off", "cache", "full"] = "off"
    main_kv: bool | None = None
    index_keys: bool | None = None
    index_queries: bool | None = None
    window: bool | None = None
    activations: bool | None = None
    expert_weights: bool | None = None
    dense_weights: bool | None = None

    def policy(self) -> RoundingPolicy:
        """The roundings."""
        given = dataclasses.asdict(self)
        preset = given.pop("preset")
        return RoundingPolicy.preset(preset, {name: on for name, on in given.items() if on is not None})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The whole file.

    Attributes:
      bias_rate: what a step moves a router's bias by.
      dspark: where the file has it, the drafter is trained and the backbone is not.
    """

    model: ModelSource
    data: DataConfig
    schedule: ScheduleConfig
    trainer: TrainerConfig
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    bias_rate: float = BIAS_RATE
    dspark: DsparkConfig | None = None

    def __post_init__(self) -> None:
        if self.bias_rate < 0:
            raise ValueError(f"bias_rate: {self.bias_rate} is below 0")


class Run(NamedTuple):
    """A training run.

    Attributes:
      trainer: its loop.
      export: writes a state as a checkpoint in the public layout, to a directory that is not there yet; with True as
        plain floats, whatever the configuration says.
    """

    trainer: Trainer
    export: Callable[[TrainState, pathlib.Path, bool], None]


class _Parts(NamedTuple):
    """What differs between training a model and training its drafter."""

    step: Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]
    state: TrainState
    evaluate: Evaluate | None
    export: Callable[[TrainState, pathlib.Path, bool], None]


def build(config: TrainConfig, directory: pathlib.Path, parallel: Parallel = SINGLE, fresh: bool = False) -> Run:
    """The run of a configuration; weights and data are read, nothing is trained or written yet.

    Args:
      directory: of the run.
      parallel: the mesh.
      fresh: see :class:`~dsv41.training.trainer.Trainer`.

    Raises:
      TrainConfigError, ConfigError, CheckpointError, DataError, MeshError: the file's sections do not fit each other,
        or the files that they name do not; the message names the field or the file.
    """
    source = config.model.directory
    model_config = load_config(source)
    model = Model(Settings.for_training(model_config, config.policy.policy(), config.model.remat, parallel))
    check_rows(model, config.data.batch_rows)
    check_blocks(model)
    tokenizer = model_tokenizer(model_config, source)
    if tokenizer is None:
        raise TrainConfigError(f"model.directory: {source} has neither a tokenizer.json nor the packaged vocabulary")
    train, held_out = load_documents(config.data, tokenizer, model_config.bos_token_id, model_config.eos_token_id)
    if config.trainer.evaluate_every and not len(held_out):
        raise TrainConfigError(f"trainer.evaluate_every: {config.trainer.evaluate_every}, and data.holdout is 0")
    if config.dspark is not None and config.dspark.calibrate and not len(held_out):
        raise TrainConfigError("dspark.calibrate: true, and data.holdout is 0")
    make = _backbone if config.dspark is None else _drafter
    parts = make(config, model, tokenizer, held_out)
    rate = jax.jit(make_schedule(config.schedule))

    def step(state: TrainState, batches: TrainBatch) -> tuple[TrainState, Metrics]:
        learning_rate = rate(state.step)
        state, metrics = parts.step(state, batches)
        return state, {**metrics, "learning_rate": learning_rate}

    batches = MicroBatches(
        TrainingBatches(config.data, train, alignment(model.settings)), config.trainer.micro_batches, parallel
    )
    evaluate = parts.evaluate if config.trainer.evaluate_every else None
    padded = padded_leaves(model)
    trainer = Trainer(step, parts.state, batches, evaluate, config.trainer, directory, config, fresh, padded)
    return Run(trainer, parts.export)


def _backbone(config: TrainConfig, model: Model, tokenizer: Tokenizer, held_out: Documents) -> _Parts:
    params, constants = first_masters(config.model, model, tokenizer)
    recipe = Recipe(model, config.loss, _update(config, model), config.model.seed)

    def export(state: TrainState, directory: pathlib.Path, plain: bool) -> None:
        export_checkpoint(directory, model, best_params(state), plain=plain, vision=config.model.directory)
        copy_vocabulary(config.model.directory, directory)

    return _Parts(
        lambda state, batches: train_step(recipe, state, constants, batches),
        recipe.update.begin(spread(model, params)),
        backbone_metrics(recipe, constants, config.data, held_out),
        export,
    )


def _drafter(config: TrainConfig, model: Model, tokenizer: Tokenizer, held_out: Documents) -> _Parts:
    source = config.model
    if not model.settings.text.num_nextn_predict_layers:
        raise TrainConfigError("dspark: the model has no drafter (text_config.num_nextn_predict_layers is 0)")
    require_weights(source)
    drafter = Drafter(model.settings)
    check_blocks(drafter)
    backbone = checkpoint_variables(model, source.directory, tokenizer)
    recipe = DraftRecipe(model, drafter, config.dspark, _update(config, drafter), source.seed)

    def export(state: TrainState, directory: pathlib.Path, plain: bool) -> None:
        trained = best_params(state)
        if plain:
            whole = (model, masters(backbone["params"]), drafter, trained)
            export_checkpoint(directory, *whole, plain=True, vision=source.directory)
        else:
            export_drafter(directory, source.directory, drafter, trained)
        copy_vocabulary(source.directory, directory)
        if config.dspark.calibrate:
            terms = drafter_terms(recipe, backbone, config.data, held_out, trained)
            write_calibration(directory, calibrate(terms))

    return _Parts(
        lambda state, batches: draft_train_step(recipe, state, backbone, batches),
        recipe.update.begin(spread(drafter, first_draft_masters(source, drafter))),
        drafter_metrics(recipe, backbone, config.data, held_out),
        export,
    )


def _update(config: TrainConfig, module: Model | Drafter) -> Update:
    return _update_of(config.optimizer, config.schedule, module, config.bias_rate, config.trainer.ema)


@functools.lru_cache(maxsize=8)
def _update_of(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, module: Model | Drafter, bias_rate: float, ema: float
) -> Update:
    """Made once, so that a process which goes on with a run finds the step that it has compiled."""
    declared = declared_variables(module)
    rule = make_optimizer(optimizer, declared, make_schedule(schedule), module.settings.parallel)
    return Update.of(rule, parameter_groups(optimizer, declared), bias_rate, ema)


class MicroBatches:
    """What a step takes: so many batches, stacked, ``[micro-batches, rows, length]``, where the mesh wants them.

    Every process reads all rows: they are some bytes a token.
    """

    def __init__(self, batches: TrainingBatches, count: int, parallel: Parallel) -> None:
        self._batches, self._count, self._parallel = batches, count, parallel

    def __next__(self) -> TrainBatch:
        parts = [next(self._batches) for _ in range(self._count)]
        return placed({name: np.stack([part[name] for part in parts]) for name in parts[0]}, self._parallel, leading=1)

    def get_state(self) -> Any:
        return self._batches.get_state()

    def set_state(self, state: Any) -> None:
        self._batches.set_state(state)
