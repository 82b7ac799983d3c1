"""Masters spread over all devices: nothing is lost or held twice. (Steps on a mesh: test_train_mesh.py.)"""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.checkpoint.placement import flatten_tree
from dsv41.config import ConfigError
from dsv41.declared import declared_variables
from dsv41.sharding.mesh import parse_preset
from dsv41.sharding.parallel import Parallel
from dsv41.training.optimizers import OptimizerConfig, make_optimizer, parameter_groups
from dsv41.training.placement import abstract_masters, alike, master_shardings, spread_partition
from dsv41.training.update import Update
from tests.test_sharded_steps import meshed
from tests.test_training_forward import model_of

AXES = {"data": 2, "expert": 2, "tensor": 2}


def mesh_of(axes: dict[str, int]) -> Parallel:
    preset = parse_preset("test", {"axes": axes})
    return preset.parallel(jax.devices()[: preset.devices])


@pytest.mark.parametrize("seed", range(20))
def test_a_spread_array_is_divided_evenly_by_all_axes_that_divide_it(seed):
    rng = np.random.default_rng(seed)
    parallel = mesh_of(AXES)
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 6, 8, 24], rng.integers(1, 4)))
    wanted = [None] * len(shape)
    if shape[0] % 2 == 0 and rng.random() < 0.5:
        wanted[0] = "expert"
    spec = spread_partition(PartitionSpec(*wanted), shape, parallel)
    where = NamedSharding(parallel.mesh, spec)
    pieces = where.devices_indices_map(shape).values()
    count = np.zeros(shape, int)
    for index in {str(piece): piece for piece in pieces}.values():
        count[index] += 1
    assert (count == 1).all()
    used = [axis for names in spec for axis in ((names,) if isinstance(names, str) else names or ())]
    assert len(used) == len(set(used))
    assert math.prod(shape) == math.prod(where.shard_shape(shape)) * 2 ** len(used)
    # An axis stays out only where no dimension's part is even.
    assert len(used) == 3 or all(n % 2 for n in where.shard_shape(shape))
    assert spec[0] == wanted[0] or wanted[0] is None or spec[0][0] == wanted[0]


def test_an_axis_lies_inside_those_that_were_there_on_the_largest_part():
    parallel = mesh_of({"data": 2, "expert": 4})
    assert spread_partition(PartitionSpec("data", None), (16, 4), parallel) == PartitionSpec(("data", "expert"), None)
    assert spread_partition(PartitionSpec("data"), (16, 12), parallel) == PartitionSpec("data", "expert")
    assert spread_partition(PartitionSpec(), (6, 3), parallel) == PartitionSpec("data", None)


def test_no_master_is_whole_on_a_device():
    """All but those that no axis divides; and the optimiser's state lies with them."""
    model = meshed(model_of(), AXES)
    masters, where = abstract_masters(model), master_shardings(model)
    sizes = {
        path: (leaf.size, math.prod(where[path].shard_shape(leaf.shape)))
        for path, leaf in flatten_tree(masters).items()
    }
    whole, part = map(sum, zip(*sizes.values(), strict=True))
    assert whole / 8 <= part < 1.01 * whole / 8
    state = jax.eval_shape(update(model).optimizer.init, masters)
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(alike(state, where)), strict=True
    ):
        if leaf.size > 10_000:
            assert sharding.shard_shape(leaf.shape) != leaf.shape, path


def update(model) -> Update:
    declared = declared_variables(model)
    config = OptimizerConfig()
    optimizer = make_optimizer(config, declared, 0.01, model.settings.parallel)
    return Update.of(optimizer, parameter_groups(config, declared))


def test_momenta_may_be_kept_in_bfloat16():
    model, masters = model_of(), abstract_masters(model_of())
    declared = declared_variables(model)
    kept = make_optimizer(OptimizerConfig(momentum_dtype="bfloat16"), declared, 0.01)
    state = jax.eval_shape(kept.init, masters)
    updates, after = jax.eval_shape(kept.update, masters, state, masters)
    for name in ("muon", "table", "engram_table"):
        momenta = [x for x in jax.tree.leaves(state[2].inner_states[name]) if x.ndim]
        assert momenta
        assert {x.dtype for x in momenta} == {np.dtype("bfloat16")}
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {np.dtype("float32")}
    with pytest.raises(ConfigError, match=r"optimizer\.momentum_dtype: 'float16' is neither"):
        OptimizerConfig(momentum_dtype="float16")
