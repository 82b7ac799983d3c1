"""Layers against the reference's unit data, and the roundings between them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.config import load_config
from dsv41.layers.compressor import Compressor
from dsv41.layers.engram import EngramInputs, add_engram, engram_gate
from dsv41.layers.flow import LayerInputs, Step
from dsv41.layers.mhc import (
    Coefficients,
    HyperConnection,
    coefficients,
    first_mix,
    mix_streams,
    sinkhorn,
    update_streams,
)
from dsv41.layers.moe import Router
from dsv41.numerics.rotary import csa_frequencies, rotary_table, rotate, window_frequencies
from dsv41.numerics.rounding import Formats, RoundingPolicy, straight_through
from dsv41.settings import Settings
from dsv41.sharding.split import WHOLE
from dsv41.state.tail import Projections, advance_tails
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat
from pallas_kernels.products import narrow
from tests.helpers import mini8_config, with_text
from tests.safetensors_reader import read_safetensors

ROOT = pathlib.Path(__file__).parent
OFFICIAL = load_config(ROOT.parent / "configs" / "deepseek-v4.1-flash")


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return read_safetensors(ROOT / "data" / "ops" / "ops.safetensors")


def settings_of(**text_fields) -> Settings:
    """Plain float32 settings with some sizes of the text model replaced."""
    return Settings.default(with_text(mini8_config(), **text_fields), cache_rounding=False)


def close(ours: jax.Array, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=tolerance, atol=tolerance)


# Hyper-connections


def test_hyper_connection_coefficients_are_the_references():
    ops = golden()
    mixes, copies = ops["sinkhorn.mixes"], ops["sinkhorn.pre"].shape[-1]
    text = settings_of(hc_mult=copies).text
    # Streams whose statistics are 1 and a projection that picks the mixes out of them give the golden's input.
    rows, width = mixes.shape[-1], 64
    streams = np.zeros((len(mixes), copies, width), np.float32)
    flat = streams.reshape(len(mixes), -1)
    flat[:, :rows] = mixes
    flat[:, -1] = np.sqrt(np.maximum(flat.shape[1] * 1e6 - np.square(mixes).sum(-1), 0))
    inverse = 1 / np.sqrt(np.mean(np.square(flat.astype(np.float64)), axis=-1))
    fn = np.zeros((rows, flat.shape[1]), np.float32)
    fn[np.arange(rows), np.arange(rows)] = 1e3
    np.testing.assert_allclose(inverse, 1e-3, rtol=1e-6)
    connection = HyperConnection(*(jnp.asarray(x) for x in (fn, ops["sinkhorn.base"], ops["sinkhorn.scale"])))
    ours = jax.jit(coefficients, static_argnums=2)(jnp.asarray(streams), connection, text)
    for name in ("pre", "post", "comb"):
        close(getattr(ours, name), ops[f"sinkhorn.{name}"])


def test_sinkhorn_ends_on_the_columns():
    """Columns sum to 1 up to hc_eps; rows only nearly, and the less the fewer iterations."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (50, 4, 4)), jnp.float32)
    rows = []
    for iterations in (2, 5, 20):
        comb = np.asarray(sinkhorn(logits, iterations, 1e-6), np.float64)
        np.testing.assert_allclose(comb.sum(-2), 1, rtol=0, atol=1e-5)
        rows.append(np.abs(comb.sum(-1) - 1).max())
    assert rows[0] > rows[1] > rows[2] > 1e-3


def test_streams_are_mixed_and_updated_as_the_equations_say():
    rng = np.random.default_rng(1)
    h, y = rng.normal(size=(3, 5, 4, 8)).astype(np.float32), rng.normal(size=(3, 5, 8)).astype(np.float32)
    pre, post = rng.random((2, 3, 5, 4)).astype(np.float32)
    comb = rng.random((3, 5, 4, 4)).astype(np.float32)
    close(mix_streams(jnp.asarray(h), jnp.asarray(pre)), np.einsum("bsc,bscd->bsd", pre, h))
    ours = update_streams(jnp.asarray(h), jnp.asarray(y), Coefficients(*map(jnp.asarray, (pre, post, comb))))
    close(ours, post[..., None] * y[..., None, :] + np.einsum("bsij,bsid->bsjd", comb, h))
    np.testing.assert_array_equal(first_mix(jnp.asarray(h)), np.broadcast_to([1, 0, 0, 0], (3, 5, 4)))


# Router


@pytest.mark.parametrize("images", [False, True])
def test_router_is_the_references(images: bool):
    ops = golden()
    settings = settings_of(hidden_size=ops["gate.x"].shape[-1])
    chosen = ops["gate.i_text"].shape[-1]
    router = Router(settings, len(ops["gate.bias"]), chosen)
    params = {name: jnp.asarray(ops[f"gate.{name}"]) for name in ("weight", "bias", "bias_vl")}
    mask = ops["gate.image_mask"].astype(bool) & images
    ours = router.apply({"params": params}, jnp.asarray(ops["gate.x"])[None], jnp.asarray(mask)[None])
    kind = "img" if images else "text"
    np.testing.assert_array_equal(ours.experts[0], ops[f"gate.i_{kind}"])
    close(ours.weights[0], ops[f"gate.w_{kind}"])


