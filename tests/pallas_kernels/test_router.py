"""The router on XLA."""

from __future__ import annotations

from tests.pallas_kernels.base.router import RouterTests


class TestRouter(RouterTests):
    backend = "xla"
