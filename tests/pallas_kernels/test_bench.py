"""The benchmark's harness, on operations small enough for any machine."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case, output_bytes
from pallas_kernels.benchmark.limits import Limits
from pallas_kernels.benchmark.measure import measure
from pallas_kernels.benchmark.table import render
from pallas_kernels.benchmark.timing import _rounds, seconds_in_program
from pallas_kernels.formats import FP8_E8M0, DenseFormat
from pallas_kernels.index_select import BlockSelection
from pallas_kernels.top_k import top_k

LIMITS = Limits(copy_bytes_per_s=1e9, operations_per_s=1e9)


def case(call=lambda arrays: top_k(arrays["scores"], 3), operations: float = 4000.0, torch=None) -> Case:
    def error(arrays, out) -> float:
        return float(np.max(np.abs(np.asarray(out[0]) - np.sort(np.asarray(arrays["scores"]))[..., ::-1][..., :3])))

    return Case(
        operation="top_k",
        name="2 × 50",
        arrays=lambda rng: {"scores": jnp.asarray(rng.standard_normal((2, 50)), jnp.float32)},
        call=call,
        operations=operations,
        bytes=400.0,
        error=error,
        torch=torch,
        note="a note",
    )


def test_a_row_says_time_floor_back_end_and_error():
    row = measure(case(), LIMITS)
    assert row.back_end == "xla"
    assert row.floor_s == 4e-6
    assert row.error == 0
    assert row.seconds > 0
    assert row.of_floor == row.floor_s / row.seconds
    assert not row.failed


def test_a_failure_and_a_case_too_long_are_said_not_raised():
    def broken(arrays):
        raise RuntimeError("out of memory\nsecond line")

    row = measure(case(broken), LIMITS)
    assert row.failed["native"] == "RuntimeError: out of memory"
    assert row.seconds is None
    skipped = measure(case(operations=5e9), LIMITS, longest_floor_s=1)
    assert skipped.failed == {"all": "its floor is 5 s here"}
    text = render([row, skipped], LIMITS, "title")
    assert "no time of native: RuntimeError: out of memory" in text
    assert "no time of all: its floor is 5 s here" in text


def test_how_pytorch_did_an_operation_is_said_once():
    row = dataclasses.replace(measure(case(), LIMITS), torch_s=0.002, torch_note="is given more")
    text = render([dataclasses.replace(row, torch_error=error) for error in (1e-3, 3e-3, None)], LIMITS, "title")
    assert text.count("2.000") == 3
    assert text.count("PyTorch's top_k: is given more; largest error 3.0e-03\n") == 1
    assert "PyTorch's top_k" not in render([dataclasses.replace(row, torch_s=None)], LIMITS, "title")


@pytest.mark.gpu
def test_the_timed_program_makes_every_call_in_every_round():
    """Equal calls on the same arguments: a compiler that may would make only one."""

    def program(x, results):
        return _rounds(lambda arrays: jnp.sort(arrays["x"] @ arrays["x"]), None, 5, [{"x": x}] * 3, results)

    x = jnp.ones((8, 8))
    body, entry = jax.jit(program).lower(x, [x] * 3).compile().as_text().split("\nENTRY ")
    assert " while(" in entry
    assert " sort(" not in entry
    assert body.count(" sort(") == 3


def test_what_is_fed_goes_through_every_call():
    def call(arrays):
        return arrays["pool"] + arrays["step"]

    def feed(arrays, out):
        return arrays | {"pool": out}

    turns = [{"pool": jnp.zeros(()), "step": jnp.float32(step)} for step in (1, 10, 100)]
    assert [float(x) for x in _rounds(call, feed, 4, turns, [jnp.zeros(())] * 3)] == [4, 40, 400]


def test_a_call_in_a_program_takes_time_and_its_result_is_checked():
    x, seen = jnp.ones((300, 300)), []

    def check(result):
        seen.append(float(jnp.mean(result)))

    assert seconds_in_program(lambda arrays: arrays["x"] @ arrays["x"], [{"x": x}], guess_s=1e-3, check=check) > 0
    assert seen == [300]


def test_output_bytes():
    assert output_bytes((jnp.zeros(3), jnp.zeros((2, 2), jnp.uint8))) == 16


def test_the_command_prints_and_writes_its_rows(monkeypatch, tmp_path, capsys):
    module = types.ModuleType("pallas_kernels.top_k.bench")
    module.cases = lambda: [case()]
    monkeypatch.setitem(__import__("sys").modules, "pallas_kernels.top_k.bench", module)
    monkeypatch.setattr("pallas_kernels.benchmark.limits.measure_limits", lambda: LIMITS)
    assert bench.main(["top_k", "--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out
    assert "| top_k | 2 × 50 |" in printed
    assert "a note" in printed
    record = json.loads((tmp_path / "rows.json").read_text())
    assert record["rows"][0]["error"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_an_unknown_operation_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["abacus"])
    assert "abacus" in capsys.readouterr().err


ATTENTION = {"_HEADS": 2, "_WIDTH": 32, "_WINDOW": 8, "_CHOSEN": 16, "_TORCH_QUERIES": 6}
# Products in PyTorch are rounded to bfloat16: an entry as close as that to the last one chosen may be chosen.
INDEX = {"_HEADS": 4, "_WIDTH": 32, "_TOP_K": 32, "_BLOCKS": BlockSelection(8, 16), "_CLOSE": 0.01}
INDEX |= {"_TORCH_PRODUCTS": 2 * 2 * 4 * 1024}
EXPERTS = {"_EXPERTS": 8, "_CHOSEN": 2, "_INNER": 32, "_HIDDEN": 64}


def named(module, text: str) -> Case:
    return next(case for case in module.cases() if text in f"{case.operation}: {case.name}")


@pytest.mark.parametrize(
    ("folder", "sizes", "build", "limit"),
    [
        ("sparse_attention", ATTENTION, lambda bench: bench._case("", 1, 10, 128), 1e-2),
        ("sparse_attention", ATTENTION, lambda bench: bench._case("", 3, 4, 128, rotated=True), 1e-2),
        ("sparse_attention", ATTENTION, lambda bench: bench._case("", 3, 4, 0, rotated=True), 1e-2),
        ("index_select", INDEX, lambda bench: bench._select("", 2, 3, 1024, None), 0),
        ("index_select", INDEX, lambda bench: bench._select("", 2, 3, 1024, bench._BLOCKS), 0),
        ("index_select", INDEX | {"_TORCH_PRODUCTS": 2048}, lambda bench: bench._reselect("", 2, 3, 1024), 0),
        ("paged_memory", {}, lambda bench: named(bench, "paged_append: 64 entries of 512, FP4_E4M3"), 0),
        ("paged_memory", {}, lambda bench: named(bench, "paged_append: 64 entries of 512, FP4_E8M0"), 0),
        ("paged_memory", {}, lambda bench: named(bench, "paged_append: 64 entries of 512, FP8_E8M0"), 0),
        ("paged_memory", {}, lambda bench: named(bench, "paged_gather: 64 entries of 512, FP4_E4M3"), 0),
        ("paged_memory", {}, lambda bench: named(bench, "paged_gather: 64 entries of 512, FP4_E8M0"), 0),
        ("paged_memory", {}, lambda bench: named(bench, "paged_gather: 64 entries of 512, FP8_E8M0"), 0),
        # Equal scores come in any order.
        ("top_k", {}, lambda bench: named(bench, "8 × 131072"), 0.02),
        ("expert_matmul", EXPERTS, lambda bench: bench._case(5, ""), 1e-2),
        ("block_linear", {"_LAYERS": 2}, lambda bench: bench._case(3, (64, 96), ""), 1e-2),
        ("mhc", {"WIDTH": 64}, lambda bench: named(bench, "64 tokens"), 1e-2),
        ("router", {"_EXPERTS": 16, "_HIDDEN": 64}, lambda bench: bench._case(8, ""), 0),
    ],
)
def test_pytorch_gives_the_reference_s_result(monkeypatch, folder, sizes, build, limit):
    pytest.importorskip("torch")
    module = importlib.import_module(f"pallas_kernels.{folder}.bench")
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    small = build(module)
    arrays = small.arrays(np.random.default_rng(0))
    if "visible" in arrays:  # at real sizes nearly everything is
        arrays["visible"] //= 2
    run = small.torch(arrays)
    run()  # a second call gives the same
    error = small.error
    if folder == "expert_matmul":  # its inputs are rounded to float8 before, the last product's are not
        arrays["x"] = FP8_E8M0.round(arrays["x"])
        error = functools.partial(error, activation_fmt=DenseFormat("bfloat16"))
    assert error(arrays, pytorch.arrays(run())) <= limit
