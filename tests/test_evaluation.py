"""The measuring commands: replay against exact, and the benchmark."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cli import main
from dsv41.config import load_config
from dsv41.declared import abstract_variables
from dsv41.evaluation import speed, widths
from dsv41.evaluation.replay import compare_replay, random_prompts
from dsv41.model import Model, TokenBatch
from dsv41.settings import Settings
from dsv41.state.request import create_state
from dsv41.steps.decode import generate_step
from dsv41.steps.prefill import encode_chunk, exact_chunk
from dsv41.steps.sampling import create_sampler
from pallas_kernels.benchmark import limits
from tests.conftest import GOLDEN
from tests.helpers import SMALL_LAYOUT, random_model, rounding_alike


def test_replay_equals_exact_up_to_the_window_and_keeps_the_memory_beyond(monkeypatch):
    for step in (encode_chunk, exact_chunk):
        monkeypatch.setattr(f"dsv41.inference.prefill.{step.__name__}", rounding_alike(step))
    model, variables = random_model(False, **SMALL_LAYOUT)
    window = model.settings.text.sliding_window
    prompts = random_prompts(model.settings.config, 61, 2, seed=0)
    short = compare_replay(model, variables, prompts, window, chunk=64)
    assert short["max_abs"] < 1e-4
    assert short["same_token"] == 1.0
    long = compare_replay(model, variables, prompts, 61, chunk=64)
    # Random weights: an approximation that changed nothing would mean that both ways were the same code.
    assert 1e-2 < long["mean_abs"] < 1.0
    assert short["same_memory"]
    assert long["same_memory"]
    assert (prompts != model.settings.config.image_token_id).all()


def test_eval_refuses_prompts_beyond_the_model_s_positions(capsys):
    assert main(["eval", "replay", "--checkpoint", str(GOLDEN / "mini8" / "fp8"), "--lengths", "300"]) == 2
    assert "300 exceeds max_position_embeddings 256" in capsys.readouterr().err
    assert main(["eval", "replay", "--checkpoint", str(GOLDEN / "mini8" / "fp8"), "--text", __file__]) == 2
    assert "not the packaged tokenizer's" in capsys.readouterr().err


@pytest.fixture
def two_layers(tmp_path: pathlib.Path) -> pathlib.Path:
    """A model of two window layers, the least that can be timed, with more experts than tokens choose."""
    data = json.loads((GOLDEN / "mini8" / "f32" / "config.json").read_text())
    data["text_config"] |= {
        "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "compress_ratios": [0, 0], "kv_source_layer_ids": [],
        "index_source_layer_ids": [], "candidate_source_layer_id": None, "dspark_target_layer_ids": [],
        "n_routed_experts": 64, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(data))
    return tmp_path


@pytest.fixture
def quick_limits(monkeypatch):
    """The machine's limits are measured at sizes that tell little of it, and once."""
    monkeypatch.setitem(limits._COPY_BYTES, "cpu", 2**22)
    monkeypatch.setitem(limits._MATMUL_SIZE, "cpu", 128)
    monkeypatch.setattr(speed, "_seconds", functools.partial(speed._seconds, repeats=1))


