"""Expert parallelism: gathering and exchanging rows, against all experts on one device."""

from __future__ import annotations

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies

from dsv41.planning.compiled import topology_devices
from dsv41.planning.schedule import scheduled_collectives
from dsv41.sharding import exchange as exchanging
from dsv41.sharding import experts as dispatching
from dsv41.sharding.exchange import capacity, line_up, rows_of_round, share, slices_of, slots_of_round
from dsv41.sharding.experts import dispatch, over_experts
from dsv41.sharding.mesh import load_preset, parse_preset
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import MeshError
from dsv41.sharding.steps import compiler_options
from pallas_kernels.expert_matmul import ExpertWeights, expert_matmul
from pallas_kernels.formats import FP4_E8M0, DenseFormat

WIDTH, INNER, ROWS, CAPACITY = 16, 8, 48, 5
"""Rows of all devices; rows of a round, few enough that hostile routings take several."""

_ALL = {"batch": ["data", "expert"], "experts": ["data", "expert"]}
_OUTER = {"batch": ["data"], "experts": ["data", "expert"]}
_REPLICATED = {"batch": ["data"]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh and a model's experts."""

    axes: tuple[tuple[str, int], ...]
    experts: int
    chosen: int
    rules: str = ""

    def parallel(self, how: str) -> Parallel:
        rules = {"": {}, "all": _ALL, "outer": _OUTER, "replicated": _REPLICATED}[self.rules]
        preset = parse_preset("test", {"axes": dict(self.axes), "rules": rules, "dispatch": how})
        if preset.devices > len(jax.devices()):
            pytest.skip(f"needs {preset.devices} devices")
        return preset.parallel(jax.devices()[: preset.devices])


CASES = {
    "6 experts on 2, more choices than devices": Case((("expert", 2),), 6, 3),
    "6 experts on 3": Case((("expert", 3),), 6, 2),
    "12 experts on 4, beside tensor": Case((("expert", 4), ("tensor", 2)), 12, 6),
    "12 experts on 2 of data and 3 of expert": Case((("data", 2), ("expert", 3)), 12, 2, "all"),
    "rows divided over the outer of two axes": Case((("data", 2), ("expert", 2)), 8, 3, "outer"),
    "rows replicated": Case((("data", 2), ("expert", 2)), 6, 2, "replicated"),
}


def compute(params, x, experts, weights):
    return expert_matmul(x, experts, weights, *params, limit=10.0, activation_fmt=DenseFormat("float32"))


def parameters(case: Case) -> tuple[ExpertWeights, ...]:
    rng = np.random.default_rng(1)
    shapes = ((case.experts, INNER, WIDTH), (case.experts, INNER, WIDTH), (case.experts, WIDTH, INNER))
    return tuple(ExpertWeights(jnp.asarray(rng.standard_normal(s) * 0.3, jnp.float32), None) for s in shapes)


def routings(case: Case) -> dict[str, np.ndarray]:
    """int32 ``[rows, k]`` by name."""
    rng = np.random.default_rng(0)

    def random(numbers: range) -> np.ndarray:
        return np.stack([rng.permutation(numbers)[: case.chosen] for _ in range(ROWS)])

    own = case.experts // case.parallel("auto").parts("experts")
    some = random(range(case.experts))
    some[rng.random(ROWS) < 0.3] = case.experts
    one = np.full((ROWS, case.chosen), case.experts)
    one[:, -1] = case.experts - 1
    last = np.full((ROWS, case.chosen), case.experts)
    last[:, : min(own, case.chosen)] = case.experts - own + np.arange(min(own, case.chosen))
    names = {"random": random(range(case.experts)), "padded": some, "one expert": one, "one device": last}
    return {name: r.astype(np.int32) for name, r in names.items()} | {
        "nobody": np.full((ROWS, case.chosen), case.experts, np.int32)
    }


def with_gradients(function):
    """Results and gradients of everything differentiable, in one program."""

    def run(params, x, experts, weights, dy):
        y, pull = jax.vjp(lambda p, x, w: function(p, x, experts, w), params, x, weights)
        return y, pull(dy)

    return jax.jit(run)


@functools.cache
def on_one_device(case: Case):
    return with_gradients(compute)


@functools.cache
def on_a_mesh(case: Case, how: str):
    parallel = case.parallel(how)

    def part(params, x, experts, weights):
        y = over_experts(parallel, x, experts, weights, case.experts, compute, params)
        return parallel.sum(y, "expert_mlp")

    up, down = parallel.spec("experts", "expert_mlp"), parallel.spec("experts", None, "expert_mlp")
    rows = parallel.spec("batch")
    matrices = tuple(ExpertWeights(spec, None) for spec in (up, up, down))
    mapped = jax.shard_map(
        part, mesh=parallel.mesh, in_specs=(matrices, rows, rows, rows), out_specs=rows, check_vma=False
    )
    return with_gradients(mapped)


@pytest.fixture(autouse=True)
def several_rounds(monkeypatch):
    """And what a ragged collective leaves in a buffer beyond the rows that came is poison."""
    travel = exchanging._travel

    def spoiled(link: exchanging.Link, packed: jax.Array, sent: jax.Array, due: jax.Array) -> jax.Array:
        came = (jnp.arange(link.capacity) < due[:, None]).reshape(-1, 1)
        poison = jnp.nan if jnp.issubdtype(packed.dtype, jnp.floating) else jnp.iinfo(packed.dtype).max
        return jnp.where(came, travel(link, packed, sent, due), poison)

    monkeypatch.setattr(exchanging, "_travel", spoiled)
    monkeypatch.setattr(dispatching, "capacity", lambda rows, parts, chosen: min(rows, CAPACITY))


@pytest.mark.parametrize(
    ("name", "how"),
    # Nothing travels where all devices have the same rows.
    [(name, how) for name in CASES for how in ("gather", "exchange") if (name, how) != ("rows replicated", "exchange")],
)
def test_a_mesh_gives_the_sums_and_gradients_of_one_device(name: str, how: str):
    case = CASES[name]
    rng = np.random.default_rng(2)
    x, dy = (rng.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(2))
    weights = rng.random((ROWS, case.chosen)).astype(np.float32)
    params = parameters(case)
    for routing, experts in routings(case).items():
        nobody = (experts == case.experts).all(-1)
        wanted, gradients = on_one_device(case)(params, np.where(nobody[:, None], 0, x), experts, weights, dy)
        poisoned = np.where(nobody[:, None], np.nan, x)
        ours, found = on_a_mesh(case, how)(params, poisoned, experts, weights, dy)
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5, err_msg=routing)
        np.testing.assert_array_equal(np.asarray(ours)[nobody], 0)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5), found, gradients)


