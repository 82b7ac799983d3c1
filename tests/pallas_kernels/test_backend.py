"""The table of back ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.formats import DenseFormat
from pallas_kernels.paged_memory import gather
from pallas_kernels.top_k import top_k


def test_every_entry_of_the_table_loads():
    for operation, names in backend.OPERATIONS.items():
        for name in names:
            assert callable(backend.implementation(operation, name))


def test_report_tells_what_was_traced():
    backend.choose("index_select")
    jax.jit(top_k, static_argnums=1).lower(jnp.zeros(4), 2)
    fmt = DenseFormat("float32")
    zeros = jnp.zeros((1, 1), jnp.int32)
    jax.jit(gather, static_argnums=1).lower(fmt.zeros((1, 1), 2), fmt, zeros, zeros)
    taken = backend.report()
    assert {taken[name] for name in ("index_select", "top_k", "paged_gather")} == {"xla"}


def test_an_unknown_back_end_is_named():
    with pytest.raises(KeyError, match=r"'top_k' has no back end 'abacus', only \['xla'\]"):
        backend.implementation("top_k", "abacus")
