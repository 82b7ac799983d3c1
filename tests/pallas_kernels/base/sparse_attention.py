"""What the sparse attention promises."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, DenseFormat, Packed
from pallas_kernels.sparse_attention import Partial, merge_partials, reference
from tests.pallas_kernels.base.common import OperationTests, compiled, golden, paged, poisoned

F32 = DenseFormat("float32")
WINDOW = 6


def encoded(values: jax.Array, fmt) -> Packed:
    return fmt.encode(values)


def case(local_fmt=F32, pool_fmt=F32, queries=9, lengths=(10, 3), heads=2, width=32, chosen=7, dtype="float32") -> dict:
    """Poisoned ring slots before each request's start, poisoned padding after its end, stray choices of −1."""
    rng = np.random.default_rng(0)
    batch, rows = len(lengths), WINDOW + queries
    # Request 0 has an incomplete window before it, request 1 a full one but only some of the queries.
    valid = np.ones((batch, rows), bool)
    valid[0, : WINDOW - 2] = False
    valid[-1, WINDOW + queries // 2 :] = False
    values = rng.standard_t(4, (batch, rows, width)).astype(np.float32)
    spoiled = poisoned(local_fmt, (batch, rows), width, rng)
    local = compiled(encoded, {"values": values}, fmt=local_fmt).map(
        lambda leaf, bad: jnp.asarray(np.where(valid[..., None], leaf, bad)), spoiled
    )
    pool, table = paged(rng, pool_fmt, rng.standard_t(4, (batch, 12, width)).astype(np.float32), list(lengths), 4)
    indices = np.stack([rng.integers(-1, length, (queries, chosen)) for length in lengths])
    indices[:, 1:2] = -1
    indices[:, 2:3] = 2  # one entry, chosen seven times
    return {
        "queries": jnp.asarray(rng.standard_normal((batch, queries, heads, width)).astype(jnp.dtype(dtype))),
        "local": local,
        "local_valid": jnp.asarray(valid),
        "pool": pool,
        "page_table": table,
        "indices": jnp.asarray(indices.astype(np.int32)),
        "sink": jnp.asarray(rng.standard_normal(heads).astype(np.float32)),
    }


def reaches(arrays: dict) -> jax.Array:
    """A reach for every query: nothing, everything, numbers beyond both, and what lies between."""
    reach = np.random.default_rng(5).integers(0, WINDOW + 1, arrays["queries"].shape[:2])
    reach[0, :2] = 0, 1000
    reach[-1, :2] = WINDOW, -3
    return jnp.asarray(reach.astype(np.int32))


def gradients(function: Callable[[dict], jax.Array], arrays: dict) -> tuple[jax.Array, ...]:
    """Of a random weighting of the outputs, to queries, local and pool entries (plain floats) and sink."""
    cotangent = np.random.default_rng(1).standard_normal(arrays["queries"].shape).astype(np.float32)

    def loss(queries, local, pool, sink):
        changed = {"queries": queries, "local": Packed(local, None), "pool": Packed(pool, None), "sink": sink}
        return jnp.sum(function(arrays | changed) * cotangent)

    start = (arrays["queries"], arrays["local"].payload, arrays["pool"].payload, arrays["sink"])
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*start)


