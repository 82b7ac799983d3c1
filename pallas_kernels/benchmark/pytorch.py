"""PyTorch's side of a case. PyTorch is imported by what needs it only: most machines do not have it."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format, Packed


def tensors(tree: Any) -> Any:
    """The arrays of a pytree as PyTorch tensors in the same memory; bool ones are copied, as DLPack is by bytes."""
    torch = importlib.import_module("torch")

    def convert(array: jax.Array) -> Any:
        if array.dtype == jnp.bool_:
            return torch.from_dlpack(array.astype(jnp.uint8)).bool()
        return torch.from_dlpack(array)

    return jax.tree.map(convert, tree)


def arrays(tree: Any) -> Any:
    """The inverse of :func:`tensors` for a result; int64, which PyTorch's indices are, becomes int32."""
    torch = importlib.import_module("torch")

    def convert(tensor: Any) -> jax.Array:
        return jnp.from_dlpack((tensor.int() if tensor.dtype == torch.int64 else tensor).contiguous())

    return jax.tree.map(convert, tree)


def unpacked(packed: Packed, fmt: Format) -> Any:
    """The decoded values as a bfloat16 tensor, in which those of every block format are exact."""
    return tensors(jax.jit(fmt.decode, static_argnums=1)(packed, jnp.bfloat16))


def rows(page_table: Any, entries: Any, page_entries: int) -> Any:
    """Where entries lie in a pool whose pages follow each other: all tensors, ``entries`` ``[batch, ...]``, int64.

    As :func:`pallas_kernels.paged_memory.addressing.locate`, of entries that all have a page.
    """
    page = page_table.gather(1, (entries // page_entries).flatten(1)).view_as(entries)
    return page * page_entries + entries % page_entries
