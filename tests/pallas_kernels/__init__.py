"""Tests of the operations: what each promises (``base``), run on every back end."""

import pytest

pytest.register_assert_rewrite("tests.pallas_kernels.base")
