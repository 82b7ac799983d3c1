"""Variables in Orbax's own format: written by all processes of a mesh at once, and read onto any other mesh.

A checkpoint in the public layout is for other programs; this one is for going on where a run of this program stopped,
without a conversion. A mesh may give Engram's tables rows of zeros behind their own: they are written as they lie,
with the number of rows that count beside them, and are cut or filled up to what the reader's mesh wants.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, unflatten_tree
from dsv41.checkpoint.safetensors_io import CheckpointError
from dsv41.declared import abstract_variables, padded_leaves
from dsv41.layers.dspark import Drafter
from dsv41.model import Model

_SHOWN_PROBLEMS = 20
_ROWS = "rows"


def save_variables(path: pathlib.Path, model: Model | Drafter, variables: ParameterTree) -> None:
    """Writes the variables of a model or of a drafter; every process of the mesh calls it.

    Args:
      path: a directory that is not there yet. It gets its name when all of it is written.
      variables: as steps take them: ``params``, and of a model ``constants``.

    Raises:
      CheckpointError: the directory is there already, or the variables are not the model's; all leaves that do not fit
        are named.
    """
    if path.exists():
        raise CheckpointError(f"{path}: is there already")
    _refuse(path, _differences(_kinds(flatten_tree(variables), {}), _kinds(flatten_tree(_abstract(model)), {})))
    beside = {_ROWS: {"/".join(p): rows for p, rows in _own_rows(model).items()}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(variables, custom_metadata=beside))


def restore_variables(path: pathlib.Path, model: Model | Drafter) -> ParameterTree:
    """Reads what :func:`save_variables` wrote, from whatever mesh, to where the model's mesh wants it.

    Each process reads what its devices hold.

    Returns:
      the variables, equal to the bit.

    Raises:
      CheckpointError: there is no such checkpoint, or it is another model's; all leaves that do not fit are named.
    """
    wanted = flatten_tree(_abstract(model))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        _refuse(path, _differences(_stored(checkpointer, path), _kinds(wanted, _own_rows(model))))
        # Not strict: tables are cut or filled up to their global shape. All other shapes have been compared.
        how = {
            p: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, strict=False) for p, x in wanted.items()
        }
        args = ocp.args.PyTreeRestore(item=unflatten_tree(wanted), restore_args=unflatten_tree(how))
        return checkpointer.restore(path.absolute(), args=args)


def _abstract(model: Model | Drafter) -> ParameterTree:
    """Shapes, dtypes and shardings of a model's variables; without a mesh all on the first device."""
    mesh = model.settings.parallel.mesh
    first = SingleDeviceSharding(jax.local_devices()[0])

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf if mesh is not None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first)

    variables: dict[str, Any] = {"params": jax.tree.map(placed, abstract_variables(model))}
    if isinstance(model, Model):
        whole = first if mesh is None else NamedSharding(mesh, PartitionSpec())
        ids = jax.ShapeDtypeStruct((model.settings.text.vocab_size,), np.int32, sharding=whole)
        variables["constants"] = {"token_map": ids}
    return variables


def _own_rows(model: Model | Drafter) -> dict[Path, int]:
    return {("params", *path): rows for path, rows in padded_leaves(model).items()}


_Kinds = dict[Path, str]
"""Dtype and shape of each leaf."""


def _kinds(leaves: Mapping[Path, Any], rows: Mapping[Path, int]) -> _Kinds:
    """``rows`` has the leaves of which only so many first rows count."""
    shapes = {p: (rows[p], *leaf.shape[1:]) if p in rows else leaf.shape for p, leaf in leaves.items()}
    return {p: f"{np.dtype(leaf.dtype)} {list(shapes[p])}" for p, leaf in leaves.items()}


def _stored(checkpointer: ocp.Checkpointer, path: pathlib.Path) -> _Kinds:
    found = checkpointer.metadata(path.absolute()).item_metadata if path.is_dir() else None
    if found is None or _ROWS not in (found.custom_metadata or {}):
        raise CheckpointError(f"{path}: no variables in Orbax's format there")
    rows = {tuple(name.split("/")): n for name, n in found.custom_metadata[_ROWS].items()}
    return _kinds(flatten_tree(found.tree), rows)


def _differences(found: _Kinds, wanted: _Kinds) -> list[str]:
    problems = [f"unexpected: {'/'.join(p)}" for p in found if p not in wanted]
    for p, kind in wanted.items():
        if p not in found:
            problems.append(f"missing: {'/'.join(p)}")
        elif found[p] != kind:
            problems.append(f"{'/'.join(p)}: {found[p]}, the model has {kind}")
    return problems


def _refuse(path: pathlib.Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = f"\n  … and {more} more" if more > 0 else ""
        shown = "\n  ".join(problems[:_SHOWN_PROBLEMS])
        raise CheckpointError(f"{path}: {len(problems)} problem(s) with the variables:\n  {shown}{tail}")
