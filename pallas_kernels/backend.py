"""Which implementation runs an operation: one table, one choice, one record of what was taken.

Back ends are named by import path and loaded on first use, so that a machine only imports what it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

# operation -> back end -> "module:function"; the first back end that fits is the one that runs.
OPERATIONS: dict[str, dict[str, str]] = {
    "paged_append": {"xla": "pallas_kernels.paged_memory.xla:append"},
    "paged_gather": {"xla": "pallas_kernels.paged_memory.xla:gather"},
    "top_k": {"xla": "pallas_kernels.top_k.xla:top_k"},
    "index_select": {"xla": "pallas_kernels.index_select.xla:index_select"},
    "index_reselect": {"xla": "pallas_kernels.index_select.xla:index_reselect"},
    "sparse_attention": {"xla": "pallas_kernels.sparse_attention.xla:sparse_attention"},
    "expert_matmul": {"xla": "pallas_kernels.expert_matmul.xla:expert_matmul"},
    "block_linear": {"xla": "pallas_kernels.block_linear.xla:block_linear"},
}

_taken: dict[str, str] = {}


def implementation(operation: str, name: str) -> Callable:
    """The function of one back end.

    Raises:
      KeyError: there is no such operation, or it has no such back end.
    """
    if name not in OPERATIONS[operation]:
        raise KeyError(f"operation {operation!r} has no back end {name!r}, only {sorted(OPERATIONS[operation])}")
    module, function = OPERATIONS[operation][name].split(":")
    return getattr(importlib.import_module(module), function)


def choose(operation: str) -> tuple[str, Callable]:
    """Name and function of the back end that runs ``operation`` here; the choice is recorded for :func:`report`."""
    name = "xla"
    _taken[operation] = name
    return name, implementation(operation, name)


def report() -> dict[str, str]:
    """Back end last taken by each operation that was called or traced in this process."""
    return dict(_taken)
