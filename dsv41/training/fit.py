"""Whether a model can be trained on a mesh; known before its weights are read."""

from __future__ import annotations

from dsv41.checkpoint.layout import quantized_layout
from dsv41.checkpoint.placement import Path, flatten_tree, parameter_place
from dsv41.declared import declared_variables, parameter_partitions
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.sharding.requests import context_shards
from dsv41.sharding.rules import MeshError, part_shape


def check_rows(model: Model, batch_rows: int) -> None:
    """
    Raises:
      MeshError: the mesh divides single rows, or does not divide a batch of so many evenly.
    """
    parallel = model.settings.parallel
    if (shards := context_shards(parallel)) > 1:
        raise MeshError(f"context: {shards} shards; training needs rows undivided, a context axis of 1")
    if batch_rows % parallel.parts("batch"):
        axes = " × ".join(f"{axis} {dict(parallel.axes)[axis]}" for axis in parallel.places("batch"))
        raise MeshError(f"data.batch_rows: {batch_rows} is not divisible by mesh axes {axes}")


def check_blocks(module: Model | Drafter) -> None:
    """
    Raises:
      MeshError: a device's part of a matrix does not hold whole blocks of what its policy rounds: the values of a block
        share a scale, which no device could find alone. Names the parameter, the switch, the block and the part.
    """
    parallel = module.settings.parallel
    if parallel.mesh is None:
        return
    wanted, declared = flatten_tree(parameter_partitions(module, parallel)), flatten_tree(declared_variables(module))
    for path, (switch, block) in _blocks(module).items():
        part = part_shape(declared[path].value.shape, wanted[path], dict(parallel.axes))[-2:]
        if any(size % side for size, side in zip(part, block, strict=True)):
            raise MeshError(
                f"{'/'.join(path)}: policy.{switch} rounds blocks of {block[0]} × {block[1]}, which a device's part of "
                f"{part[0]} × {part[1]} does not hold whole"
            )


def _blocks(module: Model | Drafter) -> dict[Path, tuple[str, tuple[int, int]]]:
    """The matrices of which something is rounded: the policy's switch, and rows × columns that share a scale."""
    policy, config, blocks = module.settings.policy, module.settings.config, {}
    is_drafter = isinstance(module, Drafter)
    for spec in quantized_layout(config).values():
        if spec.block is None or (spec.part == "dspark") != is_drafter:
            continue
        path = parameter_place(config, spec.name).path
        path = path[1:] if is_drafter else path
        weights = "expert_weights" if "experts" in path else "dense_weights"
        if getattr(policy, weights):
            blocks[path] = (weights, spec.block)
        elif policy.activations and not path[0].startswith("engram_table"):
            blocks[path] = ("activations", (1, spec.block[1]))  # inputs lie along columns
    return blocks
