"""Seconds a call, without the host's part."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_SAMPLES = 5
_SAMPLE_S = 0.05
# A program's length, that the host asks for the next one in time, its most calls, and how many its loop spells out.
_PROGRAM_S, _MOST_CALLS, _TURNS = 5e-3, 512, 16


def seconds(f: Callable, argument_sets: Sequence[tuple[Any, ...]], wait: Callable = jax.block_until_ready) -> float:
    """Median seconds of a call that the host makes.

    Calls are queued one after another and only the last is waited for, so that the device never idles between them
    unless a call is shorter than the host needs to ask for it (about 40 µs): then see :func:`seconds_in_program`.

    Args:
      f: what is timed; its work is asynchronous.
      argument_sets: arguments that calls take in turn.
      wait: blocks until a result of ``f`` is there.
    """
    for arguments in argument_sets:
        wait(f(*arguments))

    def calls(count: int) -> None:
        for i in range(count):
            out = f(*argument_sets[i % len(argument_sets)])
        wait(out)

    return _sampled(calls, most=200)


def seconds_in_program(
    call: Callable[[Any], Any],
    sets: Sequence[Any],
    feed: Callable[[Any, Any], Any] | None = None,
    *,
    guess_s: float,
    turns: int = _TURNS,
    check: Callable[[Any], Any] = lambda result: None,
) -> float:
    """Median seconds of a call inside a compiled program that makes many, as a model's step does.

    The program is a loop over the sets. An optimisation barrier, which moves and computes nothing, makes a call depend
    on the one before, so that the compiler neither drops nor hoists it. XLA drops barriers early on CPUs: not there.

    Args:
      call: what is timed, on one set.
      sets: arguments that calls take in turn; at least two if there is a ``feed``.
      feed: for calls that update a part of their arguments in place: a set's next arguments, from the set and its
        last result. Without it arguments are only read.
      guess_s: about what a call takes; short calls are made in larger programs.
      turns: most calls that the loop's body spells out, beyond one of each set. More hide the host's part of a round
        and take longer to compile.
      check: is given the result on the first set.
    """
    # Traced once, not at every turn.
    call = jax.jit(call)
    calls = int(min(max(_PROGRAM_S / guess_s, 2), _MOST_CALLS))
    # Two results at least are kept: each call passes the others' on, which makes it depend on them.
    cycle = [sets[i % len(sets)] for i in range(max(len(sets), min(calls, turns)))]
    rounds = max(calls // len(cycle), 1)
    # Only their shapes matter, unless they are fed: then they are updated.
    results = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), [jax.eval_shape(call, a) for a in cycle])
    program = jax.jit(functools.partial(_rounds, call, feed, rounds), donate_argnums=1)
    results = jax.block_until_ready(program(cycle, results))
    check(results[0])

    def runs(count: int) -> None:
        nonlocal results
        for _ in range(count):
            results = program(cycle, results)
        jax.block_until_ready(results)

    return _sampled(runs, most=50) / (rounds * len(cycle))


def _sampled(run: Callable[[int], None], most: int) -> float:
    """Median seconds of one of the runs that ``run`` makes, of which it waits for the last; at most so many at once."""
    begin = time.perf_counter()
    run(1)
    once = max(time.perf_counter() - begin, 1e-6)
    count = min(max(int(_SAMPLE_S / once), 1), most)
    samples = []
    for _ in range(_SAMPLES if once < 1 else 1):
        begin = time.perf_counter()
        run(count)
        samples.append((time.perf_counter() - begin) / count)
    return statistics.median(samples)


def _rounds(call: Callable, feed: Callable | None, rounds: int, cycle: list, results: list) -> list:
    def once_each(_, results: list) -> list:
        results = list(results)
        for i, arguments in enumerate(cycle):
            if feed is not None:
                arguments = feed(arguments, results[i])
            arguments, others = lax.optimization_barrier((arguments, results[:i] + results[i + 1 :]))
            results = [*others[:i], call(arguments), *others[i:]]
        return results

    return lax.fori_loop(0, rounds, once_each, results)
