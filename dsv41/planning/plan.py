"""The plan of one step: memory of a device, the ledger of the step, and the least time that both imply."""

from __future__ import annotations

import dataclasses
from typing import Any

from dsv41.planning.ledger import Ledger, step_ledger
from dsv41.planning.memory import (
    drafter_ring_bytes,
    encoder_tail_bytes,
    parameter_bytes,
    state_bytes,
    temporary_bytes,
)
from dsv41.planning.parameters import held_parameters
from dsv41.planning.spread import Spread
from dsv41.planning.steps import Step
from dsv41.settings import Settings
from dsv41.sharding.chips import Chip
from dsv41.sharding.mesh import MeshPreset

STEPS = ("decode", "verify", "prefill", "replay")

_GIB = 2**30
TEMPORARIES = "temporaries (estimate)"


class PlanError(ValueError):
    """A step that cannot be of this model at this context; names the option and the numbers."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step of a batch costs a device of a mesh.

    Attributes:
      kind: one of :data:`STEPS`.
      batch: requests on the whole mesh; context: tokens of each when the step ends.
      queries: tokens of each request in the step.
      memory: bytes by part.
      ledger: bytes, operations and link bytes by item.
    """

    mesh: MeshPreset
    chip: Chip
    kind: str
    batch: int
    context: int
    queries: int
    memory: dict[str, int]
    ledger: Ledger

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def misfit(self) -> str | None:
        """Why the device cannot hold it; None if it can."""
        needed, there = self.memory_bytes, self.chip.device_bytes
        if needed <= there:
            return None
        return (
            f"mesh {self.mesh.name}: does not fit: needs {needed / _GIB:.1f} GiB of {there / _GIB:.1f} a device "
            f"({self.chip.name}), {(needed - there) / _GIB:.1f} too many"
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Least seconds for the operations, the memory traffic and the links."""
        total = self.ledger.total
        times = self.chip.seconds(total.operations, total.moved, total.links)
        return dict(zip(("operations", "memory", "links"), times, strict=True))

    @property
    def overlapped_s(self) -> float:
        """Step time if operations, memory and links never wait for each other."""
        return max(self.seconds.values())

    @property
    def serial_s(self) -> float:
        """Step time if only one of the three is ever busy."""
        return sum(self.seconds.values())

    def json(self) -> dict[str, Any]:
        """The plan as plain numbers."""
        return {
            "mesh": {"name": self.mesh.name, "devices": self.mesh.devices, "axes": dict(self.mesh.axes)},
            "chip": dataclasses.asdict(self.chip),
            "step": self.kind,
            "batch": self.batch,
            "context": self.context,
            "queries": self.queries,
            "memory": self.memory,
            "memory_bytes": self.memory_bytes,
            "device_bytes": self.chip.device_bytes,
            "fits": self.misfit is None,
            "ledger": {item: work._asdict() for item, work in self.ledger.items.items()},
            "dispatch": self.ledger.dispatch._asdict(),
            "seconds": self.seconds,
            "overlapped_s": self.overlapped_s,
            "serial_s": self.serial_s,
        }


def planned_step(settings: Settings, kind: str, context: int, chunk: int, drafts: int) -> Step:
    """The step of this kind that ends at ``context`` tokens.

    decode: one token through all layers. verify: the pending token and ``drafts`` drafts through all layers, every one
    through the head, and a new block of drafts. prefill: a chunk of a prompt through the encoder. replay: the window's
    last positions through the decoder, which ends a prefill.

    Raises:
      PlanError: the context is longer than the model's positions or shorter than the step, or the drafter does not make
        so many drafts.
    """
    text = settings.text
    if context > text.max_position_embeddings:
        raise PlanError(f"context {context}: exceeds max_position_embeddings {text.max_position_embeddings}")
    if kind == "verify" and not text.num_nextn_predict_layers:
        raise PlanError("step verify: the model has no drafter (num_nextn_predict_layers 0)")
    if kind == "verify" and drafts > text.dspark_block_size:
        raise PlanError(f"drafts {drafts}: exceeds the drafter's block of {text.dspark_block_size}")
    queries = {"decode": 1, "verify": drafts + 1, "prefill": chunk, "replay": min(text.sliding_window, context)}[kind]
    history = context - queries
    if history < 0:
        raise PlanError(f"context {context}: is shorter than the {queries} tokens of the {kind} step")
    if kind == "verify":
        return Step(queries, history, logits=queries, drafts=True)
    if kind == "prefill":
        return Step(queries, history, decoder=False, logits=0)
    return Step(queries, history, encoder=kind == "decode")


def make_plan(
    settings: Settings,
    mesh: MeshPreset,
    chip: Chip,
    kind: str,
    batch: int | None,
    context: int,
    chunk: int,
    drafts: int,
) -> Plan:
    """Plans a step.

    Args:
      batch: requests on the whole mesh; None: one for each part that the mesh makes of them.

    Raises:
      MeshError: the mesh does not divide the batch or a parameter; names both.
      PlanError: see :func:`planned_step`.
    """
    step, spread = planned_step(settings, kind, context, chunk, drafts), Spread(mesh)
    held = held_parameters(settings, mesh)
    batch = spread.batch if batch is None else batch
    requests = spread.requests(batch)
    memory = parameter_bytes(settings, held, step.drafts) | state_bytes(settings, requests, context, spread.pages)
    if step.drafts:
        memory["drafter rings"] = drafter_ring_bytes(settings, requests)
    if kind in ("prefill", "replay"):
        memory["encoder tail"] = encoder_tail_bytes(settings, requests)
    if chip.program_bytes:
        memory["program (estimate)"] = chip.program_bytes
    memory[TEMPORARIES] = temporary_bytes(settings, spread, step, requests, context, chip)
    ledger = step_ledger(settings, held, spread, step, requests)
    return Plan(mesh, chip, kind, batch, context, step.queries, memory, ledger)
