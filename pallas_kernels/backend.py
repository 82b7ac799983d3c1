"""Which implementation runs an operation: one table, one choice, one record of what was taken.

Back ends are named by import path and loaded on first use, so that a machine only imports what it runs. An operation's
native back end is its platform's; beside its function lies ``unsupported`` (or ``<function>_unsupported``) with the
same arguments, which says why these arguments are not for it. Then XLA runs, and the reason is logged and reported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

# operation -> back end -> "module:function". This table is the one place that says which kernel a platform takes.
OPERATIONS: dict[str, dict[str, str]] = {
    "paged_append": {
        "xla": "pallas_kernels.paged_memory.xla:append",
        "gpu": "pallas_kernels.paged_memory.gpu:append",
        "tpu": "pallas_kernels.paged_memory.tpu:append",
    },
    "paged_gather": {
        "xla": "pallas_kernels.paged_memory.xla:gather",
        "gpu": "pallas_kernels.paged_memory.gpu:gather",
        "tpu": "pallas_kernels.paged_memory.tpu:gather",
    },
    "top_k": {
        "xla": "pallas_kernels.top_k.xla:top_k",
        "gpu": "pallas_kernels.top_k.gpu:top_k",
        "tpu": "pallas_kernels.top_k.tpu:top_k",
    },
    "index_select": {
        "xla": "pallas_kernels.index_select.xla:index_select",
        "gpu": "pallas_kernels.index_select.gpu:index_select",
        "tpu": "pallas_kernels.index_select.tpu:index_select",
    },
    "index_reselect": {
        "xla": "pallas_kernels.index_select.xla:index_reselect",
        "gpu": "pallas_kernels.index_select.gpu:index_reselect",
        "tpu": "pallas_kernels.index_select.tpu:index_reselect",
    },
    "sparse_attention": {
        "xla": "pallas_kernels.sparse_attention.xla:sparse_attention",
        "gpu": "pallas_kernels.sparse_attention.gpu:sparse_attention",
        "tpu": "pallas_kernels.sparse_attention.tpu:sparse_attention",
    },
    "route": {
        "xla": "pallas_kernels.router.xla:route",
        "gpu": "pallas_kernels.router.gpu:route",
    },
    "expert_matmul": {
        "xla": "pallas_kernels.expert_matmul.xla:expert_matmul",
        "gpu": "pallas_kernels.expert_matmul.gpu:expert_matmul",
        "tpu": "pallas_kernels.expert_matmul.tpu:expert_matmul",
    },
    "block_linear": {
        "xla": "pallas_kernels.block_linear.xla:block_linear",
        "gpu": "pallas_kernels.block_linear.gpu:block_linear",
        "tpu": "pallas_kernels.block_linear.tpu:block_linear",
    },
    "mhc": {
        "xla": "pallas_kernels.mhc.xla:mhc",
        "gpu": "pallas_kernels.mhc.gpu:mhc",
        "tpu": "pallas_kernels.mhc.tpu:mhc",
    },
}

_GPU_CAPABILITY = "9.0"
_PLATFORMS = {"cpu": "xla", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}

_log = logging.getLogger(__name__)
_taken: dict[str, dict[str, None]] = {}
# Part of jit's cache keys: a function traced for one back end is traced again for another.
_preferred = jax.make_user_context(None)
_interpreted = jax.make_user_context(False)


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Traces inside prefer this back end: ``"xla"`` switches kernels off, ``"tpu"`` is for compiling ahead of time.

    Raises:
      ValueError: it is none of xla, gpu and tpu.
    """
    if name not in _PLATFORMS.values():
        raise ValueError(f"back end {name!r} is none of xla, gpu, tpu")
    with _preferred(name):
        yield


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Pallas kernels traced inside run in interpret mode, on any platform: slow, for tests."""
    with _interpreted(True):
        yield


def interpreted() -> bool:
    """Whether kernels are to be traced in interpret mode."""
    return _interpreted.value


def preferred() -> str:
    """Back end that operations take where it supports their arguments: that of :func:`use`, else the platform's."""
    return _preferred.value or _native(jax.devices()[0])


@functools.cache
def _native(device: jax.Device) -> str:
    """Back end of a device; the GPU kernels are written for Hopper's matrix units, other GPUs take XLA."""
    name = _PLATFORMS.get(device.platform, "xla")
    if name == "gpu" and getattr(device, "compute_capability", None) != _GPU_CAPABILITY:
        capability = getattr(device, "compute_capability", "unknown")
        _log.warning("%s has compute capability %s, not %s: XLA", device.device_kind, capability, _GPU_CAPABILITY)
        return "xla"
    return name


def implementation(operation: str, name: str) -> Callable:
    """The function of one back end.

    Raises:
      KeyError: there is no such operation, or it has no such back end.
    """
    if name not in OPERATIONS[operation]:
        raise KeyError(f"operation {operation!r} has no back end {name!r}, only {sorted(OPERATIONS[operation])}")
    module, function = OPERATIONS[operation][name].split(":")
    return getattr(importlib.import_module(module), function)


def unsupported(operation: str, name: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a back end cannot run an operation on these arguments; None if it can."""
    if name == "xla":
        return None
    function = implementation(operation, name)
    module = importlib.import_module(function.__module__)
    check = getattr(module, f"{OPERATIONS[operation][name].split(':')[1]}_unsupported", None) or module.unsupported
    return check(*args, **kwargs)


def choose(operation: str, *args: Any, **kwargs: Any) -> Callable:
    """The function that runs ``operation`` on these arguments; the choice is recorded for :func:`report`."""
    name = preferred() if preferred() in OPERATIONS[operation] else "xla"
    reason = unsupported(operation, name, *args, **kwargs)
    taken = name if reason is None else f"xla ({name}: {reason})"
    if reason is not None and taken not in _taken.get(operation, {}):
        _log.warning("%s runs on XLA, not its %s kernel: %s", operation, name, reason)
    _taken.setdefault(operation, {})[taken] = None
    return implementation(operation, name if reason is None else "xla")


def run(operation: str, *args: Any, **kwargs: Any) -> Any:
    """Runs ``operation`` on the back end that :func:`choose` finds for the arguments."""
    return choose(operation, *args, **kwargs)(*args, **kwargs)


def report() -> dict[str, list[str]]:
    """Back ends that each operation took since :func:`forget`, in the order first taken, with reasons for fallbacks.

    What was traced counts: a compiled step that runs again takes what it took.
    """
    return {operation: list(names) for operation, names in _taken.items()}


def forget() -> None:
    """Empties the record of :func:`report`."""
    _taken.clear()