@pytest.mark.usefixtures("quick_limits")
def test_bench_prints_speed_floor_and_compile_time(two_layers, capsys):
    options = ["--batch", "2", "--context", "8", "--steps", "2", "--repeats", "2", "--json"]
    assert main(["bench", str(two_layers), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    (row,) = printed["rows"]
    assert (row["layers"], row["batch"]) == (2, 2)
    # Two tokens a step: the figures must belong together.
    np.testing.assert_allclose(row["decode_tokens_per_s"] * row["step_ms"], 2000, rtol=1e-6)
    np.testing.assert_allclose(row["step_over_floor"], row["step_ms"] / row["floor_ms"], rtol=1e-6)
    assert min(row["prefill_tokens_per_s"], row["trace_s"], row["compile_s"], row["floor_ms"]) > 0
    assert min(printed["limits"]["bytes_per_s"], printed["limits"]["operations_per_s"]) > 0


@pytest.mark.usefixtures("quick_limits")
def test_bench_at_widths_needs_no_prefill(two_layers, capsys):
    options = ["--widths", "--batch", "2", "--context", "8", "--chunk", "4", "--steps", "2", "--repeats", "2", "--json"]
    assert main(["bench", str(two_layers), *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["back_end"], row["layers"], row["batch"], row["context"]) == ("xla", 2, 2, 8)
    np.testing.assert_allclose(row["step_of_floor"], row["step_floor_ms"] / row["step_ms"], rtol=1e-6)
    np.testing.assert_allclose(row["chunk_of_floor"], row["chunk_floor_ms"] / row["chunk_ms"], rtol=1e-6)
    assert min(row["step_ms"], row["chunk_ms"], row["step_floor_ms"], row["chunk_floor_ms"]) > 0


def test_tokens_of_a_random_model_choose_experts_evenly(two_layers):
    """As many of them are touched as the floor assumes."""
    model = widths.shallow_model(load_config(two_layers))
    variables = widths.balanced_variables(model)
    tokens = 32
    batch = TokenBatch(jnp.arange(3, 3 + tokens)[None], jnp.full(1, tokens, jnp.int32))
    state = widths.filled_state(model.settings, 1, 8, tokens)
    encode = functools.partial(model.apply, method="encode", mutable=["intermediates"])
    _, found = jax.jit(encode)(variables, state, batch)
    chosen = [leaf for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0] if "router_idx" in str(path)]
    touched = [len(np.unique(layer)) for leaf in chosen for layer in np.asarray(leaf).reshape(-1, tokens * 2)]
    assert len(touched) == 2
    np.testing.assert_allclose(touched, 64 * (1 - (1 - 2 / 64) ** tokens), rtol=0.15)


def test_a_filled_state_is_one_after_a_prompt(smooth_mini8):
    """Positions, lengths and windows are those of a prefilled state; every entry is finite."""
    settings = smooth_mini8[0].settings
    context = settings.text.sliding_window + 5
    state = widths.filled_state(settings, 2, context, 3)
    window = np.asarray(state.encoder_ring.positions)
    np.testing.assert_array_equal(np.sort(window, axis=1), np.tile(np.arange(5, context), (2, 1)))
    slots = np.arange(settings.text.sliding_window)
    np.testing.assert_array_equal(window % settings.text.sliding_window, np.tile(slots, (2, 1)))
    np.testing.assert_array_equal(state.length, context)
    assert state.page_table.shape[1] * settings.page_tokens >= context + 3
    for pool in state.memory.values():
        assert np.isfinite(np.asarray(settings.formats.main_kv.decode(pool.main))).all()
        assert np.asarray(settings.formats.index_keys.decode(pool.index)).std() > 0.5
    # As many positions in all, so that the same programs draw it.
    short = np.asarray(widths.filled_state(settings, 2, 3, context).encoder_ring.positions)
    np.testing.assert_array_equal(np.sort(short[0])[-4:], [-1, 0, 1, 2])


def test_the_program_does_not_grow_with_depth():
    """Loops over repeating groups: 40 layers lower to about as much code as 8."""

    def lines(name: str) -> int:
        settings = Settings.default(load_config(GOLDEN / name / "f32"))
        model = Model(settings)
        variables = {
            "params": abstract_variables(model),
            "constants": {"token_map": jax.ShapeDtypeStruct((settings.text.vocab_size,), jnp.int32)},
        }
        state = jax.eval_shape(lambda: create_state(settings, 1, 4, 4))
        active = jax.ShapeDtypeStruct((1,), bool)
        lowered = generate_step.lower(model, variables, state, jax.eval_shape(lambda: create_sampler(1)), active)
        return lowered.as_text().count("\n")

    shallow, deep = lines("mini8"), lines("tiny40")
    assert deep < 1.25 * shallow
