"""XLA's routed experts in blocks of rows: several blocks a step as one after the other, and what may lie unused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiling
from pallas_kernels.expert_matmul import reference, xla
from pallas_kernels.formats import DenseFormat
from tests.pallas_kernels.base.common import compiled
from tests.pallas_kernels.base.expert_matmul import LIMIT, ExpertMatmulTests, case

F32 = DenseFormat("float32")
NAMES = ("x", "expert_weights", "w1", "w3", "w2")
# No other test has it: what is compiled is told apart by it. Three blocks of the case below, or of the base's 40
# experts, fit.
BUDGET = 300_001
EXPERTS = 9


@pytest.fixture
def _together(monkeypatch):
    """What GPUs and TPUs take, on any platform."""
    monkeypatch.setattr(xla, "_by_platform", lambda f, *args: f(*args, together=True))


@pytest.mark.usefixtures("_together")
class TestExpertMatmulInGroups(ExpertMatmulTests):
    backend = "xla"
    # Equal to the bit only if floats, too, take one block after the other.
    test_packed_experts_pass_gradients_to_their_input = None

    @pytest.fixture(autouse=True)
    def _few_at_once(self, monkeypatch):
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", BUDGET)


def hostile(kind: str) -> dict:
    """Rows on all experts but the second and the last, whose matrices are NaN, as are the rows without experts."""
    k = 1 if kind == "one choice" else 2
    arrays = case(EXPERTS, rows=200, k=k)
    ids = np.array(arrays["expert_ids"])
    ids[(ids == 1) | (ids == EXPERTS - 1)] = -1
    if kind == "one expert":
        ids[:] = -1
        ids[np.arange(200) % 7 != 3, 1] = 4
    if kind == "none":
        ids[:] = EXPERTS
    unused = (ids < 0).all(axis=1) | (ids >= EXPERTS).all(axis=1)
    arrays["expert_ids"] = jnp.asarray(ids)
    arrays["x"] = jnp.where(unused[:, None], jnp.nan, jnp.nan_to_num(arrays["x"]))
    for name in ("w1", "w3", "w2"):
        spoil = lambda w: w.at[jnp.array([1, EXPERTS - 1])].set(jnp.nan)  # noqa: E731
        arrays[name] = jax.tree.map(spoil, arrays[name])
    return arrays


def value_and_gradients(function, arrays: dict):
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["x"].shape), jnp.float32)

    def loss(chosen):
        out = function(**(arrays | chosen), limit=LIMIT, activation_fmt=F32)
        return jnp.sum(out * cotangent), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))({name: arrays[name] for name in NAMES})
    return out, grads


def _reference(limit: float, activation_fmt, **arrays):
    return compiled(reference.expert_matmul, arrays, limit=limit, activation_fmt=activation_fmt)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["all experts", "one expert", "none", "one choice"])
def test_blocks_are_the_references_beside_poison(monkeypatch, together: bool, kind: str):
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", BUDGET)
    monkeypatch.setattr(xla, "_by_platform", lambda f, *args: f(*args, together=together))
    arrays = hostile(kind)
    out, mine = value_and_gradients(xla.expert_matmul, arrays)
    arrays["x"] = jnp.nan_to_num(arrays["x"])
    wanted_out, wanted = value_and_gradients(_reference, arrays)
    np.testing.assert_allclose(np.asarray(out), np.asarray(wanted_out), rtol=1e-5, atol=1e-5)
    for name in NAMES:
        for left, right in zip(jax.tree.leaves(mine[name]), jax.tree.leaves(wanted[name]), strict=True):
            np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=1e-4, atol=1e-4, err_msg=name)
    for name in ("w1", "w3", "w2"):
        np.testing.assert_array_equal(np.asarray(mine[name].weight)[[1, EXPERTS - 1]], 0)
        assert np.asarray(mine[name].weight).any() == (kind != "none")


@pytest.mark.parametrize(
    ("budget", "together", "packed", "shape"),
    [
        (BUDGET, True, False, (5, 3)),
        (400_001, True, False, (4, 4)),
        (2**30, True, False, (1, 15)),
        (1, True, False, (15, 1)),
        (2**30, False, False, (15, 1)),
        (2**30, True, True, (15, 1)),
    ],
)
def test_steps_take_what_fits(monkeypatch, budget: int, together: bool, packed: bool, shape: tuple[int, int]):
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
    arrays = case(EXPERTS, rows=200, packed=packed)
    blocks = xla._blocks(jnp.where(arrays["expert_ids"] < 0, EXPERTS, arrays["expert_ids"]), EXPERTS)
    groups = xla._groups(blocks, arrays["x"], tuple(arrays[name] for name in ("w1", "w3", "w2")), together)
    assert groups.live.shape == shape
    for whole, cut in zip(blocks, groups, strict=True):
        cut = np.asarray(cut).reshape(-1, *whole.shape[1:])
        np.testing.assert_array_equal(cut[: whole.shape[0]], np.asarray(whole))
    assert not np.asarray(groups.live).reshape(-1)[blocks.live.shape[0] :].any()


@pytest.mark.usefixtures("_together")
def test_temporary_memory_is_bounded_forward_and_backward(monkeypatch):
    budget = 2**20
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
    arrays = case(16, rows=4096, hidden=64, inner=64)
    arrays["x"] = jnp.nan_to_num(arrays["x"])

    def loss(chosen):
        return jnp.sum(xla.expert_matmul(**(arrays | chosen), limit=LIMIT, activation_fmt=F32))

    chosen = {name: arrays[name] for name in NAMES}
    for function in (loss, jax.grad(loss)):
        memory = jax.jit(function).lower(chosen).compile().memory_analysis()
        # All 80 blocks at once have 16 MiB of gathered matrices and rows, and in the backward pass as much again.
        assert memory.temp_size_in_bytes < 8 * budget, memory.temp_size_in_bytes


@pytest.mark.parametrize(("rows", "blocked"), [(96, False), (97, True)])
def test_rows_that_fill_blocks_leave_the_dense_way(rows: int, blocked: bool):
    """Of three experts and two choices: 64 rows an expert."""
    arrays = case(3, rows=rows)
    run = lambda a: xla.expert_matmul(**a, limit=LIMIT, activation_fmt=F32)  # noqa: E731
    assert ("scan" in str(jax.make_jaxpr(run)(arrays))) == blocked
