"""tokamax's TPU kernels beside ours, compiled for the same sizes: ``python -m pallas_kernels.benchmark.tokamax``.

Needs tokamax (Python 3.12) and libtpu, and no TPU: programs are compiled ahead of time, nothing is run or timed.
``pallas_kernels/TOKAMAX.md`` says what the two have in common.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from pallas_kernels import backend
from pallas_kernels.expert_matmul import ExpertWeights
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat, Format, Packed
from pallas_kernels.mhc import HyperConnection, Update

CHIPS = ("v6e", "tpu7x")
MIB = 2**20
# Letters of an error's first line, from its end, where compilers name the cause.
_REASON = 90

_Array = jax.ShapeDtypeStruct
_I32, _BF16, _F32, _U8 = jnp.int32, jnp.bfloat16, jnp.float32, jnp.uint8
# The official model: heads, head size, window, entries chosen, index heads and their size, experts, hidden, inner.
_HEADS, _WIDTH, _WINDOW, _CHOSEN, _INDEX_HEADS, _INDEX_WIDTH = 64, 512, 128, 512, 32, 128
_EXPERTS, _PER_ROW, _HIDDEN, _INNER, _COPIES, _GROUPS, _LOW_RANK = 384, 6, 5120, 2304, 4, 8, 1024
# Entries of the pools, and of a request's table.
_ENTRIES, _PAGE, _REACH = 2**20, 64, 2**16
# Of an indexer's page there: its tokens lie along the lanes.
_THEIR_INDEX_PAGE = 256


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays.

    Attributes:
      run: takes the arrays as keywords or, if ``arrays`` is a tuple, by position.
      arrays: shapes and dtypes.
      refused: why a chip cannot run it, None if it can; called with the device where tracing knows which it is.
    """

    run: Callable
    arrays: dict[str, Any] | tuple
    refused: Callable[[jax.Device], str | None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of work: ours, and theirs as far as it is the same (``differs``)."""

    name: str
    ours: Program
    theirs: Program
    differs: str


def _ours(operation: str, arrays: dict[str, Any], **static: Any) -> Program:
    function = functools.partial(backend.implementation(operation, "tpu"), **static)
    return Program(function, arrays, lambda device: backend.unsupported(operation, "tpu", **arrays, **static))


def _theirs(name: str, run: Callable, *arrays: _Array) -> Program:
    """tokamax's operator of that name; ``run`` gets it and the arrays."""
    kind = getattr(importlib.import_module("tokamax.ops.tpu"), name)
    # The process has no TPU to check for; whether this chip is one of its own is asked below.
    operator = kind(bypass_device_check=True)
    refused = lambda device: None if operator.supported_on(device) else "not offered on this chip"  # noqa: E731
    return Program(functools.partial(run, operator), arrays, refused)


def _packed(fmt: Format, shape: tuple[int, ...], width: int) -> Packed:
    return jax.eval_shape(lambda: fmt.zeros(shape, width))


def _attention(batch: int, queries: int) -> Case:
    rows, tokens, pages = _WINDOW + queries, batch * queries, _ENTRIES // _PAGE
    queries_there = _Array((tokens, _HEADS, _WIDTH), _BF16)
    sums = _Array((tokens, _HEADS), _F32)
    ours = _ours(
        "sparse_attention",
        {
            "queries": _Array((batch, queries, _HEADS, _WIDTH), _BF16),
            "local": _packed(FP8_E8M0, (batch, rows), _WIDTH),
            "local_valid": _Array((batch, rows), jnp.bool_),
            "pool": _packed(FP4_E4M3, (pages, _PAGE), _WIDTH),
            "page_table": _Array((batch, _REACH // _PAGE), _I32),
            "indices": _Array((batch, queries, _CHOSEN), _I32),
            "sink": _Array((_HEADS,), _F32),
        },
        local_fmt=FP8_E8M0,
        pool_fmt=FP4_E4M3,
        window=_WINDOW,
        scale=_WIDTH**-0.5,
        probability_dtype=jnp.dtype(_BF16),
    )
    theirs = _theirs(
        "SparseMla",
        lambda operator, *arrays: operator(*arrays, sm_scale=_WIDTH**-0.5),
        queries_there,
        _Array((pages, _PAGE, 128), _I32),
        _Array((pages, _PAGE // 4, 128), _I32),
        _Array((tokens, _CHOSEN), _I32),
        _Array((batch * _REACH // _PAGE,), _I32),
        _Array((batch + 1,), _I32),
        _Array((3,), _I32),
        _Array((_HEADS,), _F32),
        queries_there,
        sums,
        sums,
    )
    return Case(f"attention, {batch} × {queries} queries", ours, theirs, "FP8/bf16 entries; given the window's sums")


def _indexer(batch: int, queries: int) -> Case:
    tokens = batch * queries
    ours = _ours(
        "index_select",
        {
            "queries": _Array((batch, queries, _INDEX_HEADS, _INDEX_WIDTH), _F32),
            "weights": _Array((batch, queries, _INDEX_HEADS), _F32),
            "pool": _packed(FP4_E8M0, (_ENTRIES // _PAGE, _PAGE), _INDEX_WIDTH),
            "page_table": _Array((batch, _REACH // _PAGE), _I32),
            "visible": _Array((batch, queries), _I32),
        },
        fmt=FP4_E8M0,
        top_k=_CHOSEN,
    )
    theirs = _theirs(
        "LightningIndexer",
        lambda operator, *arrays: operator(*arrays, k=_CHOSEN, kv_layout="seq_along_lane"),
        _Array((tokens, _INDEX_HEADS, _INDEX_WIDTH), _BF16),
        _Array((tokens, _INDEX_HEADS), _F32),
        _Array((_ENTRIES // _THEIR_INDEX_PAGE, _INDEX_WIDTH // 4 + 1, 4, _THEIR_INDEX_PAGE), _U8),
        _Array((batch,), _I32),
        _Array((batch * _REACH // _THEIR_INDEX_PAGE,), _I32),
        _Array((batch + 1,), _I32),
        _Array((3,), _I32),
    )
    return Case(f"index top-k, {batch} × {queries} queries", ours, theirs, "FP8 keys, bf16 queries")


def _top_k(rows: int, entries: int, k: int) -> Case:
    scores = _Array((rows, entries), _F32)
    theirs = _theirs("TopK", lambda operator, x: operator(x, k, return_scores=True), scores)
    return Case(f"top-{k} of {rows} × {entries}", _ours("top_k", {"scores": scores}, k=k), theirs, "order of ±0")


def _mhc(rows: int) -> Case:
    mixes = _COPIES * (_COPIES + 2)
    post, comb = _Array((rows, _COPIES), _F32), _Array((rows, _COPIES, _COPIES), _F32)
    fn, base, scale = (_Array(shape, _F32) for shape in ((mixes, _COPIES * _HIDDEN), (mixes,), (3,)))
    y = _Array((rows, _HIDDEN), _BF16)
    ours = _ours(
        "mhc",
        {
            "streams": _Array((rows, _COPIES, _HIDDEN), _BF16),
            "mix": post,
            "connection": HyperConnection(fn, base, scale),
            "norm_weight": _Array((_HIDDEN,), _BF16),
            "update": Update(y, post, comb),
        },
        norm_eps=1e-20,
        eps=1e-6,
        iterations=20,
    )
    theirs = _theirs(
        "MhcFusedPostPre",
        lambda operator, *arrays: operator(*arrays, 1e-20, 1e-6, 1e-6, 2.0, 20),
        *(y, _Array((rows, _COPIES * _HIDDEN), _BF16), post, comb, fn, scale, base),
    )
    return Case(f"hyper-connection, {rows} rows", ours, theirs, "mixed by the new pre, no norm")


def _output_map(rows: int) -> Case:
    width, out = _HEADS * _WIDTH // _GROUPS, _GROUPS * _LOW_RANK
    arrays = {
        "x": _Array((rows, _HEADS * _WIDTH), _BF16),
        "weight": _Array((out, width), jnp.float8_e4m3fn),
        "scale": _Array((out // 32, width // 32), _U8),
    }
    theirs = _theirs(
        "GroupedLowrankProj",
        lambda operator, *arrays: operator(*arrays, quantize_activations=False),
        _Array((rows, _HEADS, _WIDTH), _BF16),
        _Array((rows,), _I32),
        _Array((_REACH, 64), _F32),
        _Array((width, out), jnp.float8_e4m3fn),
        _Array((out,), _F32),
    )
    ours = _ours("block_linear", arrays, activation_fmt=DenseFormat("bfloat16"), groups=_GROUPS)
    return Case(f"grouped output map, {rows} rows", ours, theirs, "turns heads back; a scale a column")


def _experts(rows: int) -> Case:
    def matrix(out: int, width: int) -> ExpertWeights:
        return ExpertWeights(*_packed(FP4_E8M0, (_EXPERTS, out), width))

    def product(operator: Callable, x: jax.Array, codes: jax.Array, scales: jax.Array, sizes: jax.Array) -> jax.Array:
        from qwix import QArray  # tokamax brings it

        return operator(x, QArray(qvalue=codes, scale=scales), group_sizes=sizes)

    arrays = {
        "x": _Array((rows, _HIDDEN), _BF16),
        "expert_ids": _Array((rows, _PER_ROW), _I32),
        "expert_weights": _Array((rows, _PER_ROW), _F32),
        "w1": matrix(_INNER, _HIDDEN),
        "w3": matrix(_INNER, _HIDDEN),
        "w2": matrix(_HIDDEN, _INNER),
    }
    theirs = _theirs(
        "V2RaggedDot",
        product,
        _Array((rows * _PER_ROW, _HIDDEN), _BF16),
        _Array((_EXPERTS, _HIDDEN, _INNER), jnp.float4_e2m1fn),
        _Array((_EXPERTS, _HIDDEN // 32, _INNER), _F32),
        _Array((_EXPERTS,), _I32),
    )
    ours = _ours("expert_matmul", arrays, limit=10.0, activation_fmt=FP8_E8M0)
    return Case(f"experts, {rows} rows", ours, theirs, "one of the three products, rows sorted before")


# Functions, so that tokamax is imported only where it is installed.
CASES: tuple[Callable[[], Case], ...] = (
    functools.partial(_attention, 1, 1024),
    functools.partial(_attention, 64, 1),
    functools.partial(_indexer, 1, 1024),
    functools.partial(_indexer, 64, 1),
    functools.partial(_top_k, 64, 4096, _CHOSEN),
    functools.partial(_top_k, 2, 2**20, _CHOSEN),
    functools.partial(_mhc, 1024),
    functools.partial(_output_map, 1024),
    functools.partial(_experts, 1024),
)


def compiled(program: Program, chip: str) -> Any:
    """The program for one core of a chip.

    Raises:
      NotImplementedError: the kernel says itself that it does not run these arguments or this chip.
    """
    device = topologies.get_topology_desc(f"{chip}:2x2x1", platform="tpu").devices[0]
    kind = jax.sharding.Mesh(np.array([device]), ("chip",)).abstract_mesh.abstract_device
    # Tracing learns from the mesh which chip it is for; Auto, since kernels reshape arrays as they like.
    axes = (jax.sharding.AxisType.Auto,)
    where = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda a: _Array(a.shape, a.dtype, sharding=where), program.arrays)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), axes, abstract_device=kind)):
        reason = program.refused(device)
        if reason is not None:
            raise NotImplementedError(reason)
        run = jax.jit(program.run)
        traced = run.trace(**placed) if isinstance(placed, dict) else run.trace(*placed)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def describe(program: Program, chip: str) -> tuple[list[str], str]:
    """Cells and what went wrong, if anything did.

    The cells: MiB of arguments, of temporaries in HBM and of VMEM that the greediest kernel may take, and kernels.
    """
    try:
        result = compiled(program, chip)
    except Exception as error:  # whatever a library raises is what the table has to say
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ["–"] * 4, reason[-_REASON:].replace("|", "/")
    memory, text = result.memory_analysis(), result.as_text()
    scoped = re.findall(r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', text)
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, max(map(int, scoped), default=0))
    cells = [f"{size / MIB:.0f}" if size >= 10 * MIB else f"{size / MIB:.1f}" for size in sizes]
    return [*cells, str(text.count('custom_call_target="tpu_custom_call"'))], ""


def row(case: Case, chip: str) -> str:
    """A line of the table: ours / tokamax."""
    (ours, failed), (theirs, refused) = describe(case.ours, chip), describe(case.theirs, chip)
    pairs = [f"{a} / {b}" for a, b in zip(ours, theirs, strict=True)]
    notes = [f"ours: {failed}"] if failed else []
    notes.append(f"tokamax: {refused}" if refused else case.differs)
    return f"| {' | '.join([case.name, chip, *pairs, '; '.join(notes)])} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.benchmark.tokamax", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--chips", nargs="+", default=CHIPS, metavar="CHIP", help=f"default: {' '.join(CHIPS)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    args = parser.parse_args(arguments)
    missing = [name for name in ("tokamax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    jax.config.update("jax_platforms", "cpu")  # where tracing runs, also beside a TPU
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu", "tokamax")]
    print(f"{datetime.date.today().isoformat()}, {', '.join(versions)}\n")
    print("| ours / tokamax | chip | arguments MiB | temporaries MiB | VMEM MiB | kernels | tokamax's differs in |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for build in CASES:
        case = build()
        if args.only not in case.name:
            continue
        for chip in args.chips:
            print(row(case, chip), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
