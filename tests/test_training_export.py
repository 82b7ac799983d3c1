"""From a training run to a checkpoint: what training rounded in passing, stored rounded; and runs' own parameters."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from dsv41.checkpoint import CheckpointError, CheckpointReader, RandomSource, checkpoint_layout, copy_checkpoint
from dsv41.checkpoint.placement import ParameterTree, flatten_tree, parameter_place
from dsv41.config import ModelConfig, load_config
from dsv41.layers.dspark import Drafter
from dsv41.loading import load_drafter, load_variables, random_variables
from dsv41.model import Model, TokenBatch
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.state.request import create_sequential_state
from dsv41.steps.decode import forward_tokens
from dsv41.training import build
from dsv41.training.checkpoints import Checkpoints, restore_parameters
from dsv41.training.config import parse_config
from dsv41.training.export import export_checkpoint, export_drafter
from dsv41.training.forward import TrainBatch, forward
from dsv41.training.initial import initial_parameters
from dsv41.training.placement import abstract_masters, as_declared, spread
from dsv41.training.update import Update, masters
from tests.conftest import GOLDEN
from tests.helpers import SMALL_LAYOUT, random_tokens, with_text
from tests.test_sharded_steps import WIDE, meshed

# A loop of two Full layers and one with a candidate pool, and a drafter.
LAYOUT = SMALL_LAYOUT | {
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "compress_ratios": (2, 2, 1, 0),
    "index_source_layer_ids": (0, 1, 2),
    "engram_layer_ids": (0,),
    "dspark_target_layer_ids": (2,),
}
LENGTH = 48


@functools.cache
def config() -> ModelConfig:
    """Quantised weights and float32 activations, in which hardly a rounding falls the other way."""
    quantised = with_text(load_config(GOLDEN / "mini8" / "fp8"), **LAYOUT)
    return dataclasses.replace(quantised, dtype="float32")


def training(config: ModelConfig) -> Settings:
    return Settings.for_training(config, RoundingPolicy.preset("full"), "nothing")


def trained(params: ParameterTree) -> ParameterTree:
    """Masters between the values that formats have."""
    rng = np.random.default_rng(0)

    def moved(x: jax.Array) -> jax.Array:
        return jnp.asarray(np.asarray(x) * (1 + 0.1 * rng.normal(size=x.shape)), jnp.float32)

    return jax.tree.map(moved, masters(params))


@dataclasses.dataclass
class Exported:
    """Two trained modules, and where their checkpoint is."""

    model: Model
    drafter: Drafter
    params: ParameterTree
    drafter_params: ParameterTree
    token_map: np.ndarray
    directory: pathlib.Path


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Exported:
    model, drafter = Model(training(config())), Drafter(training(config()))
    drawn = random_variables(model, 3, None)
    params = trained(drawn["params"])
    drafter_params = trained(load_drafter(drafter, RandomSource(config(), 1))["params"])
    directory = tmp_path_factory.mktemp("run") / "export"
    export_checkpoint(directory, model, params, drafter, drafter_params)
    assert load_config(directory) == config()
    return Exported(model, drafter, params, drafter_params, np.asarray(drawn["constants"]["token_map"]), directory)


def test_the_packed_model_gives_the_logits_that_training_saw(exported):
    tokens = random_tokens(0, 2, LENGTH)

    @jax.jit
    def in_training(params: ParameterTree, token_map: jax.Array) -> jax.Array:
        variables = {"params": params, "constants": {"token_map": token_map}}
        batch = TrainBatch(tokens, jnp.full_like(tokens, -1), jnp.zeros_like(tokens))
        hidden = forward(exported.model, variables, batch).hidden
        return exported.model.apply(variables, hidden, method="logits")

    packed = Model(Settings.default(config(), page_tokens=8))
    variables = load_variables(packed, CheckpointReader(exported.directory), exported.token_map)

    @jax.jit
    def in_inference(variables: dict) -> jax.Array:
        state = create_sequential_state(packed.settings, 2, LENGTH)
        batch = TokenBatch(jnp.asarray(tokens), jnp.full(2, LENGTH, jnp.int32))
        return forward_tokens(packed, variables, state, batch)[1]

    ours, wanted = in_inference(variables), in_training(exported.params, exported.token_map)
    error = np.abs(np.asarray(ours) - np.asarray(wanted)).max(-1)
    # The same values in the same order: only where a compiler rounds a sum another way may a rounding fall so too.
    assert np.median(error) < 1e-5
    assert np.mean(error < 1e-3) > 0.8


def exponents(amax: np.ndarray, largest: float) -> np.ndarray:
    return np.ceil(np.log2(amax.astype(np.float64) / largest)).astype(int)


def as_stored(values: np.ndarray, kind: str, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and E8M0 bytes of a matrix, as the formats are defined (model.md, 'Numbers')."""
    rows, columns = block
    blocks = values.reshape(values.shape[0] // rows, rows, values.shape[1] // columns, columns)
    amax = np.abs(blocks).max((1, 3))
    if kind == "F8_E4M3":
        exponent = exponents(np.maximum(amax, 1e-4), 448)
    else:
        exponent = exponents(np.maximum(amax, 6 * 2.0**-126), 6)
    scaled = (blocks / np.exp2(exponent)[:, None, :, None]).astype(np.float32).reshape(values.shape)
    if kind == "F8_E4M3":
        return scaled.astype(ml_dtypes.float8_e4m3fn), (exponent + 127).astype(np.uint8)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


def assert_stored(reader: CheckpointReader, config: ModelConfig, leaves: dict, part: str) -> int:
    """Every tensor of a part holds these values, rounded where it is quantised; how many are."""
    quantised = 0
    for name, spec in checkpoint_layout(config).items():
        if spec.part != part or spec.dtype == "F8_E8M0":
            continue
        place = parameter_place(config, name)
        value = np.asarray(leaves[place.path][place.index])
        if spec.block is None:
            np.testing.assert_array_equal(reader.read(name), value, err_msg=name)
            continue
        codes, scales = as_stored(value.astype(np.float32), spec.dtype, spec.block)
        np.testing.assert_array_equal(reader.read(spec.scale_name), scales, err_msg=name)
        np.testing.assert_array_equal(reader.read(name).view(np.uint8), codes.view(np.uint8), err_msg=name)
        quantised += 1
    return quantised


def test_codes_and_scales_are_those_of_the_masters(exported):
    reader = CheckpointReader(exported.directory)
    experts = config().text.num_hidden_layers * config().text.n_routed_experts * 3
    assert assert_stored(reader, config(), flatten_tree(exported.params), "text") > experts
    drafter = flatten_tree({"dspark": exported.drafter_params})
    assert assert_stored(reader, config(), drafter, "dspark") > config().text.dspark_n_routed_experts * 3


def test_exporting_what_was_exported_changes_no_value(exported, tmp_path):
    """A largest value that rounds down to half of a scale's range takes the scale below: codes may differ."""

    def read(directory: pathlib.Path) -> tuple[ParameterTree, ParameterTree]:
        reader = CheckpointReader(directory)
        backbone = load_variables(exported.model, reader, exported.token_map)["params"]
        return backbone, load_drafter(exported.drafter, reader)["params"]

    once = read(exported.directory)
    export_checkpoint(tmp_path / "again", exported.model, once[0], exported.drafter, once[1])
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "again"), once)


