"""A mesh by name: its axes, the chips that it is for, and its rules; kept as a small file (``configs/meshes``)."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import AXES, DEFAULT_RULES, DISPATCHES, MeshError

PRESETS = pathlib.Path(__file__).parents[1] / "data" / "meshes"
"""Packaged; a clone shows them as ``configs/meshes`` too."""


@dataclasses.dataclass(frozen=True)
class MeshPreset:
    """The sizes of a mesh's axes and where logical axes lie.

    Attributes:
      name: of the preset, for messages.
      axes: size of each axis of :data:`~dsv41.sharding.rules.AXES`, 1 where the file does not name it.
      topology: the accelerators that it is for, as ``v6e:16x16`` or ``gpu:8``; None for any.
      rules: mesh axes of each logical axis.
      dispatch: how rows reach their experts, one of :data:`~dsv41.sharding.rules.DISPATCHES`.
    """

    name: str
    axes: Mapping[str, int]
    topology: str | None
    rules: Mapping[str, tuple[str, ...]]
    dispatch: str = "auto"

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def sizes(self) -> Parallel:
        """Axes and rules without devices: enough for shapes."""
        return Parallel.of(self.axes, self.rules, dispatch=self.dispatch)

    def parallel(self, devices: Sequence[jax.Device] | None = None) -> Parallel:
        """What the modules of a sharded model are given. Raises as :meth:`mesh`."""
        return Parallel.of(self.axes, self.rules, self.mesh(devices), self.dispatch)

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh over these devices (default: all that there are).

        Raises:
          MeshError: their number is not the mesh's.
        """
        devices = jax.devices() if devices is None else list(devices)
        if len(devices) != self.devices:
            sizes = " × ".join(f"{axis} {size}" for axis, size in self.axes.items())
            raise MeshError(f"mesh {self.name}: {sizes} needs {self.devices} devices, there are {len(devices)}")
        return Mesh(np.asarray(devices).reshape(tuple(self.axes.values())), tuple(self.axes))


def load_preset(name: str) -> MeshPreset:
    """A preset by its name, or from a JSON file by its path.

    Raises:
      MeshError: there is none, or the file names an axis, a key or a dispatch that does not exist, or a size below 1.
    """
    path = pathlib.Path(name)
    if path.suffix != ".json":
        path = PRESETS / f"{name}.json"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in PRESETS.glob("*.json")))
        raise MeshError(f"mesh {name!r}: no such preset or file; there are {there}")
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise MeshError(f"mesh {path}: not JSON: {error}") from error
    return parse_preset(path.stem, data)


def preset_for(topology: str) -> MeshPreset:
    """The preset that is for these accelerators.

    Raises:
      MeshError: none is.
    """
    presets = [load_preset(path.stem) for path in sorted(PRESETS.glob("*.json"))]
    found = [preset for preset in presets if preset.topology == topology]
    if not found:
        raise MeshError(f"topology {topology!r}: no preset is for it; give a mesh by name or file")
    return found[0]


def parse_preset(name: str, data: dict) -> MeshPreset:
    """A preset from a file's contents. Raises as :func:`load_preset`."""
    unknown = set(data) - {"topology", "axes", "rules", "dispatch", "comment"}
    if unknown:
        raise MeshError(f"mesh {name}: unknown key {min(unknown)!r}")
    axes = data.get("axes", {})
    for axis, size in axes.items():
        if axis not in AXES:
            raise MeshError(f"mesh {name}: unknown axis {axis!r}; there are {', '.join(AXES)}")
        if not isinstance(size, int) or size < 1:
            raise MeshError(f"mesh {name}: axis {axis} has size {size!r}")
    rules = dict(DEFAULT_RULES)
    for logical, places in data.get("rules", {}).items():
        if logical not in DEFAULT_RULES:
            raise MeshError(f"mesh {name}: unknown logical axis {logical!r}; there are {', '.join(DEFAULT_RULES)}")
        missing = [place for place in places if place not in AXES]
        if missing:
            raise MeshError(f"mesh {name}: rule {logical!r} names axis {missing[0]!r}; there are {', '.join(AXES)}")
        rules[logical] = tuple(places)
    dispatch = data.get("dispatch", DISPATCHES[0])
    if dispatch not in DISPATCHES:
        raise MeshError(f"mesh {name}: dispatch {dispatch!r}; there are {', '.join(DISPATCHES)}")
    return MeshPreset(name, {axis: axes.get(axis, 1) for axis in AXES}, data.get("topology"), rules, dispatch)
