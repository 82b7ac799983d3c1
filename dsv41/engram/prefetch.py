"""Look-ups in the background: started when a step's tokens are known, fetched when the step needs the rows."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from dsv41.engram.tables import EngramTable, check_ids
from dsv41.layers.engram import EngramRows
from pallas_kernels.formats import Packed

_POLL_S = 1e-4


@dataclasses.dataclass(frozen=True)
class Lookups:
    """What look-ups have cost so far. Times in seconds.

    Attributes:
      steps: tickets fetched.
      rows_asked: rows that positions wanted.
      rows_read: rows looked up, each once a step and table.
      bytes_read: bytes of these.
      lookup_s: from the start of a step's look-ups to their end. Of a table on the device it is the time to put the
        gather into its queue.
      hidden_s: the part of it during which the caller did something else, or the device still ran what precedes.
      waited_s: the rest: the step stood still.
    """

    steps: int = 0
    rows_asked: int = 0
    rows_read: int = 0
    bytes_read: int = 0
    lookup_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: Lookups) -> Lookups:
        return Lookups(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


class Prefetcher:
    """Reads rows of several tables in threads of its own, each row once a step. Close it, or use it as a context.

    A step's rows lie in arrays that were made for it and are never written again, so any number of steps may be in
    flight: reused staging buffers would be overwritten while the device still reads them.

    Args:
      tables: by Engram layer.
    """

    def __init__(self, tables: Mapping[int, EngramTable]) -> None:
        self._tables = dict(tables)
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, len(self._tables)), "engram")
        self._lock = threading.Lock()
        self._total = Lookups()

    def start(self, ids: Mapping[int, np.ndarray]) -> Ticket:
        """Begins to look up the rows of a step.

        Args:
          ids: by layer, int ``[...]``; they may be changed as soon as the call returns.

        Raises:
          IndexError: an id that is no row of its table.
          KeyError: a layer without table.
        """
        begin, own = time.perf_counter(), {}
        for layer, wanted in ids.items():
            check_ids(wanted, self._tables[layer].rows)
            own[layer] = np.array(wanted)
        return Ticket(self, begin, {n: self._pool.submit(_read, self._tables[n], own[n]) for n in own})

    def report(self) -> Lookups:
        """The totals of all tickets that were fetched."""
        with self._lock:
            return self._total

    def reset(self) -> None:
        """Sets the totals back to zero."""
        with self._lock:
            self._total = Lookups()

    def close(self) -> None:
        """Ends the threads; what has started is finished first."""
        self._pool.shutdown()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, step: Lookups) -> None:
        with self._lock:
            self._total += step


class _Read(NamedTuple):
    rows: Packed
    asked: int
    read: int
    nbytes: int
    end: float


def _read(table: EngramTable, ids: np.ndarray) -> _Read:
    unique, place = np.unique(ids, return_inverse=True)
    # Padded to what was asked for, by a row that is read anyway: one compiled shape a step, however many repeat.
    padded = np.pad(unique, (0, ids.size - unique.size), mode="edge")
    found = table.lookup(padded)
    rows = _expand(found, place.reshape(ids.shape).astype(np.int32))
    return _Read(rows, ids.size, unique.size, unique.size * table.row_bytes, time.perf_counter())


@jax.jit
def _expand(found: Packed, place: jax.Array) -> Packed:
    return found.map(lambda leaf: leaf.at[place].get(mode="promise_in_bounds"))


class Ticket:
    """A step's look-ups on their way; made by :meth:`Prefetcher.start`."""

    def __init__(
        self, prefetcher: Prefetcher, begin: float, reads: dict[int, concurrent.futures.Future[_Read]]
    ) -> None:
        self._prefetcher, self._begin, self._reads = prefetcher, begin, reads

    def result(self, behind: jax.Array | None = None) -> EngramRows:
        """Waits for the rows. To be called once: the totals count each call as a step.

        Args:
          behind: an output of what the device runs in the meantime (the layers before the first Engram, the chunk
            before); waiting counts as hidden until it is there. None: all waiting counts.
        """
        pending, stalled = list(self._reads.values()), time.perf_counter() if behind is None else None
        while pending:
            if stalled is None and behind.is_ready():
                stalled = time.perf_counter()
            pending = list(concurrent.futures.wait(pending, timeout=_POLL_S if stalled is None else None).not_done)
        reads = {layer: future.result() for layer, future in self._reads.items()}
        end = max((read.end for read in reads.values()), default=self._begin)
        lookup_s = end - self._begin
        waited_s = min(max(0.0, end - stalled), lookup_s) if stalled is not None else 0.0
        self._prefetcher._add(
            Lookups(
                steps=1,
                rows_asked=sum(read.asked for read in reads.values()),
                rows_read=sum(read.read for read in reads.values()),
                bytes_read=sum(read.nbytes for read in reads.values()),
                lookup_s=lookup_s,
                hidden_s=lookup_s - waited_s,
                waited_s=waited_s,
            )
        )
        return {layer: read.rows for layer, read in reads.items()}