def test_floats_are_exported_as_they_are(exported, tmp_path):
    export_checkpoint(tmp_path / "plain", exported.model, exported.params, plain=True)
    stored = load_config(tmp_path / "plain")
    assert stored == dataclasses.replace(config(), quantization=None)
    leaves = flatten_tree(exported.params)
    assert assert_stored(CheckpointReader(tmp_path / "plain"), stored, leaves, "text") == 0


class _Wide:
    """Random weights whose vision blocks are stored in float32."""

    def __init__(self) -> None:
        self._source = RandomSource(config(), 2)

    def specs(self) -> dict:
        return {
            name: ("F32" if name.startswith("vision.") else dtype, shape)
            for name, (dtype, shape) in self._source.specs().items()
        }

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        value = self._source.read(name, rows)
        return value.astype(np.float32) if name.startswith("vision.") else value


def test_a_run_s_export_has_the_vision_part_that_it_began_with(exported, tmp_path, monkeypatch):
    copy_checkpoint(_Wide(), config(), tmp_path / "source")
    file = {
        "model": {"directory": str(tmp_path / "source")},
        "data": {"length": LENGTH, "batch_rows": 1, "corpus": "kjv"},
        "schedule": {"peak": 0.1, "warmup": 0, "decay_from": 1, "steps": 1},
        "trainer": {"steps": 1},
    }
    constants = {"token_map": exported.token_map}
    monkeypatch.setattr(build, "first_masters", lambda *_: (exported.params, constants))
    parts = build._backbone(parse_config(file, build.TrainConfig), exported.model, None, None)
    before, vision = CheckpointReader(tmp_path / "source"), ("vision.", "aligner.", "image_")
    for plain in (False, True):
        parts.export(parts.state, tmp_path / str(plain), plain)
        after = CheckpointReader(tmp_path / str(plain))
        names = {name for name in after.specs() if name.startswith(vision)}
        assert names == {name for name in before.specs() if name.startswith(vision)}
        for name in names:
            assert after.specs()[name] == before.specs()[name]
            assert after.read(name).tobytes() == before.read(name).tobytes(), name
    assert not any(name.startswith(vision) for name in CheckpointReader(exported.directory).specs())


