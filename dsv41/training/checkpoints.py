"""A run's directory: whose it is, and the training state in it, to go on from as if nothing had happened.

::

    DIR/train.json     the run's configuration, every field
    DIR/metrics.jsonl  its curve (metrics.py)
    DIR/checkpoints/   <step>/: training state and the data iterator's, in Orbax's format

A checkpoint is written behind the steps that follow it, and gets its name when all of it is there: a process that dies
while it saves leaves the checkpoint before.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dsv41.checkpoint import CheckpointError
from dsv41.training.config import TrainConfigError, flat_config

Padded = Mapping[tuple[str, ...], int]
"""Paths of parameters that a mesh may give rows of zeros behind their own, which no step changes or reads, and the
number of their own rows."""
NOT_PADDED: Padded = MappingProxyType({})

_CONFIG = "train.json"
_CHECKPOINTS = "checkpoints"
_STATE, _RUN = "state", "run"
_SHOWN_PROBLEMS = 20


def claim_directory(directory: pathlib.Path, config: Any, fresh: bool = False) -> None:
    """Makes a directory this run's, or finds that it is.

    Args:
      config: the run's configuration (config.py). Fields that may change take their new values.
      fresh: True refuses a directory that has a run, this one's too.

    Raises:
      TrainConfigError: another configuration's run is there; names the fields that differ.
      CheckpointError: ``fresh``, and there is a run.
    """
    path = directory / _CONFIG
    if path.exists():
        if fresh:
            raise CheckpointError(f"{directory}: has a run already, which a fresh one would overwrite")
        _refuse_other(directory, json.loads(path.read_text()), config)
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(flat_config(config), indent=1) + "\n")
        os.replace(partial, path)


def _refuse_other(directory: pathlib.Path, there: dict[str, Any], config: Any) -> None:
    now = flat_config(config)
    changeable = now.keys() - flat_config(config, changeable=False).keys()
    differ = [
        f"{name}: {_shown(there, name)} there, {_shown(now, name)} now"
        for name in sorted((there.keys() | now.keys()) - changeable)
        if (name in there) != (name in now) or there[name] != now[name]
    ]
    if differ:
        raise TrainConfigError(f"{directory}: has a run with another configuration: " + "; ".join(differ))


def _shown(flat: dict[str, Any], name: str) -> str:
    return json.dumps(flat[name], ensure_ascii=False) if name in flat else "no such field"


def abstract_state(state: Any) -> Any:
    """A state's shapes, dtypes and shardings, without its arrays."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


class Checkpoints:
    """The checkpoints of a run; a context manager, which waits for the last one to be written when it is left.

    All processes of a mesh call every method alike: each writes and reads what its devices hold.
    """

    def __init__(self, directory: pathlib.Path, keep: int) -> None:
        """
        Args:
          directory: the run's.
          keep: how many stay, the newest; an older one goes when a newer one is there.
        """
        self._path = (directory / _CHECKPOINTS).absolute()
        # What a process that was killed left half written is removed.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self._path, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        self._manager.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which there are checkpoints, oldest first; one that is being written is among them."""
        return tuple(sorted(self._manager.all_steps()))

    def save(self, step: int, state: Any, data: Any) -> None:
        """Writes the state after ``step`` steps, behind what follows; waits first until the one before is written.

        Args:
          state: a pytree of arrays, on devices or not. The caller may donate them as soon as this returns.
          data: the data iterator's state, as JSON has it; all processes have the same.
        """
        beside = {"leaves": _kinds(state), "data": data}
        args = ocp.args.Composite(**{_STATE: ocp.args.StandardSave(state), _RUN: ocp.args.JsonSave(beside)})
        self._manager.save(step, args=args, force=True)

    def restore(self, like: Any, padded: Padded = NOT_PADDED) -> tuple[int, Any, Any] | None:
        """The newest checkpoint, equal to the bit.

        Args:
          like: of :func:`abstract_state`, of a state of the same run; arrays come to where it says, which need not be
            where they lay.
          padded: parameters that may have more rows of padding, or fewer, than they had there; with them all leaves
            whose paths end with theirs.

        Returns:
          ``(step, state, data)``; None where there is no checkpoint.

        Raises:
          CheckpointError: it is no state of that form, all leaves that do not fit are named.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        path = self._path / str(step)
        beside = self._manager.restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))[_RUN]
        # Orbax would convert dtypes without a word.
        _refuse_other_state(path, beside["leaves"], _kinds(like), padded)
        # All shapes but the padded ones are those of the checkpoint. Rows are cut off, or zeros put behind them.
        args = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(like, strict=False)})
        state = self._manager.restore(step, args=args)[_STATE]
        return step, state, beside["data"]


def restore_parameters(directory: pathlib.Path, like: Any, padded: Padded = NOT_PADDED) -> Any:
    """The parameters of a run's newest checkpoint, equal to the bit; nothing else of it is read.

    Args:
      directory: the run's.
      like: their shapes, dtypes and shardings; without a sharding they come to the first device.
      padded: see :meth:`Checkpoints.restore`.

    Raises:
      CheckpointError: there is no checkpoint, or its parameters are others; all leaves that do not fit are named.
    """
    root = (directory / _CHECKPOINTS).absolute()
    steps = sorted(int(path.name) for path in root.glob("*") if path.name.isdecimal()) if root.is_dir() else []
    if not steps:
        raise CheckpointError(f"{directory}: no checkpoint of a training run is there")
    path = root / str(steps[-1])
    there = json.loads((path / _RUN / "metadata").read_text())["leaves"]
    prefix = "params/"
    own = {name.removeprefix(prefix): kind for name, kind in there.items() if name.startswith(prefix)}
    _refuse_other_state(path, own, _kinds(like), padded)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    how = jax.tree.map(
        lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding or first, global_shape=x.shape, strict=False), like
    )
    args = ocp.args.PyTreeRestore(item={"params": like}, restore_args={"params": how}, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path / _STATE, args=args)["params"]


def _kinds(state: Any) -> dict[str, str]:
    """Dtype and shape of each leaf, by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{np.dtype(leaf.dtype)} {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _refuse_other_state(path: pathlib.Path, there: dict[str, str], wanted: dict[str, str], padded: Padded) -> None:
    problems = [
        f"{name}: {there.get(name, 'nothing')} there, {wanted.get(name, 'nothing')} now"
        for name in (wanted | there)
        if there.get(name) != wanted.get(name) and not _same_but_for_padding(name, there, wanted, padded)
    ]
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = f"\n  … and {more} more" if more > 0 else ""
        shown = "\n  ".join(problems[:_SHOWN_PROBLEMS])
        raise CheckpointError(f"{path}: {len(problems)} leaves are not of this state:\n  {shown}{tail}")


def _same_but_for_padding(name: str, there: dict[str, str], wanted: dict[str, str], padded: Padded) -> bool:
    """Whether two leaves have all rows of the parameter that their path ends with, and are else alike."""
    own = next((n for path, n in padded.items() if f"/{name}".endswith(f"/{'/'.join(path)}")), None)
    if own is None or name not in there or name not in wanted:
        return False
    (dtype, shape), (other, now) = (kinds[name].split(" ", 1) for kinds in (there, wanted))
    shape, now = json.loads(shape), json.loads(now)
    return dtype == other and shape[1:] == now[1:] and min(shape[:1] + now[:1], default=0) >= own
