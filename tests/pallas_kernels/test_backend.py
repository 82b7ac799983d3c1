"""The table of back ends: what is taken, what is refused and why, and that a change of mind is traced again."""

from __future__ import annotations

import logging

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
    backend.forget()
    jax.jit(lambda x: top_k(x, 2)).lower(jnp.zeros(4))
    fmt = DenseFormat("float32")
    zeros = jnp.zeros((1, 1), jnp.int32)
    jax.jit(lambda pool: gather(pool, fmt, zeros, zeros)).lower(fmt.zeros((1, 1), 2))
    assert backend.report() == {"top_k": ["xla"], "paged_gather": ["xla"]}


def test_an_unknown_back_end_is_named():
    with pytest.raises(KeyError, match=r"'top_k' has no back end 'abacus', only \['gpu', 'tpu', 'xla'\]"):
        backend.implementation("top_k", "abacus")
    with pytest.raises(ValueError, match="'abacus' is none of xla, gpu, tpu"), backend.use("abacus"):
        pass


@pytest.fixture
def picky(monkeypatch):
    """A table of one operation whose kernel doubles even numbers of elements; XLA triples."""
    monkeypatch.setattr(backend, "OPERATIONS", {"scale": {"xla": f"{__name__}:triple", "gpu": f"{__name__}:double"}})
    backend.forget()


def triple(x: jax.Array) -> jax.Array:
    return 3 * x


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def double_unsupported(x: jax.Array) -> str | None:
    return f"{x.size} elements are odd" if x.size % 2 else None


@pytest.mark.usefixtures("picky")
def test_a_kernel_that_cannot_is_replaced_and_says_why(caplog):
    with backend.use("gpu"), caplog.at_level(logging.WARNING):
        assert backend.run("scale", jnp.ones(2))[0] == 2
        assert backend.run("scale", jnp.ones(3))[0] == 3
        assert backend.run("scale", jnp.ones(3))[0] == 3
    assert backend.report() == {"scale": ["gpu", "xla (gpu: 3 elements are odd)"]}
    assert [record.message for record in caplog.records] == [
        "scale runs on XLA, not its gpu kernel: 3 elements are odd"
    ]


@pytest.mark.usefixtures("picky")
def test_a_jitted_function_is_traced_again_for_another_back_end():
    f = jax.jit(lambda x: backend.run("scale", x))
    with backend.use("gpu"):
        assert f(jnp.ones(2))[0] == 2
    with backend.use("xla"):
        assert f(jnp.ones(2))[0] == 3
    with backend.use("tpu"):  # a back end that the operation lacks
        assert f(jnp.ones(2))[0] == 3


@pytest.mark.parametrize(
    ("platform", "capability", "name"),
    [("gpu", "9.0", "gpu"), ("gpu", "8.0", "xla"), ("tpu", None, "tpu"), ("cpu", None, "xla")],
)
def test_a_device_takes_the_kernels_that_are_written_for_it(platform: str, capability: str | None, name: str, caplog):
    attributes = {"platform": platform, "device_kind": "a device", "compute_capability": capability}
    device = type("Device", (), attributes)()
    assert backend._native(device) == name
    assert ("compute capability 8.0, not 9.0" in caplog.text) == (capability == "8.0")
