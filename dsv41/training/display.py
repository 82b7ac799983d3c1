"""What a run shows of itself: a progress bar on a terminal, a line every so many steps elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Shown if the step reports them, in this order.
_SHOWN = ("loss", "cross_entropy", "gradient_norm", "learning_rate", "max_load")


class Display:
    """Shows steps on standard output; a context manager. One that is not the leader's is silent."""

    def __init__(self, first: int, steps: int, log_every: int, leads: bool = True) -> None:
        """
        Args:
          first: steps that are done already.
          steps: how many there will be.
          log_every: steps from one line to the next, without a terminal.
          leads: whether this process is the one that prints.
        """
        self._console = Console(quiet=not leads, highlight=False, soft_wrap=True)
        self._steps, self._log_every, self._wall = steps, log_every, None
        self._bar = None
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, wall: float, metrics: Mapping[str, Any]) -> None:
        """Shows a step that is done; ``wall`` is in seconds, since any one moment."""
        parts = [f"{name} {float(metrics[name]):.4g}" for name in _SHOWN if name in metrics]
        # The first step compiles, and so its rate would say nothing.
        if self._wall is not None and wall > self._wall:
            rate = 1 / (wall - self._wall)
            unit = "tokens/s" if "tokens" in metrics else "steps/s"
            parts.append(f"{rate * float(metrics.get('tokens', 1)):,.0f} {unit}")
        self._wall = wall
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=" · ".join(parts))
        elif step % self._log_every == 0 or step == self._steps:
            self._print(f"step {step}/{self._steps}", parts)
        if "held_out" in metrics:
            held_out = [f"{name} {float(value):.4g}" for name, value in metrics["held_out"].items()]
            self._print(f"step {step}/{self._steps} held out", held_out)
            self._wall = None  # evaluating took its time too

    def note(self, text: str) -> None:
        """Shows a message."""
        self._console.print(text, markup=False)

    def _print(self, head: str, parts: list[str]) -> None:
        self._console.print(" · ".join((head, *parts)), markup=False)
