"""The least time that a step can take on one device, part by part: bytes over bandwidth, or operations over rate."""

from __future__ import annotations

from dsv41.planning.ledger import Work, step_ledger
from dsv41.planning.parameters import held_parameters
from dsv41.planning.spread import Spread
from dsv41.planning.steps import Step
from dsv41.settings import Settings
from dsv41.sharding.mesh import MeshPreset
from dsv41.sharding.rules import AXES

# Items that one operation serves, so that the bytes of one may pass while the other computes.
_PARTS = {"rings": "attention", "selected entries": "attention"}


def step_work(settings: Settings, batch: int, queries: int, context: int) -> dict[str, Work]:
    """The parts of a step of ``batch`` requests with ``queries`` tokens each after ``context`` tokens, on one device.

    On a mesh the batch is the whole mesh's.

    What is counted: :mod:`dsv41.planning.ledger`. One token of a request passes the head.
    """
    parallel = settings.parallel
    preset = MeshPreset("the settings'", dict.fromkeys(AXES, 1) | dict(parallel.axes), None, dict(parallel.rules))
    spread, step = Spread(preset), Step(queries, context)
    parts: dict[str, Work] = {}
    for item, work in step_ledger(
        settings, held_parameters(settings, preset), spread, step, spread.requests(batch)
    ).items.items():
        part = _PARTS.get(item, item)
        parts[part] = parts.get(part, Work()) + work
    return parts
