"""Every TPU kernel compiles ahead of time for every supported chip at the official model's shapes, without a TPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import backend
from pallas_kernels.expert_matmul import ExpertWeights
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat, Format, Packed
from pallas_kernels.index_select import BlockSelection
from pallas_kernels.mhc import HyperConnection, Update

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_aot

CHIPS = ("v5p", "v6e", "tpu7x")

_Array = jax.ShapeDtypeStruct
_I32, _BF16, _F32 = jnp.int32, jnp.bfloat16, jnp.float32
# Large enough that a copy of a pool shows beside the queries: 2^22 main entries are 1.1 GiB.
_MAIN_PAGES = 65536
_PAGES, _PAGE_ENTRIES, _WIDTH, _WINDOW = 16384, 64, 512, 128


def _packed(fmt: Format, shape: tuple[int, ...], width: int) -> Packed:
    return jax.eval_shape(lambda: fmt.zeros(shape, width))


def _attention(
    batch: int, queries: int, *, fmt: Format = FP4_E4M3, rotated: bool = False, pool: bool = True, part: bool = False
):
    rows = _WINDOW + queries
    arrays = {
        "queries": _Array((batch, queries, 64, _WIDTH), _BF16),
        "local": _packed(FP8_E8M0, (batch, rows), _WIDTH),
        "local_valid": _Array((batch, rows), jnp.bool_),
        "pool": _packed(fmt, (_MAIN_PAGES, _PAGE_ENTRIES), _WIDTH) if pool else None,
        "page_table": _Array((batch, 256), _I32) if pool else None,
        "indices": _Array((batch, queries, 512), _I32) if pool else None,
        "sink": _Array((64,), _F32),
        "rotation": _Array((batch,), _I32) if rotated else None,
    }
    static = {"local_fmt": FP8_E8M0, "pool_fmt": fmt, "window": _WINDOW, "scale": _WIDTH**-0.5}
    return arrays, static | {"probability_dtype": jnp.dtype(_BF16), "return_partial": part}


def _memory(batch: int, group: int, fmt: Format = FP4_E4M3):
    arrays = {
        "pool": _packed(fmt, (_MAIN_PAGES, _PAGE_ENTRIES), _WIDTH),
        "page_table": _Array((batch, 256), _I32),
        "start": _Array((batch,), _I32),
        "count": _Array((batch,), _I32),
        "values": _Array((batch, group, _WIDTH), _BF16),
    }
    return arrays, {"fmt": fmt}


def _gathered(batch: int, entries: int, fmt: Format = FP4_E4M3):
    arrays = {
        "pool": _packed(fmt, (_MAIN_PAGES, _PAGE_ENTRIES), _WIDTH),
        "page_table": _Array((batch, 256), _I32),
        "indices": _Array((batch, entries), _I32),
    }
    return arrays, {"fmt": fmt, "dtype": jnp.dtype(_BF16)}


def _scores(shape: tuple[int, ...], k: int):
    return {"scores": _Array(shape, _F32)}, {"k": k}


def _experts(rows: int, inner: int = 2304):
    def matrix(out: int, width: int) -> ExpertWeights:
        return ExpertWeights(*_packed(FP4_E8M0, (384, out), width))

    arrays = {
        "x": _Array((rows, 5120), _BF16),
        "expert_ids": _Array((rows, 6), _I32),
        "expert_weights": _Array((rows, 6), _F32),
        "w1": matrix(inner, 5120),
        "w3": matrix(inner, 5120),
        "w2": matrix(5120, inner),
    }
    return arrays, {"limit": 10.0, "activation_fmt": FP8_E8M0}


def _indexer(batch: int, queries: int, pages: int):
    arrays = {
        "queries": _Array((batch, queries, 32, 128), _F32),
        "weights": _Array((batch, queries, 32), _F32),
        "pool": _packed(FP4_E8M0, (_PAGES, _PAGE_ENTRIES), 128),
        "page_table": _Array((batch, pages), _I32),
        "visible": _Array((batch, queries), _I32),
    }
    return arrays, {"fmt": FP4_E8M0, "top_k": 512}


def _select(*shape: int):
    arrays, static = _indexer(*shape)
    return arrays, static | {"blocks": BlockSelection(8, 2048)}


def _reselect(batch: int, queries: int, pages: int):
    arrays, static = _indexer(batch, queries, pages)
    return arrays | {"block_ids": _Array((batch, queries, 2048), _I32)}, static | {"block_size": 8}


def _linear(rows: int, out: int, width: int):
    arrays = {
        "x": _Array((1, rows, width), _BF16),
        "weight": _Array((out, width), jnp.float8_e4m3fn),
        "scale": _Array((out // 32, width // 32), jnp.uint8),
    }
    return arrays, {"activation_fmt": FP8_E8M0}


def _boundary(rows: int, *, updates: bool = True):
    update = Update(_Array((1, rows, 5120), _BF16), _Array((1, rows, 4), _F32), _Array((1, rows, 4, 4), _F32))
    arrays = {
        "streams": _Array((1, rows, 4, 5120), _BF16),
        "mix": _Array((1, rows, 4), _F32),
        "connection": HyperConnection(_Array((24, 4 * 5120), _F32), _Array((24,), _F32), _Array((3,), _F32)),
        "norm_weight": _Array((5120,), _BF16),
        "update": update if updates else None,
    }
    return arrays, {"norm_eps": 1e-20, "eps": 1e-6, "iterations": 20}


# Name of the case -> operation, and a function that gives its arrays (shapes and dtypes) and its static arguments.
CASES: dict[str, tuple[str, Callable[[], tuple[dict, dict]]]] = {
    "attention, prefill": ("sparse_attention", functools.partial(_attention, 1, 1024)),
    "attention, window only": ("sparse_attention", functools.partial(_attention, 1, 1024, pool=False)),
    "attention, decode": ("sparse_attention", functools.partial(_attention, 64, 1, rotated=True)),
    "attention, draft": ("sparse_attention", functools.partial(_attention, 64, 6, rotated=True)),
    "attention, bfloat16 pool": (
        "sparse_attention",
        functools.partial(_attention, 1, 1024, fmt=DenseFormat("bfloat16")),
    ),
    "attention, part of a context": ("sparse_attention", functools.partial(_attention, 64, 1, rotated=True, part=True)),
    "append, decode": ("paged_append", functools.partial(_memory, 64, 2)),
    "append, prefill": ("paged_append", functools.partial(_memory, 1, 256)),
    "gather": ("paged_gather", functools.partial(_gathered, 64, 512)),
    "top-k, many rows": ("top_k", functools.partial(_scores, (64, 4096), 512)),
    "top-k, longest row": ("top_k", functools.partial(_scores, (2, 2**20), 4096)),
    "experts, one row": ("expert_matmul", functools.partial(_experts, 1)),
    "experts, prefill": ("expert_matmul", functools.partial(_experts, 1024)),
    # Two devices share every expert.
    "experts, half of each": ("expert_matmul", functools.partial(_experts, 64, 1152)),
    "select, short context": ("index_select", functools.partial(_select, 64, 1, 64)),
    "select, draft": ("index_select", functools.partial(_select, 64, 6, 256)),
    "select, prefill": ("index_select", functools.partial(_select, 1, 1024, 1024)),
    "reselect, draft": ("index_reselect", functools.partial(_reselect, 64, 6, 256)),
    "reselect, prefill": ("index_reselect", functools.partial(_reselect, 1, 1024, 1024)),
    "linear, decode": ("block_linear", functools.partial(_linear, 64, 1280, 5120)),
    "linear, half of an expert": ("block_linear", functools.partial(_linear, 64, 1152, 5120)),
    "linear, prefill": ("block_linear", functools.partial(_linear, 1024, 5120, 8192)),
    "boundary, decode": ("mhc", functools.partial(_boundary, 64)),
    "boundary, prefill": ("mhc", functools.partial(_boundary, 1024)),
    "boundary without update": ("mhc", functools.partial(_boundary, 1000, updates=False)),
}


@functools.cache
def _chip(name: str) -> tuple[jax.Device, jax.sharding.AbstractMesh]:
    """One core of the chip, and a mesh that tells tracing which chip it is."""
    # Test processes run side by side, and none of them has a TPU to share.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    device = topologies.get_topology_desc(f"{name}:2x2x1", platform="tpu").devices[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    kind = mesh.abstract_mesh.abstract_device
    return device, jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=kind)


def compile_for(chip: str, operation: str, arrays: dict, static: dict, donate: str | None = None):
    """The operation's TPU kernel, compiled; ``donate`` names an array whose buffer it may write to."""
    device, mesh = _chip(chip)
    where = jax.sharding.SingleDeviceSharding(device)
    arrays = jax.tree.map(lambda a: _Array(a.shape, a.dtype, sharding=where), arrays)
    function = backend.implementation(operation, "tpu")
    with jax.sharding.use_abstract_mesh(mesh):
        reason = backend.unsupported(operation, "tpu", **arrays, **static)
        assert reason is None, reason
        run = jax.jit(functools.partial(function, **static), donate_argnames=donate)
        return run.trace(**arrays).lower(lowering_platforms=("tpu",)).compile()