def test_a_row_does_not_depend_on_who_wants_the_same_device():
    """To the bit, though it travels in other rounds."""
    case = CASES["12 experts on 4, beside tensor"]
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    weights = rng.random((ROWS, case.chosen)).astype(np.float32)
    alone = np.full((ROWS, case.chosen), case.experts, np.int32)
    last = np.arange(ROWS).reshape(4, -1)[:, -1]
    alone[last] = [0, 1, 3, 6, 7, 9]  # on all four devices
    crowded = alone.copy()
    crowded[np.isin(np.arange(ROWS), last, invert=True), :2] = [1, 7]  # their rows fill rounds of two of them
    run = functools.partial(on_a_mesh(case, "exchange"), parameters(case), x)
    quiet, busy = (np.asarray(run(experts, weights, np.zeros_like(x))[0]) for experts in (alone, crowded))
    assert np.abs(quiet[last]).min() > 0
    np.testing.assert_array_equal(quiet[last], busy[last])


def test_packed_experts_of_several_layers_lie_where_they_are():
    """Integers among the parameters: they have no gradient, rows and weights have theirs."""
    rng = np.random.default_rng(4)
    width, layers, experts, chosen = 32, 3, 4, 2
    matrices = tuple(
        ExpertWeights(
            *FP4_E8M0.encode(jnp.asarray(rng.standard_normal((layers, experts, width, width)) / 8, jnp.float32))
        )
        for _ in range(3)
    )
    x, dy = (rng.standard_normal((ROWS, width)).astype(np.float32) for _ in range(2))
    weights = rng.random((ROWS, chosen)).astype(np.float32)
    numbers = np.stack([rng.permutation(experts)[:chosen] for _ in range(ROWS)]).astype(np.int32)
    parallel = Case((("expert", 2),), experts, chosen).parallel("exchange")

    def of_layer(params, x, numbers, weights):
        matrices, layer = params
        static = {"layer": layer, "limit": 10.0, "activation_fmt": DenseFormat("float32")}
        return expert_matmul(x, numbers, weights, *matrices, **static)

    def part(matrices, x, numbers, weights):
        return over_experts(parallel, x, numbers, weights, experts, of_layer, (matrices, jnp.int32(1)))

    held, rows = parallel.spec(None, "experts"), parallel.spec("batch")
    mapped = jax.shard_map(part, mesh=parallel.mesh, in_specs=(held, rows, rows, rows), out_specs=rows, check_vma=False)

    def run(function):
        y, pull = jax.vjp(lambda x, w: function(x, w), x, weights)
        return y, pull(dy)

    ours = jax.jit(lambda m: run(lambda x, w: mapped(m, x, numbers, w)))(matrices)
    wanted = jax.jit(lambda m: run(lambda x, w: of_layer((m, jnp.int32(1)), x, numbers, w)))(matrices)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5), ours, wanted)
    assert np.abs(wanted[0]).mean() > 0.1


