"""The TPU's top-k in interpret mode."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.top_k import tpu
from tests.pallas_kernels.base.top_k import TopKTests


class TestTopK(TopKTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self):
        with backend.interpret():
            yield
