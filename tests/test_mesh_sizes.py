"""Sizes of mesh axes: with every one that divides steps can be built, every other is refused by name."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dsv41.declared import abstract_variables, parameter_partitions
from dsv41.model import Model
from dsv41.sharding.mesh import parse_preset
from dsv41.sharding.requests import check_state
from dsv41.sharding.rules import AXES, MeshError
from dsv41.steps.decode import decode_step
from tests.helpers import random_model
from tests.test_sharded_steps import SLOTS, TABLE_PAGES, WIDE, fresh, meshed

# Layers and their kinds lie along no axis: one layer is divided as all are.
ONE_LAYER = WIDE | {
    "num_hidden_layers": 1,
    "compress_ratios": (1,),
    "kv_source_layer_ids": (0,),
    "index_source_layer_ids": (0,),
    "candidate_source_layer_id": 0,
    "engram_layer_ids": (0,),
}
DEVICES, LARGEST = 8, 16


@pytest.fixture(scope="module")
def wide() -> tuple[Model, dict]:
    return random_model(False, **ONE_LAYER)


def dividing(model: Model, axis: str) -> list[int]:
    """The sizes of an axis that divide all that lies along it."""
    text = model.settings.text
    along = {
        "data": (SLOTS,),
        "expert": (SLOTS, text.n_routed_experts),
        "context": (TABLE_PAGES,),
        "tensor": (
            text.num_attention_heads,
            text.o_groups,
            text.index_n_heads,
            text.moe_intermediate_size,
            text.vocab_size,
        ),
    }
    return [n for n in range(1, LARGEST + 1) if math.gcd(*along[axis]) % n == 0]


def check(model: Model, axes: dict[str, int]) -> None:
    """Divides parameters and a state, of any number of devices.

    Raises:
      MeshError: the mesh does not.
    """
    sizes = parse_preset("test", {"axes": axes}).sizes
    parameter_partitions(model, sizes)
    check_state(sizes, SLOTS, SLOTS * TABLE_PAGES, TABLE_PAGES)


@pytest.mark.parametrize("axis", AXES)
def test_other_sizes_are_refused_by_name(wide, axis: str):
    model, _ = wide
    sizes = dividing(model, axis)
    assert {1, 2, 4, 8} <= set(sizes)
    for size in set(range(1, LARGEST + 1)) - set(sizes):
        with pytest.raises(MeshError, match=rf" of \d+ is not divisible by mesh axes {axis} {size}$"):
            check(model, {axis: size})


def test_all_sizes_that_divide_go_together(wide):
    model, _ = wide
    for sizes in itertools.product(*(dividing(model, axis) for axis in AXES)):
        axes = dict(zip(AXES, sizes, strict=True))
        if axes["data"] * axes["expert"] <= SLOTS:
            check(model, axes)
        else:
            with pytest.raises(MeshError, match=rf"batch of {SLOTS} is not .* data \d+ × expert \d+$"):
                check(model, axes)


def test_steps_are_built_with_every_size(wide):
    """Those that other tests run with chunks alone too."""
    model, variables = wide
    for axis in AXES:
        for size in dividing(model, axis):
            if 1 < size <= DEVICES:
                on_mesh = meshed(model, {axis: size})
                params = {"params": abstract_variables(on_mesh), "constants": variables["constants"]}
                tokens, active = np.zeros(SLOTS, np.int32), np.ones(SLOTS, bool)
                _, logits = decode_step.trace(on_mesh, params, fresh(on_mesh), tokens, active).out_info
                assert logits.shape == (SLOTS, model.settings.text.vocab_size), (axis, size)
