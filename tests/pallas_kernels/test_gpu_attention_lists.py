"""The rows that a query attends to on GPUs: the PTX that lists them, run thread by thread, against XLA's list."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import FP4_E4M3, FP8_E8M0
from pallas_kernels.sparse_attention import gpu_lists
from pallas_kernels.sparse_attention.gpu_rows import pool_source, window_source
from tests.pallas_kernels.base import ptx
from tests.pallas_kernels.base.sparse_attention import WINDOW, case

SEEN, USED = 256, 64


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("chosen", [0, 7, 130])
def test_lists_are_xlas(rotated: bool, chosen: int):
    threads = 96  # fewer than places, and in one case more
    arrays = case(FP8_E8M0, FP4_E4M3, queries=3, chosen=max(chosen, 1))
    pool, table, indices = arrays["pool"], np.asarray(arrays["page_table"]), np.asarray(arrays["indices"])
    valid = np.asarray(arrays["local_valid"])
    indices = np.where(np.random.default_rng(3).random(indices.shape) < 0.2, 10**9, indices).astype(np.int32)
    rotation = np.array([4, valid.shape[1] - 1], np.int32) if rotated else None
    shape = gpu_lists.Lists(WINDOW, valid.shape[1])
    if chosen:
        shape = gpu_lists.Lists(WINDOW, valid.shape[1], chosen, table.shape[1], *pool.payload.shape[:2])

    order = None if rotation is None else jnp.asarray(rotation)
    lists = [window_source(arrays["local"], FP8_E8M0, jnp.asarray(valid), order, WINDOW, jnp.float32, 64).seen]
    if chosen:
        lists.append(pool_source(pool, FP4_E4M3, jnp.asarray(table), jnp.asarray(indices), jnp.float32, 64).seen)
    wanted = np.concatenate(lists, axis=1).reshape(2, 3, -1)

    program = gpu_lists._ptx(shape, threads)
    device = valid.tobytes().ljust(128, b"\1") + indices.tobytes() + table.tobytes()
    for request in range(2):
        for query in range(3):
            oldest = (query + 1 + (0 if rotation is None else int(rotation[request]))) % valid.shape[1]
            mine = 128 + indices[0, 0].nbytes * (3 * request + query)
            operands = [request, oldest, SEEN, USED, 0, mine, 128 + indices.nbytes]
            largest: dict[int, int] = {}
            for _ in range(2):
                memory = ptx.Memory(device, rewritable=(USED,), largest=largest)
                for thread in range(threads):
                    ptx.run(program, operands, thread, memory)
            used = memory.shared.pop(USED)
            seen = np.array([memory.shared.pop(SEEN + 4 * n) for n in range(64 * shape.tiles)], np.uint32)
            assert not memory.shared
            seen = seen.view(np.int32)
            np.testing.assert_array_equal(seen, wanted[request, query])
            assert used == max(np.flatnonzero(seen >= 0), default=-1) + 1
