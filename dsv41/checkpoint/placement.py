"""Where a public tensor lies in the parameter tree: the one place that knows both namings.

The tree is a nested dict whose leaf names are the public ones. Blocks of equal kind share a leaf, stacked as
:func:`dsv41.layer_table.stack_plan` says; the experts of a block are stacked on one further axis::

    embed, head, norm                               text, top level
    encoder/groups_{g}/runs_{r}/<block>             layers below the last KV source
    decoder/groups_{g}/runs_{r}/<block>             the layers from it on
    engram_{L}                                      layers.{L}.engram but its table
    engram_table_{L}                                layers.{L}.engram.embed: apart, as a tree may lack it
    dspark/stages_{i}/<block and extras>            mtp.{i}
    vision/…, aligner, image_*                      vision
    vision/blocks/…                                 vision.blocks.{b}, stacked
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dsv41.checkpoint.layout import PARTS, checkpoint_layout, quantized_layout
from dsv41.config import ModelConfig
from dsv41.layer_table import Address, layer_table, locate, stack_plan

Path = tuple[str, ...]
ParameterTree = dict[str, Any]
"""Nested dict; the leaves are arrays or ``jax.ShapeDtypeStruct``."""


@functools.lru_cache(maxsize=4)
def _addresses(config: ModelConfig) -> tuple[tuple[str, Address, tuple[int, ...]], ...]:
    """Of each backbone layer: the half it belongs to, its address, and the sizes of its stacked axes."""
    table = layer_table(config.text)
    rows = []
    for half, layers in (("encoder", table.encoder), ("decoder", table.decoder)):
        groups = stack_plan(layers)
        for layer in layers:
            address = locate(groups, layer.index)
            group = groups[address.group]
            sizes = tuple(n for n in (group.repeats, group.runs[address.run].count) if n > 1)
            rows.append((half, address, sizes))
    return tuple(rows)


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor's leaf and its place in it.

    Attributes:
      path: keys from the root of the tree to the leaf.
      index: position on the leaf's leading stacked axes (layer axes, then the expert axis).
      stack: sizes of these axes; the leaf's shape is ``(*stack, *tensor shape)``.
    """

    path: Path
    index: tuple[int, ...]
    stack: tuple[int, ...]


def _experts(config: ModelConfig, path: Path) -> int:
    text = config.text
    return text.dspark_n_routed_experts if path[0] == "dspark" else text.n_routed_experts


def parameter_place(config: ModelConfig, name: str) -> Place:
    """The place of a public tensor in the parameter tree. ``name`` must be one of the layout's."""
    words = name.split(".")
    path: Path
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    if words[0] == "layers" and words[2] == "engram":
        if words[3] == "embed":
            return Place((f"engram_table_{words[1]}", *words[4:]), (), ())
        return Place((f"engram_{words[1]}", *words[3:]), (), ())
    if words[0] == "layers":
        half, address, stack = _addresses(config)[int(words[1])]
        path, index = (half, f"groups_{address.group}", f"runs_{address.run}"), address.index
        words = words[2:]
    elif words[0] == "mtp":
        path, words = ("dspark", f"stages_{words[1]}"), words[2:]
    elif words[:2] == ["vision", "blocks"]:
        path, index, stack = ("vision", "blocks"), (int(words[2]),), (config.vision.num_hidden_layers,)
        words = words[3:]
    else:
        return Place(tuple(words), (), ())
    if words[:2] == ["ffn", "experts"]:
        index, stack = (*index, int(words[2])), (*stack, _experts(config, path))
        words = ["ffn", "experts", *words[3:]]
    return Place((*path, *words), index, stack)


def parameter_path(config: ModelConfig, name: str) -> tuple[Path, tuple[int, ...]]:
    """Maps a public name to ``(keys of the leaf, index on the leaf's leading stacked axes)``."""
    place = parameter_place(config, name)
    return place.path, place.index


def flatten_tree(tree: ParameterTree, prefix: Path = ()) -> dict[Path, Any]:
    """The leaves of a nested dict by their path, in the dict's order."""
    leaves: dict[Path, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flatten_tree(value, (*prefix, key))
        else:
            leaves[(*prefix, key)] = value
    return leaves


def unflatten_tree(leaves: dict[Path, Any]) -> ParameterTree:
    """The inverse of :func:`flatten_tree`."""
    tree: ParameterTree = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


_PACKED = {
    "F32": jnp.float32,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.uint8,
    "I8": jnp.uint8,
}


def abstract_parameters(
    config: ModelConfig,
    parts: Collection[str] = PARTS,
    storage: Literal["packed", "float32", "bfloat16"] = "packed",
) -> ParameterTree:
    """Shapes and dtypes of the parameter tree, as ``jax.ShapeDtypeStruct`` leaves.

    Args:
      config: the model.
      parts: which of "text", "dspark", "vision" the tree holds.
      storage: "packed" keeps the stored dtypes (quantised matrices as ``float8_e4m3fn`` or packed ``uint8``, their
        scales as ``uint8`` E8M0 bytes); "float32" and "bfloat16" have dequantised matrices of that dtype and no
        scales, and "bfloat16" leaves the tensors float32 that the public files store so.

    Raises:
      ValueError: an unknown part or storage.
    """
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"parts: {sorted(unknown)} are not among {PARTS}")
    if storage not in ("packed", "float32", "bfloat16"):
        raise ValueError(f"storage: {storage!r} is none of 'packed', 'float32', 'bfloat16'")
    packed = storage == "packed"
    layout = quantized_layout(config) if packed else checkpoint_layout(dataclasses.replace(config, quantization=None))
    leaves: dict[Path, Any] = {}
    for spec in layout.values():
        if spec.part not in parts:
            continue
        place = parameter_place(config, spec.name)
        dtype = jnp.dtype(_PACKED[spec.dtype] if packed or spec.dtype == "F32" else storage)
        leaves[place.path] = jax.ShapeDtypeStruct((*place.stack, *spec.shape), dtype)
    return unflatten_tree(leaves)