def test_another_drafter_leaves_all_else_to_the_bit(tmp_path):
    source = GOLDEN / "mini8" / "fp8"
    own, before = load_config(source), CheckpointReader(source)
    drafter = Drafter(training(own))
    params = trained(load_drafter(drafter, before)["params"])
    export_drafter(tmp_path / "out", source, drafter, params)
    after = CheckpointReader(tmp_path / "out")
    assert load_config(tmp_path / "out") == own
    assert after.specs() == before.specs()
    changed = set()
    for name in before.specs():
        if before.read(name).tobytes() != after.read(name).tobytes():
            changed.add(name.split(".")[0])
    assert changed == {"mtp"}
    assert any(name.startswith("vision.") for name in before.specs())
    assert assert_stored(after, own, flatten_tree({"dspark": as_declared(drafter, params)}), "dspark")


def test_a_run_s_parameters_come_back_to_the_bit_and_only_to_their_model(exported, tmp_path):
    state = Update(optax.sgd(0.1, momentum=0.9), ()).begin(exported.params)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(7, state, {})
    like = abstract_masters(exported.model)
    jax.tree.map(np.testing.assert_array_equal, restore_parameters(tmp_path, like), exported.params)
    other = Model(training(with_text(config(), moe_intermediate_size=32)))
    with pytest.raises(CheckpointError, match=r"leaves are not of this state(.|\n)*ffn/experts/w1/weight: float32 "):
        restore_parameters(tmp_path, abstract_masters(other))
    with pytest.raises(CheckpointError, match="no checkpoint of a training run"):
        restore_parameters(tmp_path / "nowhere", like)


def test_drawn_parameters_are_the_same_on_every_mesh():
    # A single layer has all kinds of parameters, and each is a program.
    layout = {
        "num_hidden_layers": 1,
        "compress_ratios": (2,),
        **dict.fromkeys(("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"), (0,)),
        "candidate_source_layer_id": 0,
    }
    model = Model(training(with_text(config(), **WIDE | layout)))
    there = meshed(model, {"expert": 2, "tensor": 2})
    one, spread_out = (
        flatten_tree(params) for params in (initial_parameters(model, 5), spread(there, initial_parameters(there, 5)))
    )
    assert one.keys() == spread_out.keys()
    assert len({x.tobytes()[:64] for x in map(np.asarray, one.values()) if x.std() > 0}) > 10
    for path, value in one.items():
        ours = np.asarray(spread_out[path])
        own = tuple(map(slice, value.shape))
        np.testing.assert_array_equal(ours[own], value, err_msg="/".join(path))
        ours = ours.copy()
        ours[own] = 0
        assert not ours.any(), path
