"""The loop around the training step: batches in, a curve and checkpoints out, the same whether interrupted or not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv41.training.checkpoints import NOT_PADDED, Checkpoints, Padded, abstract_state, claim_directory
from dsv41.training.config import MAY_CHANGE, TrainConfigError
from dsv41.training.display import Display
from dsv41.training.metrics import MetricsLog

Metrics = Mapping[str, Any]
"""Numbers by name, on devices or not."""


class Data(Protocol):
    """The batches of a run, in their order; what a step takes."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any:
        """What follows the last batch that it gave, as JSON has it, the same on all processes."""

    def set_state(self, state: Any) -> None:
        """Goes on with what followed then."""


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """``trainer``: how long a run goes on, and what it leaves behind.

    Attributes:
      steps: optimizer steps in all. More of them than before make a finished run go on.
      micro_batches: batches whose gradients are added up to a step.
      evaluate_every: steps from one evaluation to the next; the last step is evaluated too. 0: never.
      save_every: steps from one checkpoint to the next; the last step leaves one too, and an interrupted one.
      keep: checkpoints that stay, the newest.
      log_every: steps from one printed line to the next, where there is no terminal. The curve has every step.
      on_nan: what follows a step whose loss or gradients are not finite, which changes nothing: "stop" or "skip".
      ema: decay a step of the parameters' moving average; 0: none is kept.
      mesh: a preset's name or a JSON file; None: one device.
      tensorboard: whether event files are written beside the curve.
      export: directory for a checkpoint in the public layout when all steps are done; None: none.
      export_plain: directory for another one, of floats, where the configuration's would be quantised: to measure by.
    """

    steps: int = dataclasses.field(metadata=MAY_CHANGE)
    micro_batches: int = 1
    evaluate_every: int = dataclasses.field(default=0, metadata=MAY_CHANGE)
    save_every: int = dataclasses.field(default=1000, metadata=MAY_CHANGE)
    keep: int = dataclasses.field(default=3, metadata=MAY_CHANGE)
    log_every: int = dataclasses.field(default=10, metadata=MAY_CHANGE)
    on_nan: Literal["stop", "skip"] = dataclasses.field(default="stop", metadata=MAY_CHANGE)
    ema: float = 0.0
    mesh: str | None = dataclasses.field(default=None, metadata=MAY_CHANGE)
    tensorboard: bool = dataclasses.field(default=False, metadata=MAY_CHANGE)
    export: pathlib.Path | None = dataclasses.field(default=None, metadata=MAY_CHANGE)
    export_plain: pathlib.Path | None = dataclasses.field(default=None, metadata=MAY_CHANGE)

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batches", "save_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if self.evaluate_every < 0:
            raise ValueError(f"evaluate_every: {self.evaluate_every} is below 0")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema: {self.ema} is outside [0, 1)")


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
      reason: "finished"; "interrupted", with a checkpoint of ``step``; "not finite", which leaves the last one.
      step: the last that was done; of "not finite" the one whose loss or gradients were not.
      state: after it; None of "not finite", where a later step may be under way.
      signal: what interrupted it, or None.
    """

    reason: Literal["finished", "interrupted", "not finite"]
    step: int
    state: Any
    signal: int | None = None


class Trainer:
    """Trains in a directory. All processes of a mesh make one and call :meth:`run` alike."""

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Metrics]],
        state: Any,
        data: Data,
        evaluate: Callable[[Any], Metrics] | None,
        options: TrainerConfig,
        directory: pathlib.Path,
        config: Any,
        fresh: bool = False,
        padded: Padded = NOT_PADDED,
    ) -> None:
        """
        Args:
          step: takes a state and a batch, gives the next state and metrics; it may donate the state. Where the loss or
            a gradient is not finite it gives the state's parameters and optimizer as they were, ``skipped`` 1, and as
            ``bad`` the number of the first such gradient among the sorted paths of ``state.params``, or −1: none.
          state: to begin with; has ``params``. What a checkpoint has takes its place.
          data: the batches.
          evaluate: held-out metrics of a state.
          options: see there.
          directory: of the run, see checkpoints.py. It need not exist.
          config: the whole configuration, a dataclass: a directory with a run of another one is refused.
          fresh: True also refuses a directory with a run of this one, which is else gone on with.
          padded: see :meth:`~dsv41.training.checkpoints.Checkpoints.restore`.
        """
        self._step, self._state, self._data, self._evaluate, self._padded = step, state, data, evaluate, padded
        self._options, self._directory, self._config, self._fresh = options, directory, config, fresh

    def run(self) -> Outcome:
        """Runs all steps that are not done yet. SIGINT and SIGTERM end it after a checkpoint; a second one at once.

        Raises:
          TrainConfigError: the directory has another configuration's run, or data ends before the steps do.
          CheckpointError: ``fresh``, and it has a run; or its checkpoint is not of such a state.
        """
        claim_directory(self._directory, self._config, self._fresh)
        options, leads = self._options, jax.process_index() == 0
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(_StopSignals())  # left last, when the last checkpoint is written
            checkpoints = stack.enter_context(Checkpoints(self._directory, options.keep))
            first, state = self._start(checkpoints)
            log = stack.enter_context(MetricsLog(self._directory, first, options.tensorboard)) if leads else None
            display = stack.enter_context(Display(first, options.steps, options.log_every, leads))
            if first:
                display.note(f"{self._directory}: goes on after step {first}")
            curve = _Curve(_paths(state.params), options.on_nan, log, display)
            try:
                return self._loop(first, state, checkpoints, curve, stop)
            except _NotFinite as error:
                there = checkpoints.steps
                display.note(f"{error}; the last checkpoint is of step {there[-1]}" if there else f"{error}")
                return Outcome("not finite", error.step, None)

    def _start(self, checkpoints: Checkpoints) -> tuple[int, Any]:
        """The steps that are done, and the state after them."""
        state, self._state = self._state, None
        if not checkpoints.steps:
            return 0, state
        like = abstract_state(state)
        del state  # there may be room for one only
        first, state, position = checkpoints.restore(like, self._padded)
        self._data.set_state(position)
        return first, state

    def _loop(self, first: int, state: Any, checkpoints: Checkpoints, curve: _Curve, stop: _StopSignals) -> Outcome:
        options, pending = self._options, None
        for step in range(first + 1, options.steps + 1):
            state, metrics = self._step(state, self._next_batch(step))
            for value in metrics.values():
                if isinstance(value, jax.Array):
                    value.copy_to_host_async()
            # The devices are at this step already: the one before is looked at meanwhile.
            if pending is not None:
                curve.add(*pending)
            pending = (step, metrics)
            last, stopped = step == options.steps, stop.requested(step)
            evaluates = (
                self._evaluate is not None and options.evaluate_every and (last or step % options.evaluate_every == 0)
            )
            saves = last or stopped or step % options.save_every == 0
            if evaluates or saves:
                curve.add(step, metrics, functools.partial(self._evaluate, state) if evaluates else None)
                pending = None
            if saves:
                curve.sync()
                checkpoints.save(step, state, self._data.get_state())
            if stopped and not last:
                return Outcome("interrupted", step, state, stop.number)
        return Outcome("finished", max(first, options.steps), state)

    def _next_batch(self, step: int) -> Any:
        try:
            return next(self._data)
        except StopIteration:
            raise TrainConfigError(
                f"trainer.steps: {self._options.steps}, and the data ends after {step - 1}"
            ) from None


class _NotFinite(Exception):
    """A step's loss or gradients are not finite, and the run is to stop there."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class _Curve:
    """Brings the metrics of each step to the host, looks whether they are finite, and shows and writes them."""

    def __init__(self, paths: Sequence[str], on_nan: str, log: MetricsLog | None, display: Display) -> None:
        self._paths, self._on_nan, self._log, self._display = paths, on_nan, log, display
        self._began = time.monotonic() - (log.wall if log is not None else 0.0)

    def add(self, step: int, metrics: Metrics, evaluate: Callable[[], Metrics] | None = None) -> None:
        """Waits until a step is done. ``evaluate`` is called if the run goes on after it.

        Raises:
          _NotFinite: it does not.
        """
        line = {name: np.asarray(value) for name, value in metrics.items()}
        bad, problem = int(line.pop("bad", -1)), None
        if line.get("skipped"):
            # Finite gradients may have a norm that is not.
            line["bad"] = self._paths[bad] if bad >= 0 else "gradient_norm" if np.isfinite(line["loss"]) else "loss"
            what = f"the gradient of {line['bad']}" if bad >= 0 else line["bad"]
            problem = f"step {step}: {what} is not finite"
        stops = problem is not None and self._on_nan == "stop"
        wall = time.monotonic() - self._began
        if evaluate is not None and not stops:
            line["held_out"] = dict(evaluate())
        if self._log is not None:
            self._log.write(step, wall, line)
        if stops:
            raise _NotFinite(step, problem)
        if problem is not None:
            self._display.note(f"{problem}; skipped")
        self._display.step(step, wall, line)

    def sync(self) -> None:
        """See :meth:`MetricsLog.sync`."""
        if self._log is not None:
            self._log.sync()


class _StopSignals:
    """Notes SIGINT and SIGTERM while it is entered; a second one does what it did before.

    Several processes have to stop after the same step: there SIGTERM is JAX's to agree on, and SIGINT ends at once.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _StopSignals:
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def requested(self, step: int) -> bool:
        """Whether the run is to end after this step; the same answer on all processes."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.number = signal.SIGTERM
        return self.number is not None

    def _note(self, number: int, _: Any) -> None:
        self.number = number
        self.__exit__()


def _paths(params: Any) -> list[str]:
    """The sorted paths of a tree's leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sorted(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
