"""Seconds a call, without the host's part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

_SAMPLES = 5
_SAMPLE_S = 0.05


def seconds(f: Callable, argument_sets: Sequence[tuple[Any, ...]], wait: Callable = jax.block_until_ready) -> float:
    """Median seconds of a call.

    Calls are queued one after another and only the last is waited for, so that the device never idles between them.

    Args:
      f: what is timed; its work is asynchronous.
      argument_sets: arguments that calls take in turn.
      wait: blocks until a result of ``f`` is there.
    """
    for arguments in argument_sets:
        wait(f(*arguments))
    begin = time.perf_counter()
    wait(f(*argument_sets[0]))
    once = max(time.perf_counter() - begin, 1e-6)
    count = min(max(int(_SAMPLE_S / once), 1), 200)
    samples = []
    for _ in range(_SAMPLES if once < 1 else 1):
        begin = time.perf_counter()
        for i in range(count):
            out = f(*argument_sets[i % len(argument_sets)])
        wait(out)
        samples.append((time.perf_counter() - begin) / count)
    return statistics.median(samples)
