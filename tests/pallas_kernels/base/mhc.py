"""What the boundary between two sub-layers promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mhc import Boundary, HyperConnection, Update, reference, xla
from tests.pallas_kernels.base.common import OperationTests, golden

STATIC = {"norm_eps": 1e-6, "eps": 1e-6, "iterations": 20}


sinkhorn = jax.jit(xla.sinkhorn, static_argnums=(1, 2))


def case(shape=(2, 5), copies=4, width=128, dtype="float32", updates=True) -> dict:
    """Arguments of the operation; coefficients far from uniform, and statistics that differ from row to row."""
    # On the host: as operations of the device each of these lines would be compiled for every shape.
    rng, normal = np.random.default_rng(0), lambda *shape: rng.standard_normal(shape)

    def given(x: np.ndarray, dtype="float32") -> jax.Array:
        return jnp.asarray(x.astype(jnp.dtype(dtype)))

    rows = (2 + copies) * copies
    update = None
    if updates:
        comb = sinkhorn(given(2 * normal(*shape, copies, copies)), 20, 1e-6)
        update = Update(given(3 * normal(*shape, width), dtype), given(1 + np.tanh(normal(*shape, copies))), comb)
    return {
        "streams": given(np.exp(normal(*shape, 1, 1)) * normal(*shape, copies, width), dtype),
        "mix": given(1 / (1 + np.exp(-normal(*shape, copies)))),
        "connection": HyperConnection(
            given(normal(rows, copies * width) / np.sqrt(copies * width / 4)),
            given(normal(rows)),
            jnp.asarray([0.7, 1.2, 0.9]),
        ),
        "norm_weight": given(1 + 0.1 * normal(width), dtype),
        "update": update,
    }


def close(ours: Boundary, wanted: Boundary) -> None:
    """Equal within float32, or within one unit of the last place of bfloat16 where that is the streams' dtype."""
    tolerance = 2.0**-7 if wanted.streams.dtype == jnp.bfloat16 else 1e-5
    for name in ("streams", "x"):
        got, want = getattr(ours, name), getattr(wanted, name)
        assert got.dtype == want.dtype
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-5, err_msg=name)
        # Sums that end near the middle between two bfloat16 values may round either way: few do.
        assert np.mean(got == want) > 0.98 or wanted.streams.dtype != jnp.bfloat16
    for name, got, want in zip(wanted.coefficients._fields, ours.coefficients, wanted.coefficients, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=name)


class MhcTests(OperationTests):
    # A back end whose tiles need wider rows says so.
    width = 128

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("updates", [True, False])
    def test_follows_the_equations(self, dtype: str, updates: bool):
        arrays = case(width=self.width, dtype=dtype, updates=updates)
        ours = self.run("mhc", arrays, **STATIC)
        close(ours, reference.mhc(**arrays, **STATIC))
        if not updates:
            np.testing.assert_array_equal(np.asarray(ours.streams), np.asarray(arrays["streams"]))

    def test_statistics_keep_float32(self):
        """Rows and weights whose products cancel: rounding a factor to a shorter float would show."""
        arrays = case(width=self.width, updates=False)
        half = arrays["streams"].shape[-2] * self.width // 2
        fn, flat = np.array(arrays["connection"].fn), np.array(arrays["streams"]).reshape(2, 5, -1)
        fn[:, half:] = -fn[:, :half] * (1 + 1e-3)
        flat[..., half:] = flat[..., :half]
        arrays["connection"] = arrays["connection"]._replace(fn=jnp.asarray(300 * fn))
        arrays["streams"] = jnp.asarray(flat.reshape(arrays["streams"].shape))
        wanted = reference.mhc(**arrays, **STATIC).coefficients
        for got, want in zip(self.run("mhc", arrays, **STATIC).coefficients, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)

    def test_coefficients_are_the_references(self):
        """Streams of mean square 1 and a projection that picks the golden mixes out of them."""
        ops = golden()
        mixes, copies = ops["sinkhorn.mixes"], ops["sinkhorn.pre"].shape[-1]
        arrays = case((len(mixes),), copies, self.width, updates=False)
        flat = np.zeros((len(mixes), copies * self.width), np.float32)
        rows = mixes.shape[-1]
        flat[:, :rows] = mixes / 1e3
        flat[:, -1] = np.sqrt(flat.shape[1] - np.square(flat[:, :rows]).sum(-1))
        fn = np.zeros((rows, flat.shape[1]), np.float32)
        fn[np.arange(rows), np.arange(rows)] = 1e3
        arrays["streams"] = jnp.asarray(flat.reshape(len(mixes), copies, self.width))
        arrays["connection"] = HyperConnection(*map(jnp.asarray, (fn, ops["sinkhorn.base"], ops["sinkhorn.scale"])))
        ours = self.run("mhc", arrays, **STATIC).coefficients
        for name in ours._fields:
            np.testing.assert_allclose(getattr(ours, name), ops[f"sinkhorn.{name}"], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_padded_rows_change_no_other(self, dtype: str):
        clean = case(width=self.width, dtype=dtype)
        dead = np.zeros((2, 5), bool)
        dead[0, 2] = dead[1, 4] = True
        poison = jax.tree.map(
            lambda x: np.where(dead.reshape(2, 5, *[1] * (x.ndim - 2)), np.nan, x).astype(x.dtype),
            {name: clean[name] for name in ("streams", "mix", "update")},
        )
        ours, wanted = (self.run("mhc", arrays, **STATIC) for arrays in (clean | poison, clean))
        for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[~dead], np.asarray(want)[~dead])

    def test_zeros_stay_finite(self):
        arrays = case(width=self.width)
        arrays |= {
            "streams": np.zeros_like(arrays["streams"]),
            "update": arrays["update"]._replace(y=np.zeros((2, 5, self.width), np.float32)),
        }
        ours = self.run("mhc", arrays, **STATIC)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ours))
        np.testing.assert_array_equal(np.asarray(ours.x), 0)

    def test_gradients_are_the_equations(self):
        if not self.supports_gradient:
            pytest.skip("no gradient on this back end")
        arrays = case((1, 3), width=self.width)
        rng = np.random.default_rng(1)
        shapes = jax.eval_shape(lambda a: xla.mhc(**a, **STATIC), arrays)
        seeds = jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(s.dtype), shapes)

        def loss(function):
            def total(arrays):
                out = function(arrays)
                return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(seeds), strict=True))

            return jax.jit(jax.grad(total))

        ours = loss(lambda a: self.run("mhc", a, **STATIC))(arrays)
        direction = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), arrays)
        slope = sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(direction), strict=True))

        def along(t: float) -> float:
            moved = jax.tree.map(lambda x, d: np.asarray(x + t * d), arrays, direction)
            out = reference.mhc(**moved, **STATIC)
            return sum(
                np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64))
                for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(seeds), strict=True)
            )

        np.testing.assert_allclose(slope, (along(1e-2) - along(-1e-2)) / 2e-2, rtol=1e-2)