class SparseAttentionTests(OperationTests):
    """Promises of the operation.

    Attributes:
      supports_reach: whether queries may see a part of their windows there.
      local_fmt, pool_fmt, dtype, width: what a test takes that is not about formats, dtypes or widths.
      page_entries: of the pool that holds the reference's data.
      tolerance: largest error, of values of about 1, with these.
    """

    supports_reach = True
    local_fmt = F32
    pool_fmt = F32
    dtype = "float32"
    width = 32
    page_entries = 9
    tolerance = 2e-6

    def case(self, local_fmt=None, pool_fmt=None, **changes) -> dict:
        """:func:`case` with the class's formats, dtype and width where nothing else is asked for."""
        defaults = {"dtype": self.dtype, "width": self.width}
        return case(local_fmt or self.local_fmt, pool_fmt or self.pool_fmt, **(defaults | changes))

    def check(self, arrays: dict, local_fmt=None, pool_fmt=None, probability_dtype=None, tolerance=None, window=WINDOW):
        local_fmt, pool_fmt = local_fmt or self.local_fmt, pool_fmt or self.pool_fmt
        probability_dtype, tolerance = probability_dtype or self.dtype, tolerance or self.tolerance
        static = {"local_fmt": local_fmt, "pool_fmt": pool_fmt, "window": window, "scale": 0.3}
        static["probability_dtype"] = jnp.dtype(probability_dtype)
        out = self.run("sparse_attention", arrays, **static)
        wanted = compiled(reference.sparse_attention, arrays, **static)
        assert out.dtype == arrays["queries"].dtype
        out, wanted = np.asarray(out, np.float32), np.asarray(wanted, np.float32)
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=tolerance)
        return out

    @pytest.mark.parametrize(("local_fmt", "pool_fmt"), [(F32, F32), (FP8_E8M0, FP4_E4M3)], ids=["f32", "packed"])
    def test_float32(self, local_fmt, pool_fmt):
        self.check(self.case(local_fmt, pool_fmt), local_fmt, pool_fmt)

    def test_bfloat16_queries_and_probabilities(self):
        # One rounding of a bfloat16 result may differ: 2^-8 of it.
        arrays = self.case(FP8_E8M0, FP4_E4M3, dtype="bfloat16")
        self.check(arrays, FP8_E8M0, FP4_E4M3, "bfloat16", tolerance=max(self.tolerance, 2.0**-8))

    def test_one_query(self):
        self.check(self.case(FP8_E8M0, FP4_E4M3, queries=1), FP8_E8M0, FP4_E4M3)

    def test_a_rotated_window_is_the_same_window(self):
        arrays = self.case(FP8_E8M0, FP4_E4M3)
        wanted = self.check(arrays, FP8_E8M0, FP4_E4M3)
        columns = arrays["local_valid"].shape[1]
        rotation = np.array([4, columns - 1], np.int32)
        order = (np.arange(columns) - rotation[:, None]) % columns
        arrays["local"] = arrays["local"].map(lambda leaf: jnp.take_along_axis(leaf, order[..., None], axis=1))
        arrays["local_valid"] = jnp.take_along_axis(arrays["local_valid"], order, axis=1)
        arrays["rotation"] = jnp.asarray(rotation)
        rotated = self.check(arrays, FP8_E8M0, FP4_E4M3)
        np.testing.assert_allclose(rotated, wanted, rtol=self.tolerance, atol=self.tolerance)

    @pytest.mark.parametrize("rotated", [False, True])
    def test_every_query_has_its_reach(self, rotated: bool):
        if not self.supports_reach:
            pytest.skip("no reach on this back end")
        arrays = self.case(FP8_E8M0, FP4_E4M3)
        whole = self.check(arrays, FP8_E8M0, FP4_E4M3)
        arrays["reach"] = reaches(arrays)
        if rotated:
            arrays["rotation"] = jnp.zeros(2, jnp.int32)
        cut = self.check(arrays, FP8_E8M0, FP4_E4M3)
        if not rotated:
            full = np.asarray(arrays["reach"]) >= WINDOW
            np.testing.assert_array_equal(cut[full], whole[full])
        # Nothing local at all is what a reach of nothing leaves.
        none = np.asarray(arrays["reach"]) <= 0
        arrays["local_valid"] = jnp.zeros_like(arrays["local_valid"])
        np.testing.assert_array_equal(cut[none], self.check(arrays, FP8_E8M0, FP4_E4M3)[none])

    def test_the_same_reach_for_all_is_a_smaller_window(self):
        if not self.supports_reach:
            pytest.skip("no reach on this back end")
        reach = WINDOW - 2
        arrays = self.case() | {"pool": None, "page_table": None, "indices": None}
        reached = self.check(arrays | {"reach": jnp.full(arrays["queries"].shape[:2], reach, jnp.int32)})
        newest = lambda leaf: leaf[:, WINDOW - reach :]  # noqa: E731
        arrays |= {"local": arrays["local"].map(newest), "local_valid": newest(arrays["local_valid"])}
        smaller = self.check(arrays, window=reach)
        np.testing.assert_allclose(reached, smaller, rtol=self.tolerance, atol=self.tolerance)

    def test_window_only(self):
        arrays = self.case() | {"pool": None, "page_table": None, "indices": None}
        self.check(arrays)
        # By hand: the last query of request 0 sees exactly the last WINDOW entries.
        entries = np.asarray(self.local_fmt.decode(arrays["local"]), np.float64)[0, -WINDOW:]
        logits = 0.3 * np.asarray(arrays["queries"], np.float64)[0, -1] @ entries.T
        p = np.exp(logits)
        p /= p.sum(-1, keepdims=True) + np.exp(np.asarray(arrays["sink"], np.float64))[:, None]
        tolerance = max(self.tolerance, 1e-5)
        np.testing.assert_allclose(self.check(arrays)[0, -1], p @ entries, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("sink", [-50.0, 0.0, 300.0])
    def test_nothing_to_see_gives_exactly_zero(self, sink: float):
        arrays = self.case()
        arrays["local_valid"] = jnp.zeros_like(arrays["local_valid"])
        arrays["indices"] = arrays["indices"].at[1].set(-1)
        arrays["sink"] = jnp.full_like(arrays["sink"], sink)
        out = self.check(arrays)
        np.testing.assert_array_equal(out[1], 0)
        np.testing.assert_array_equal(out[0, 1], 0)

    @pytest.mark.parametrize("factor", [1e-20, 60.0, 1e4])
    def test_flat_and_extreme_logits(self, factor: float):
        arrays = self.case()
        arrays["queries"] = arrays["queries"] * factor
        # A logit of thousands is rounded by more than a float32 softmax's own error.
        self.check(arrays, tolerance=max(self.tolerance, 2e-6 * factor))

    def test_a_nan_query_leaves_the_others(self):
        arrays = self.case()
        before = self.check(arrays)
        arrays["queries"] = arrays["queries"].at[0, 3].set(jnp.nan)
        static = {"local_fmt": self.local_fmt, "pool_fmt": self.pool_fmt, "window": WINDOW, "scale": 0.3}
        static["probability_dtype"] = jnp.dtype(self.dtype)
        after = np.asarray(self.run("sparse_attention", arrays, **static), np.float32)
        keep = np.ones(before.shape[:2], bool)
        keep[0, 3] = False
        np.testing.assert_array_equal(after[keep], before[keep])

    def test_gradients_are_the_references_and_finite_beside_poison(self):
        if not self.supports_gradient:
            pytest.skip("no gradient on this back end")
        arrays = self.case()
        static = {"local_fmt": F32, "pool_fmt": F32, "window": WINDOW, "scale": 0.3, "probability_dtype": jnp.float32}

        mine = gradients(lambda a: self.run("sparse_attention", a, **static), arrays)
        # The reference decodes whole pools, poison and all: it gets zeros instead.
        clean = {name: Packed(jnp.nan_to_num(arrays[name].payload), None) for name in ("local", "pool")}
        arrays |= clean
        wanted = gradients(lambda a: compiled(reference.sparse_attention, a, **static), arrays)
        for name, left, right in zip(("queries", "local", "pool", "sink"), mine, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(np.asarray(mine[1])[~np.asarray(arrays["local_valid"])], 0)

    def test_gradients_stay_in_reach(self):
        if not (self.supports_gradient and self.supports_reach):
            pytest.skip("no gradient or no reach on this back end")
        arrays = self.case()
        arrays |= {name: arrays[name].map(jnp.nan_to_num) for name in ("local", "pool")}
        # Nobody looks back beyond the call's own entries.
        own = 1 + jnp.arange(arrays["queries"].shape[1], dtype=jnp.int32)
        arrays["reach"] = jnp.minimum(reaches(arrays), own)
        static = {"local_fmt": F32, "pool_fmt": F32, "window": WINDOW, "scale": 0.3, "probability_dtype": jnp.float32}

        def divided(arrays):
            return self.run("sparse_attention", arrays, **static)

        def merged(arrays):
            part = self.run("sparse_attention", arrays, return_partial=True, **static)
            return merge_partials(jax.tree.map(lambda leaf: leaf[None], part), arrays["sink"], jnp.float32)

        wanted = gradients(lambda a: compiled(reference.sparse_attention, a, **static), arrays)
        assert np.asarray(wanted[1])[:, WINDOW:].any()
        for function in (divided, merged):
            mine = gradients(function, arrays)
            for name, left, right in zip(("queries", "local", "pool", "sink"), mine, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=1e-4, atol=1e-5, err_msg=name)
            np.testing.assert_array_equal(np.asarray(mine[1])[:, :WINDOW], 0)

    def test_parts_in_any_split_merge_to_the_whole(self):
        """Chosen entries dealt out over shards, the window on one; a shard that sees nothing changes nothing."""
        arrays = self.case(FP8_E8M0, FP4_E4M3)
        static = {"local_fmt": FP8_E8M0, "pool_fmt": FP4_E4M3, "window": WINDOW, "scale": 0.3}
        static["probability_dtype"] = jnp.dtype(self.dtype)
        whole = self.check(arrays, FP8_E8M0, FP4_E4M3)
        rng = np.random.default_rng(2)
        shards = 3
        for holder in range(shards):
            owner = rng.integers(0, shards, arrays["indices"].shape)
            # One that holds nothing but, in one of the splits, the window.
            owner = np.where(owner == 2, 0, owner)
            parts = []
            for shard in range(shards):
                mine = {"indices": jnp.where(owner == shard, arrays["indices"], -1)}
                mine["local_valid"] = arrays["local_valid"] & (shard == holder)
                parts.append(self.run("sparse_attention", arrays | mine, return_partial=True, **static))
                self.check_part(parts[-1], arrays | mine, static)
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
            merged = merge_partials(stacked, arrays["sink"], arrays["queries"].dtype)
            np.testing.assert_allclose(
                np.asarray(merged, np.float32), whole, rtol=2 * self.tolerance, atol=2 * self.tolerance
            )

    def check_part(self, part: Partial, arrays: dict, static: dict):
        assert {leaf.dtype for leaf in part} == {jnp.dtype(jnp.float32)}
        wanted = compiled(reference.sparse_attention, arrays, return_partial=True, **static)
        nothing = np.isneginf(np.asarray(wanted.top))
        np.testing.assert_array_equal(np.isneginf(np.asarray(part.top)), nothing)
        assert not np.asarray(part.out)[nothing].any()
        assert not np.asarray(part.total)[nothing].any()
        # Sums of many terms of up to one: an error is measured beside the sum of the weights.
        most = np.maximum(np.asarray(wanted.total), 1)
        for mine, theirs, unit in zip(part, wanted, (most[..., None], 1, most), strict=True):
            mine, theirs = np.asarray(mine) / unit, np.asarray(theirs) / unit
            np.testing.assert_allclose(mine, theirs, rtol=self.tolerance, atol=self.tolerance)

    def test_gradients_through_parts_are_those_of_the_whole(self):
        if not self.supports_gradient:
            pytest.skip("no gradient on this back end")
        arrays = self.case()
        arrays |= {name: arrays[name].map(jnp.nan_to_num) for name in ("local", "pool")}
        static = {"local_fmt": F32, "pool_fmt": F32, "window": WINDOW, "scale": 0.3, "probability_dtype": jnp.float32}
        even = np.arange(arrays["indices"].shape[-1]) % 2 == 0

        def merged(arrays):
            chosen = [{"indices": jnp.where(even, arrays["indices"], -1)}]
            chosen.append({"indices": jnp.where(even, -1, arrays["indices"])})
            chosen[0]["local_valid"] = jnp.zeros_like(arrays["local_valid"])
            parts = [self.run("sparse_attention", arrays | mine, return_partial=True, **static) for mine in chosen]
            return merge_partials(jax.tree.map(lambda *x: jnp.stack(x), *parts), arrays["sink"], jnp.float32)

        wanted = gradients(lambda a: compiled(reference.sparse_attention, a, **static), arrays)
        mine = gradients(merged, arrays)
        for name, left, right in zip(("queries", "local", "pool", "sink"), mine, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=1e-4, atol=1e-5, err_msg=name)

    @pytest.mark.parametrize(
        ("name", "probability_dtype", "tolerance"),
        # The reference subtracts a running maximum, so that its bfloat16 probabilities round elsewhere: 2^-9 each.
        [("out", "float32", 1e-6), ("out_bf16prob", "bfloat16", 2.0**-9), ("out_bf16", "bfloat16", 2.0**-7)],
    )
    def test_outputs_are_the_references(self, name: str, probability_dtype: str, tolerance: float):
        ops = golden()
        q, kv, idx = ops["sparse_attn.q"], ops["sparse_attn.kv"], ops["sparse_attn.idx"]
        batch, entries, width = kv.shape
        fmt = DenseFormat("bfloat16") if name == "out_bf16" else F32
        pool, table = paged(np.random.default_rng(0), fmt, kv, [entries] * batch, self.page_entries)
        arrays = {
            "queries": q.astype(jnp.dtype(fmt.dtype)),
            "local": Packed(np.full((batch, 1 + q.shape[1], width), np.nan, jnp.dtype(fmt.dtype)), None),
            "local_valid": np.zeros((batch, 1 + q.shape[1]), bool),
            "pool": pool,
            "page_table": table,
            "indices": jnp.asarray(idx),
            "sink": jnp.asarray(ops["sparse_attn.sink"]),
        }
        static = {"local_fmt": fmt, "pool_fmt": fmt, "window": 1, "scale": 0.25}
        out = self.run("sparse_attention", arrays, probability_dtype=jnp.dtype(probability_dtype), **static)
        wanted = ops["sparse_attn." + name].astype(np.float32)
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(np.asarray(out, np.float32)[0, 2], 0)
