"""Where logical axes lie: one table from the names on parameters, activations and state to axes of the mesh.

    data      requests
    expert    requests, and the routed experts: tokens travel along it to their experts and back
    context   pages of the global memory, and the columns of a long chunk of a prompt
    tensor    heads, output groups, columns of the feed-forward layers, the vocabulary

Any of them may have size 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

AXES = ("data", "expert", "context", "tensor")

DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "expert"),
    "pages": ("data", "expert", "context"),
    "chunk": ("context",),
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "index_heads": ("tensor",),
    "o_groups": ("tensor",),
    "vocab": ("tensor",),
    "engram_rows": AXES,
    "embed": (),
    "q_lora": (),
    "head_dim": (),
    "layers": (),
    "vision_embed": (),
    "vision_heads": (),
    "vision_mlp": (),
}
"""Mesh axes of each logical axis, outermost first; () is replicated."""

PADDED = frozenset({"engram_rows"})
"""Logical axes whose last part may be short: a hashed table has a prime number of rows for each of its functions."""

DISPATCHES = ("auto", "gather", "exchange")
"""How rows reach their experts (:mod:`dsv41.sharding.experts`); "auto" chooses for each compiled shape."""


class MeshError(ValueError):
    """A mesh that cannot be, or that does not fit a model; names the axes and sizes."""


def partition(
    what: str,
    logical: Sequence[str | None],
    shape: Sequence[int],
    axes: Mapping[str, int],
    rules: Mapping[str, tuple[str, ...]],
) -> PartitionSpec:
    """The partition of an array.

    Args:
      what: its name, for messages.
      logical: the logical axis of each dimension; None is replicated.
      shape: its dimensions.
      axes: sizes of the mesh's axes.
      rules: as :data:`DEFAULT_RULES`.

    Returns:
      mesh axes of each dimension; those of size 1 are left out.

    Raises:
      MeshError: a logical axis without a rule, two of them on one mesh axis, or a dimension that its mesh axes do not
        divide (unless it is :data:`PADDED`).
    """
    taken: dict[str, str] = {}
    spec: list[tuple[str, ...] | str | None] = []
    for name, size in zip(logical, shape, strict=True):
        if name is None:
            spec.append(None)
            continue
        if name not in rules:
            raise MeshError(f"{what}: logical axis {name!r} has no rule")
        places = tuple(axis for axis in rules[name] if axes.get(axis, 1) > 1)
        for axis in places:
            if axis in taken:
                raise MeshError(f"{what}: logical axes {taken[axis]!r} and {name!r} both lie on mesh axis {axis!r}")
            taken[axis] = name
        parts = math.prod(axes[axis] for axis in places)
        if size % parts and name not in PADDED:
            raise MeshError(f"{what}: {name} of {size} is not divisible by mesh axes {_sizes(places, axes)}")
        spec.append(places[0] if len(places) == 1 else places or None)
    return PartitionSpec(*spec)


def part_shape(shape: Sequence[int], spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
    """Dimensions of one device's part, rounded up."""
    padded = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple(-(-size // _parts(places, axes)) for size, places in zip(shape, padded, strict=True))


def _parts(places: str | tuple[str, ...] | None, axes: Mapping[str, int]) -> int:
    places = (places,) if isinstance(places, str) else places or ()
    return math.prod(axes[axis] for axis in places)


def _sizes(places: Sequence[str], axes: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {axes[axis]}" for axis in places)