# What takes seconds to compile, and the chip that it is compiled for unless every one is asked for (--every-chip, as
# continuous integration does); None: only then. Of each operation one case at least, the one that compiles soonest, but
# of reselection, whose sort takes longest.
LONG: dict[str, str | None] = {
    "attention, prefill": None,
    "attention, decode": "v5p",
    "attention, draft": None,
    "attention, bfloat16 pool": None,
    "attention, part of a context": None,
    "append, decode": "v6e",
    "experts, one row": "tpu7x",
    "experts, prefill": None,
    "experts, half of each": None,
    "gather": "v6e",
    "select, short context": "v6e",
    "select, draft": None,
    "select, prefill": None,
    "reselect, draft": None,
    "reselect, prefill": None,
    "linear, decode": "tpu7x",
    "linear, half of an expert": "v5p",
    "linear, prefill": None,
    "boundary, decode": "tpu7x",
    "boundary, prefill": "v5p",
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", CASES)
def test_it_compiles_and_copies_no_pool(case: str, chip: str, request: pytest.FixtureRequest):
    if LONG.get(case, chip) != chip and not request.config.getoption("--every-chip"):
        pytest.skip(f"compiled for {LONG[case] or 'no chip'} without --every-chip")
    operation, arguments = CASES[case]
    arrays, static = arguments()
    donate = "pool" if operation == "paged_append" else None
    compiled = compile_for(chip, operation, arrays, static, donate)
    assert "tpu_custom_call" in compiled.as_text()
    if arrays.get("pool") is not None:
        pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays["pool"]))
        memory = compiled.memory_analysis()
        # Index keys have rows narrower than the lanes: a call lays them out anew, padded, and holds scores besides.
        assert memory.temp_size_in_bytes < (pool / 4 if arrays["pool"].payload.shape[2] >= 128 else 10 * pool)
        if donate:
            assert memory.alias_size_in_bytes >= pool