@functools.cache
def _queues(parts: int, held: int):
    return jax.jit(functools.partial(line_up, parts=parts, held=held))


_rows_of_round = jax.jit(rows_of_round, static_argnums=2)
_slots_of_round = jax.jit(slots_of_round, static_argnums=2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_travels_once_to_every_device_it_wants(data: st.DataObject):
    """The rounds' bookkeeping against sets of Python, for any routing; what one device sends and finds again."""
    parts, held, rows, chosen, room = data.draw(st.sampled_from([(4, 2, 9, 2, 2), (3, 1, 7, 6, 3), (1, 5, 4, 2, 4)]))
    numbers = st.lists(st.integers(0, parts * held), min_size=rows * chosen, max_size=rows * chosen)
    experts = np.array(data.draw(numbers), np.int32).reshape(rows, chosen)
    queues = _queues(parts, held)(experts)
    wanted = {(r, e // held) for r in range(rows) for e in experts[r] if e < parts * held}
    np.testing.assert_array_equal(queues.count, [sum(p == part for _, p in wanted) for part in range(parts)])
    sent, found = [], []
    for number in range(-(-int(np.max(queues.count)) // room)):
        source = np.asarray(_rows_of_round(queues, number, room))
        assert source.shape == (parts, room)
        live = source < rows
        # A round's rows stand at the front of each device's part, as its size says.
        size = np.clip(np.asarray(queues.count) - number * room, 0, room)
        np.testing.assert_array_equal(live, np.arange(room) < size[:, None])
        sent += [(int(source[p, c]), int(p)) for p, c in np.argwhere(live)]
        slots = np.asarray(_slots_of_round(queues, number, room))
        for row, place in np.argwhere(slots < parts * room):
            slot = slots[row, place]
            assert source.reshape(-1)[slot] == row
            found.append((int(row), int(slot // room)))
    assert sorted(sent) == sorted(found) == sorted(wanted)


@pytest.mark.parametrize(("room", "wanted"), [(1, 1), (7, 1), (7, 3), (7, 512), (100, 64)])
def test_slices_hold_the_rows_of_a_buffer_in_order(room: int, wanted: int):
    rows = np.arange(room + 1)
    begin, sizes = (np.asarray(a) for a in slices_of(jnp.asarray(rows), room, wanted))
    assert 1 <= len(begin) <= wanted
    held = np.zeros((len(rows), room), int)
    for part, piece in np.ndindex(sizes.shape):
        held[part, begin[piece] : begin[piece] + sizes[part, piece]] += 1
    np.testing.assert_array_equal(held, np.arange(room) < rows[:, None])
    np.testing.assert_array_equal(sizes.sum(axis=1), rows)


@pytest.mark.parametrize(("parts", "chosen"), [(2, 6), (8, 6), (64, 6), (128, 3)])
def test_an_even_routing_takes_one_round(parts: int, chosen: int):
    rows, held = 1024, 3
    room = capacity(rows, parts, chosen)
    rng = np.random.default_rng(0)
    chosen_of = np.argsort(rng.random((rows, parts * held)), axis=1)[:, :chosen].astype(np.int32)
    longest = int(jnp.max(line_up(jnp.asarray(chosen_of), parts, held).count))
    mean = rows * share(parts, chosen)
    assert 0.9 * mean < longest <= room <= min(rows, 3 * mean)


def test_the_way_is_chosen_by_bytes_for_each_shape():
    official = {"chosen": 6, "width": 5120, "itemsize": 2}
    for name, first in {"gpu-8": 348, "gpu-4": 2046, "v5p-4x4x8": 20, "v6e-16x16": 10}.items():
        parallel = load_preset(name).sizes
        assert dispatch(parallel, first - 1, **official) == "gather"
        assert dispatch(parallel, first, **official) == "exchange"
    for how in ("gather", "exchange"):
        parallel = parse_preset("test", {"axes": {"expert": 8}, "dispatch": how}).sizes
        assert {dispatch(parallel, rows, **official) for rows in (1, 4096)} == {how}
    with pytest.raises(MeshError, match="mesh test: dispatch 'all'; there are auto, gather, exchange"):
        parse_preset("test", {"dispatch": "all"})


@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_the_exchange_compiles_for_tpus_as_ragged_collectives(
    chip: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Both passes, with several rounds; processors only ever run the other collective."""
    pytest.importorskip("libtpu")
    if chip != "v6e" and not request.config.getoption("--every-chip"):
        pytest.skip("compiled for v6e only, without --every-chip")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # test processes run side by side
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", os.environ.get("TPU_SKIP_MDS_QUERY", "1"))
    devices = topologies.get_topology_desc(f"{chip}:2x2x1", platform="tpu").devices
    preset = parse_preset("test", {"axes": {"expert": len(devices)}, "dispatch": "exchange"})
    parallel = preset.parallel(devices)
    rows, chosen, width = 64, 6, 512

    def sums(params: jax.Array, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        def compute(params, x, experts, weights):
            weight = jnp.sum(jnp.where(experts < params.shape[0], weights, 0), axis=-1)
            return (x @ params[0]).astype(jnp.float32) * weight[:, None]

        y = over_experts(parallel, x, experts, weights, 3 * len(devices), compute, params)
        return jax.lax.psum(jnp.sum(y), "expert")

    whole = jax.sharding.NamedSharding(parallel.mesh, parallel.spec("experts"))
    spec = whole.spec
    mapped = jax.shard_map(
        sums, mesh=parallel.mesh, in_specs=(spec,) * 4, out_specs=jax.sharding.PartitionSpec(), check_vma=False
    )
    count = len(devices)
    shapes = {(3 * count, width, width): jnp.bfloat16, (rows * count, width): jnp.bfloat16}
    shapes |= {(rows * count, chosen): jnp.int32}
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes.items()]
    arguments.append(jax.ShapeDtypeStruct((rows * count, chosen), jnp.float32, sharding=whole))
    run = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1, 3)))
    text = run.trace(*arguments).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert "ragged-all-to-all" in text
    assert not re.search(r"= \S+ all-to-all\(", text)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_exchanges_on_tpus_wait_for_nothing(chip: str):
    """With what a step's compiler is told: what runs meanwhile in the official model is in tests/test_aot.py."""
    pytest.importorskip("libtpu")
    devices = topology_devices(f"{chip}:2x2x1")
    parallel = parse_preset("test", {"axes": {"expert": len(devices)}, "dispatch": "exchange"}).parallel(devices)
    rows, held, width = 64 * len(devices), 3, 512

    def sums(params: jax.Array, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        def compute(params, x, experts, weights):
            weight = jnp.sum(jnp.where(experts < held, weights, 0), axis=-1)
            return (x @ params[0]).astype(jnp.float32) * weight[:, None]

        return over_experts(parallel, x, experts, weights, held * len(devices), compute, params)

    spec = parallel.spec("experts")
    whole = jax.sharding.NamedSharding(parallel.mesh, spec)
    mapped = jax.shard_map(sums, mesh=parallel.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shapes = (
        ((held * len(devices), width, width), jnp.bfloat16),
        ((rows, width), jnp.bfloat16),
        ((rows, 6), jnp.int32),
        ((rows, 6), jnp.float32),
    )
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=whole) for shape in shapes]
    text = jax.jit(mapped, compiler_options=compiler_options(parallel)).trace(*arguments).lower().compile().as_text()
    exchanges = [s for s in scheduled_collectives(text) if s.kind == "ragged-all-to-all"]
    assert sum(s.count for s in exchanges) >= 3
    assert None not in {s.beside for s in exchanges}
