"""The comparison of kernels with XLA: what it runs, and that it sees a kernel that is wrong."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from dsv41.checkpoint import RandomSource, abstract_parameters, parameter_path, random_parameters
from dsv41.checkpoint.placement import flatten_tree, unflatten_tree
from dsv41.config import load_config
from dsv41.layer_table import Mode, layer_table
from dsv41.loading import load_variables
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.shallow import one_of_each_group, one_of_each_kind
from dsv41.verification.kernels import Extent, common_share, compare_back_ends
from dsv41.verification.table import failed
from pallas_kernels import backend
from pallas_kernels.sparse_attention import xla
from tests.conftest import GOLDEN
from tests.helpers import SMALL_LAYOUT, TWO_LAYERS, mini8_config, with_text

OFFICIAL = pathlib.Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash"


def coarse_attention(*args, scale, **kwargs):
    """A kernel with an error that a glance at the output would miss: logits off by a tenth."""
    return xla.sparse_attention(*args, scale=scale * 1.1, **kwargs)


def coarse_attention_unsupported(*args, **kwargs):
    return None


def test_one_layer_of_each_kind():
    config = one_of_each_kind(load_config(OFFICIAL))
    kinds = [row.kind for row in layer_table(load_config(OFFICIAL).text).layers]
    mine = [row.kind for row in layer_table(config.text).layers]
    assert len(mine) == len(set(mine))
    assert set(mine) == set(kinds)
    modes = [Mode.WINDOW, Mode.FULL, Mode.REUSE, Mode.FULL, Mode.REUSE, Mode.REINDEX]
    assert [kind.mode for kind in mine] == modes
    assert config.text.hidden_size == 5120
    groups = one_of_each_group(load_config(OFFICIAL))
    assert groups.text.num_hidden_layers == 16
    modes = [row.kind.mode for row in layer_table(groups.text).layers]
    assert (
        modes
        == [Mode.WINDOW] * 2
        + [Mode.FULL]
        + [Mode.REUSE] * 5
        + [Mode.FULL]
        + [Mode.REUSE] * 3
        + [Mode.REINDEX]
        + [Mode.REUSE] * 3
    )


def test_common_share():
    a = np.array([[[3, -1, 5], [0, 1, 2]]])
    assert common_share(a, a[..., ::-1]) == 1
    assert common_share(a, np.array([[[5, 4, 3], [-1, -1, 0]]])) == 3 / 4
    # An entry of another row is not in common, and −1 is never.
    assert common_share(a, np.array([[[0, 1, 2], [3, 5, -1]]])) == 0
    assert common_share(np.full((1, 1, 3), -1), a[:, :1]) == 0
    assert common_share(a, np.full_like(a, -1)) == 1


def test_an_extent_fits_the_model():
    assert Extent().within(2**20) == Extent()
    small = Extent().within(256)
    assert (small.chunk, small.context) == (64, 256 - 64 - small.steps)


def test_a_wrong_kernel_is_seen(monkeypatch):
    model = Model(Settings.default(with_text(mini8_config(), **SMALL_LAYOUT | TWO_LAYERS)))
    text = model.settings.text
    ids = np.arange(text.vocab_size, dtype=np.int32) % np.int32(text.engram_compressed_vocab_size)
    variables = load_variables(model, RandomSource(model.settings.config, 0), ids)
    monkeypatch.setattr(
        backend, "OPERATIONS", {name: {"xla": table["xla"]} for name, table in backend.OPERATIONS.items()}
    )
    extent = Extent(rows=1, context=8, chunk=8, steps=0)
    stages = []
    rows = compare_back_ends(model, variables, "xla", extent, stages.append)
    assert stages[-1] == "prefill chunk"
    held = [row for row in rows if row.limit is not None]
    assert held
    assert all(row.passed for row in held)
    # The yardstick is there: embeddings moved by a step move the results, by less than the results are.
    assert all(0 < row.limit < 1 for row in held if row.measure == "relative RMS")
    assert max(row.error for row in rows if row.measure == "relative RMS") == 0

    backend.OPERATIONS["sparse_attention"]["gpu"] = f"{__name__}:coarse_attention"
    rows = compare_back_ends(model, variables, "gpu", extent)
    wrong = [row.name for row in failed(rows)]
    assert wrong[0] == "logits, selection forced"
    assert all(name.startswith(("streams after layer", "entries chosen by layer")) for name in wrong[1:])
    assert "gpu" in backend.report()["sparse_attention"]


@pytest.mark.parametrize("flavour", ["fp8", "f32"])
def test_random_parameters_are_distributed_as_the_random_checkpoint(flavour):
    config = load_config(GOLDEN / "mini8" / flavour)
    source, whole = (
        RandomSource(config, 0),
        flatten_tree(abstract_parameters(config, ("text",), "packed" if flavour == "fp8" else "float32")),
    )
    names = ["layers.3.ffn.experts.0.w2.weight", "layers.3.attn.wq_a.weight", "head.weight"]
    if flavour == "fp8":
        names += ["layers.3.ffn.experts.0.w2.scale", "layers.3.attn.wq_a.scale"]
    places = {name: parameter_path(config, name) for name in names}
    drawn = flatten_tree(
        random_parameters(config, unflatten_tree({path: whole[path] for path, _ in places.values()}), 1)
    )
    for name, (path, index) in places.items():
        leaf = drawn[path]
        assert (leaf.shape, leaf.dtype) == (whole[path].shape, whole[path].dtype)
        mine, theirs = np.asarray(leaf[index]), source.read(name)
        assert mine.shape == theirs.shape
        if leaf.dtype.itemsize > 1:
            mine, theirs = mine.astype(np.float64), theirs.astype(np.float64)
            np.testing.assert_allclose(mine.mean(), theirs.mean(), atol=0.1 * theirs.std())
            np.testing.assert_allclose(mine.std(), theirs.std(), rtol=0.1)
            continue
        # The shares of the codes; each tensor here has hundreds at least.
        shares = [np.bincount(x.view(np.uint8).ravel(), minlength=256) / x.size for x in (mine, theirs)]
        codes = np.count_nonzero(shares[0] + shares[1])
        # Twice what so many draws differ by.
        assert np.abs(shares[0] - shares[1]).sum() < 2 * np.sqrt(codes / mine.size), name
