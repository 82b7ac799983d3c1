"""Datasheet rates of the chips that meshes are for: the one table that floors of unmeasured machines come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dsv41.sharding.rules import MeshError

_GIB, _TPU_PROGRAM = 2**30, 192 * 2**20

TPU_OPTIONS: Mapping[str, bool] = {
    # By themselves exchanges are operations that everything waits for; so are those that SparseCores are given.
    "xla_tpu_enable_async_ragged_all_to_all": True,
    "xla_tpu_enable_async_all_to_all": True,
    "xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all": False,
    "xla_enable_async_all_gather": True,
    "xla_enable_async_all_reduce": True,
}
"""What the compiler of TPUs is told of a step on a mesh, so that collectives run beside other work: by its defaults
libtpu 0.0.42.1 hides none. ``dsv41 aot`` prints what became of them."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, as its maker states it.

    Attributes:
      name: as in a mesh's topology (``v6e:16x16``).
      devices: what JAX counts as devices on it; they share everything evenly.
      hbm_bytes: memory of the chip.
      hbm_bytes_per_s: read and write together.
      operations_per_s: bfloat16 products, dense.
      link_bytes_per_s: to chips of the same slice or node, sent and received together.
      lanes: bytes that rows of bytes are padded to for kernels; 0 if they are not.
      program_bytes: of one compiled step in a device's memory, about; 0 where it is small. The official model's take
        110 to 280 MB on TPUs (PODS.md): a body for each kind of layer, however many layers there are.
      source: where the numbers are stated.
      training_options: what its compiler has to be told for training's step.
    """

    name: str
    devices: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    operations_per_s: float
    link_bytes_per_s: float
    lanes: int
    program_bytes: int
    source: str
    training_options: Mapping[str, bool] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        return self.hbm_bytes // self.devices

    def seconds(self, operations: float, moved: float, links: float) -> tuple[float, float, float]:
        """Seconds that one device takes at best for its operations, its memory traffic and its link traffic."""
        return (
            operations * self.devices / self.operations_per_s,
            moved * self.devices / self.hbm_bytes_per_s,
            links * self.devices / self.link_bytes_per_s,
        )


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v5p", 1, 95 * _GIB, 2765e9, 459e12, 1200e9, 128, _TPU_PROGRAM, "https://docs.cloud.google.com/tpu/docs/v5p"
        ),
        Chip(
            "v6e", 1, 32 * _GIB, 1638e9, 918e12, 800e9, 128, _TPU_PROGRAM, "https://docs.cloud.google.com/tpu/docs/v6e"
        ),
        Chip(
            "tpu7x",
            2,
            192 * _GIB,
            7380e9,
            2307e12,
            1200e9,
            128,
            _TPU_PROGRAM,
            "https://docs.cloud.google.com/tpu/docs/tpu7x",
            # libtpu 0.0.42.1 aborts where it gives one of the step's sums to SparseCores.
            {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": False},
        ),
        Chip("h200", 1, 141 * 10**9, 4800e9, 989e12, 900e9, 0, 0, "https://www.nvidia.com/en-us/data-center/h200/"),
    )
}
"""By name. A topology ``gpu:N`` means the GPU that the kernels are measured on."""


def chip_of(topology: str) -> Chip:
    """The chip of a mesh's topology, ``v6e:16x16`` or ``gpu:8``; or of its own name.

    Raises:
      MeshError: the topology names none of the table.
    """
    name = topology.partition(":")[0]
    name = "h200" if name == "gpu" else name
    if name not in CHIPS:
        raise MeshError(f"topology {topology!r}: no such chip; there are {', '.join(CHIPS)}")
    return CHIPS[name]
