"""The parameter tree that the modules declare: logical axes, and agreement with the public layout."""

from __future__ import annotations

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from dsv41.checkpoint import abstract_parameters
from dsv41.checkpoint.placement import flatten_tree
from dsv41.config import load_config
from dsv41.declared import abstract_variables, declared_variables
from dsv41.model import Model
from dsv41.settings import Settings
from tests.conftest import GOLDEN

OFFICIAL = pathlib.Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash"
CONFIGS = [OFFICIAL, GOLDEN / "mini8" / "fp8", GOLDEN / "tiny40" / "f32"]


@pytest.mark.parametrize("directory", CONFIGS, ids=lambda path: "-".join(path.parts[-2:]))
def test_modules_declare_exactly_the_public_tensors(directory: pathlib.Path):
    """Every tensor of the text model has its leaf, of the stored shape and dtype, and no leaf is without a tensor."""
    config = load_config(directory)
    storage = "packed" if config.quantization else "float32"
    wanted = flatten_tree(abstract_parameters(config, parts=("text",), storage=storage))
    declared = flatten_tree(abstract_variables(Model(Settings.default(config))))
    assert declared.keys() == wanted.keys()
    for path, leaf in declared.items():
        assert (leaf.shape, leaf.dtype) == (wanted[path].shape, wanted[path].dtype), path


def test_every_parameter_names_its_axes():
    settings = Settings.default(load_config(OFFICIAL))
    boxed = {"params": declared_variables(Model(settings))}
    is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)  # noqa: E731
    leaves = jax.tree_util.tree_flatten_with_path(boxed["params"], is_leaf=is_box)[0]
    named = set()
    for path, leaf in leaves:
        where = jax.tree_util.keystr(path)
        assert isinstance(leaf, nn.LogicallyPartitioned), where
        assert len(leaf.names) == leaf.value.ndim, where
        named |= set(leaf.names)
    # What a mesh must be able to split, and the loops' own axes.
    assert named >= {"vocab", "embed", "heads", "o_groups", "experts", "index_heads", "engram_rows", "layers"}
    depth = {jax.tree_util.keystr(path): leaf.names.count("layers") for path, leaf in leaves}
    assert max(depth.values()) == 2


def test_a_padded_row_of_any_token_embeds_to_zero(smooth_mini8):
    model, variables = smooth_mini8
    tokens = jnp.asarray([[5, -1, 2**31 - 1]], jnp.int32)
    valid = jnp.asarray([[True, False, False]])
    rows = model.apply(variables, tokens, valid, method=lambda m, t, v: m.embed(t, v))
    assert rows[0, 0].any()
    assert not rows[0, 1:].any()