# Compressor


def compress(x: np.ndarray, start: int, tail: Projections) -> tuple[np.ndarray, Projections]:
    """Complete latents of the tokens ``x`` ``[batch, query, d]`` from ``start`` on, and the new tail."""
    ops = golden()
    settings = settings_of(hidden_size=x.shape[-1], head_dim=ops["compressor.norm"].size)
    params = {
        "wkv": {"weight": jnp.asarray(ops["compressor.wkv"])},
        "wgate": {"weight": jnp.asarray(ops["compressor.wgate"])},
        "norm": {"weight": jnp.asarray(ops["compressor.norm"])},
    }
    latents, rope, after = _compress(settings, params, jnp.asarray(x), jnp.int32(start), tail)
    complete = (start + x.shape[1]) // 2 - start // 2
    # Each latent is rotated at its own group's first position, however many a step completes.
    cos, _ = rotary_table(jnp.asarray((start // 2 + np.arange(complete)) * 2), csa_frequencies(settings.text))
    np.testing.assert_array_equal(rope[0][:, :complete], np.broadcast_to(cos, (len(x), *cos.shape)))
    return np.asarray(latents[:, :complete]), after


@functools.partial(jax.jit, static_argnums=0)
def _compress(settings: Settings, params: dict, x: jax.Array, start: jax.Array, tail: Projections):
    starts, counts = jnp.full(x.shape[0], start), jnp.full(x.shape[0], x.shape[1])
    tails = {2: jax.tree.map(lambda t: t[None], tail)}
    nothing = dict.fromkeys((field.name for field in dataclasses.fields(Step)), None)
    step = Step(**nothing | {"split": WHOLE, "start": starts, "count": counts, "tails": tails})
    inputs = LayerInputs(None, jnp.int32(0), None, None, None)
    groups = Compressor(settings, 2).apply({"params": params}, x, inputs, step)
    new = {2: jax.tree.map(lambda t: t[None], groups.projections)}
    after = jax.tree.map(lambda t: t[0], advance_tails(tails, new, starts, counts)[2])
    return groups.latents, groups.rope, after


def test_compressor_is_the_references():
    """A prompt of 5 tokens leaves one in the tail, the next token joins it, the one after waits."""
    ops = golden()
    x, width = ops["compressor.x"], ops["compressor.norm"].size
    empty = Projections(*(jnp.full((x.shape[0], 1, width), jnp.nan) for _ in range(2)))
    latents, tail = compress(x[:, :5], 0, empty)
    close(latents, ops["compressor.prefill5"])
    close(tail.kv, ops["compressor.tail_kv_after5"][:, :1])
    close(tail.gate, ops["compressor.tail_score_after5"][:, :1])
    latents, tail = compress(x[:, 5:6], 5, tail)
    close(latents, ops["compressor.step5"])
    latents, tail = compress(x[:, 6:7], 6, tail)
    assert latents.shape[1] == 0
    close(tail.kv, ops["compressor.tail_kv_after7"][:, :1])
    close(tail.gate, ops["compressor.tail_score_after7"][:, :1])


def test_compressor_in_one_step_and_over_a_cut_agree():
    ops = golden()
    x, width = ops["compressor.x"], ops["compressor.norm"].size
    empty = Projections(*(jnp.full((x.shape[0], 1, width), jnp.nan) for _ in range(2)))
    whole, last = compress(x, 0, empty)
    for cut in (1, 2, 5):
        first, tail = compress(x[:, :cut], 0, empty)
        second, tail = compress(x[:, cut:], cut, tail)
        close(np.concatenate([first, second], axis=1), whole)
        close(tail.kv, np.asarray(last.kv))


# Engram's gate


def test_engram_gate_is_the_references():
    ops = golden()
    h = jnp.asarray(ops["engram_gate.h"])
    weight = jnp.asarray(ops["engram_gate.q_weight"] * ops["engram_gate.k_weight"])
    inputs = EngramInputs(
        jnp.asarray(ops["engram_gate.key"]).reshape(h.shape), jnp.asarray(ops["engram_gate.value"]), weight
    )
    for mask, name in ((np.ones(h.shape[:2], bool), "out"), (ops["engram_gate.mask"].astype(bool), "out_masked")):
        gate = engram_gate(h, inputs, jnp.asarray(mask))
        np.testing.assert_allclose(gate, np.where(mask[..., None], ops["engram_gate.gate"], 0), rtol=1e-5, atol=1e-6)
        close(add_engram(h, inputs, gate), ops[f"engram_gate.{name}"])


# Rotary positions


def test_official_frequencies_are_the_references_to_the_bit():
    """Window-only layers: base 10,000 without YaRN; all others: base 160,000 with it, and no softmax factor."""
    ops, text = golden(), OFFICIAL.text
    assert (text.rope_theta, text.compress_rope_theta) == (10_000, 160_000)
    for name, ours in (("window", window_frequencies(text)), ("compress", csa_frequencies(text))):
        np.testing.assert_array_equal(ours, ops[f"rope.{name}.freqs"])
        cos, sin = rotary_table(jnp.asarray(ops["rope.positions"]), ours)
        # One unit in the last place of an angle of the largest position.
        tolerance = float(np.spacing(np.float32(ops["rope.positions"].max()))) + 1e-6
        np.testing.assert_allclose(cos, ops[f"rope.{name}.cos"], rtol=0, atol=tolerance)
        np.testing.assert_allclose(sin, ops[f"rope.{name}.sin"], rtol=0, atol=tolerance)


def test_rotation_and_its_inverse_are_the_references():
    ops = golden()
    x = jnp.asarray(ops["rope.apply_x"])
    table = rotary_table(jnp.arange(x.shape[1]), csa_frequencies(OFFICIAL.text))
    close(rotate(x, table), ops["rope.apply_y"])
    close(rotate(x, table, inverse=True), ops["rope.apply_inverse_y"])
    wide = jnp.concatenate([x * 3, x], axis=-1)
    turned = rotate(wide, table)
    np.testing.assert_array_equal(turned[..., : x.shape[-1]], wide[..., : x.shape[-1]])
    close(turned[..., x.shape[-1] :], ops["rope.apply_y"])
    close(rotate(turned, table, inverse=True), np.asarray(wide))


# Roundings


@pytest.mark.parametrize("fmt", [FP4_E4M3, FP4_E8M0, FP8_E8M0])
def test_straight_through_rounds_the_value_and_keeps_the_gradient(fmt):
    """Clipped values too: an E4M3 scale rounds down, and values beyond ±6 scales clip."""
    x = np.random.default_rng(0).standard_t(2, (4, 64)).astype(np.float32)
    x[0, :16] = np.linspace(5.0, 6.2, 16)  # 6.2 / 6 rounds to a scale of 1: the largest clips at 6
    x[1, :16] = 1e5  # beyond what an E4M3 scale reaches: 448 · 6
    x[2] = 0
    weight = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    @jax.jit
    def value_and_gradient(x):
        value = straight_through(fmt, x)
        return value, jax.grad(lambda x: jnp.sum(straight_through(fmt, x) * weight))(x)

    value, gradient = value_and_gradient(jnp.asarray(x))
    np.testing.assert_array_equal(value, jax.jit(fmt.round)(jnp.asarray(x)))
    assert (np.asarray(value) != x).any()
    np.testing.assert_array_equal(gradient, weight)
    if fmt is FP4_E4M3:
        assert np.asarray(value)[0, 15] == 6
        assert (np.asarray(value)[1, :16] == 2688).all()


def test_each_switch_of_the_policy_is_one_format():
    fields = [field.name for field in dataclasses.fields(Formats)]
    weights = ["expert_weights", "dense_weights"]
    assert [*fields, *weights] == [field.name for field in dataclasses.fields(RoundingPolicy)]
    rounded = {
        "main_kv": FP4_E4M3, "index_keys": FP4_E8M0, "index_queries": FP4_E8M0, "window": FP8_E8M0,
        "activations": FP8_E8M0,
    }  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        plain = DenseFormat(dtype)
        on = Formats.of(RoundingPolicy(), jnp.dtype(dtype))
        assert {name: getattr(on, name) for name in fields} == rounded
        for off in fields:
            formats = Formats.of(RoundingPolicy(**{off: False}), jnp.dtype(dtype))
            assert {n: getattr(formats, n) for n in fields} == rounded | {off: plain}


def test_the_policy_of_a_config():
    """The caches' roundings have one switch; weights and activations are rounded where the checkpoint is quantised."""
    for config, quantised in ((OFFICIAL, True), (mini8_config(), False)):
        for cache in (True, False):
            policy = RoundingPolicy.for_config(config, cache)
            assert policy == RoundingPolicy(cache, cache, cache, cache, quantised, quantised, quantised)


def test_a_rounding_to_bfloat16_survives_compilation():
    """In one fusion with what widens it again.

    A plain pair of casts need not: XLA may keep the excess precision, as it sometimes does.
    """
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)

    @jax.jit
    def rounded_and_widened(x):
        return narrow(x * 1.5, jnp.bfloat16).astype(jnp.float32) * 3 + 1

    wanted = (x * np.float32(1.5)).astype(ml_dtypes.bfloat16).astype(np.float32) * np.float32(3) + np.float32(1)
    ours = np.asarray(rounded_and_widened(jnp.asarray(x)))
    np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6)
    unrounded = x * np.float32(1.5) * np.float32(3) + np.float32(1)
    assert np.abs(ours - unrounded).max() > 1e-3
    assert narrow(jnp.asarray(x), jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow(jnp.asarray(x), jnp.float32), x)
