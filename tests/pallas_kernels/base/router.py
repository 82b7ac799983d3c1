"""What the router promises."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import reference
from tests.pallas_kernels.base.common import OperationTests

SCALE = 1.5


def case(rows=9, experts=20, hidden=64, dtype="float32") -> dict:
    """Random rows of text and images, of which number 2 is nobody's and NaN; the two biases choose differently."""
    rng = np.random.default_rng(experts)
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    x[2] = np.nan
    return {
        "x": jnp.asarray(x, dtype),
        "weight": jnp.asarray(rng.standard_normal((experts, hidden)) / np.sqrt(hidden), dtype),
        "bias": jnp.asarray(rng.standard_normal(experts), jnp.float32),
        "image_bias": jnp.asarray(rng.standard_normal(experts), jnp.float32),
        "is_image": jnp.asarray(rng.random(rows) < 0.5),
        "valid": jnp.arange(rows) != 2,
    }


class RouterTests(OperationTests):
    """Promises of the operation.

    Attributes:
      sizes: hidden width where a back end needs its own.
      dtype: of x and the weight.
    """

    sizes: ClassVar[dict] = {}
    dtype = "float32"

    def case(self, **changes) -> dict:
        return case(**{"dtype": self.dtype, **self.sizes, **changes})

    def route(self, arrays: dict, k: int) -> tuple[np.ndarray, np.ndarray]:
        experts, weights = self.run("route", arrays, k=k, scale=SCALE)
        assert (experts.dtype, weights.dtype) == (jnp.int32, jnp.float32)
        return np.asarray(experts), np.asarray(weights)

    def check(self, arrays: dict, k: int):
        experts, weights = self.route(arrays, k)
        wanted, wanted_weights = reference.route(**jax.tree.map(np.asarray, arrays), k=k, scale=SCALE)
        np.testing.assert_array_equal(experts, wanted)
        valid = np.asarray(arrays["valid"])
        np.testing.assert_allclose(weights[valid], wanted_weights[valid], rtol=1e-5)

    @pytest.mark.parametrize(("experts", "k"), [(20, 1), (20, 6), (384, 6), (5, 5)])
    def test_experts_and_weights_are_the_references(self, experts: int, k: int):
        self.check(self.case(experts=experts), k)

    @pytest.mark.parametrize("rows", [3, 70, 150])
    def test_few_rows_and_many(self, rows: int):
        self.check(self.case(rows=rows), 3)

    def test_equal_scores_go_to_the_lower_expert(self):
        arrays = self.case()
        arrays["weight"] = jnp.tile(arrays["weight"][:4], (5, 1))
        for name in ("bias", "image_bias"):
            arrays[name] = jnp.tile(arrays[name][:4], 5)
        self.check(arrays, 6)

    def test_the_bias_chooses_but_does_not_weigh(self):
        arrays = self.case()
        arrays["bias"] = jnp.where(jnp.arange(20) % 2 == 0, 100.0, -100.0)
        experts, weights = self.route(arrays, 6)
        is_text = np.asarray(arrays["valid"] & ~arrays["is_image"])
        assert is_text.any()
        assert (experts[is_text] % 2 == 0).all()
        np.testing.assert_allclose(weights[is_text].sum(-1), SCALE, rtol=1e-5)
        self.check(arrays, 6)

    def test_rows_do_not_depend_on_their_company(self):
        arrays = self.case()
        experts, weights = self.route(arrays, 4)
        arrays["x"] = arrays["x"].at[5].set(jnp.nan)
        for mine, spoiled in zip((experts, weights), self.route(arrays, 4), strict=True):
            np.testing.assert_array_equal(np.delete(mine, 5, 0)[:2], np.delete(spoiled, 5, 0)[:2])
            np.testing.assert_array_equal(np.delete(mine, (2, 5), 0), np.delete(spoiled, (2, 5), 0))

    def test_gradients_are_those_of_the_normalised_scores(self):
        arrays = self.case()
        experts = self.route(arrays, 4)[0]
        cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(experts.shape), jnp.float32)
        keep = arrays["valid"][:, None]

        def loss(x, weight):
            weights = self.run("route", arrays | {"x": x, "weight": weight}, k=4, scale=SCALE)[1]
            return jnp.sum(jnp.where(keep, weights * cotangent, 0))

        def plain(x, weight):
            x, weight = (a.astype(jnp.float32) for a in (x, weight))
            logits = jnp.dot(x, weight.T, precision="highest")
            scores = jnp.sqrt(jnp.log1p(jnp.exp(logits)))
            chosen = jnp.take_along_axis(scores, jnp.where(keep, experts, 0), axis=1)
            return jnp.sum(jnp.where(keep, SCALE * chosen / jnp.sum(chosen, axis=1, keepdims=True) * cotangent, 0))

        arrays["x"] = jnp.nan_to_num(arrays["x"])
        inputs = arrays["x"], arrays["weight"]
        mine, wanted = (jax.grad(f, argnums=(0, 1))(*inputs) for f in (loss, plain))
        tolerance = 1e-4 if self.dtype == "float32" else 2.0**-7
        for a, b in zip(mine, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, tolerance)
