"""Random weights in place of a checkpoint: the same for a seed however they are read, and as lively as real ones."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from dsv41.checkpoint import RandomSource, abstract_parameters, checkpoint_layout, load_checkpoint
from dsv41.checkpoint.decode import decode_rows
from dsv41.checkpoint.placement import flatten_tree
from tests.checkpoints import bits, float_config, golden_reader, quantized_config


def test_random_values_do_not_depend_on_the_slicing():
    source = RandomSource(quantized_config("mini8"), seed=3)
    for name in ("embed.weight", "layers.1.engram.embed.weight", "layers.2.ffn.experts.1.w1.weight", "norm.weight"):
        whole = source.read(name)
        pieces = [source.read(name, slice(i, min(i + 7, len(whole)))) for i in range(0, len(whole), 7)]
        assert bits(np.concatenate(pieces)) == bits(whole)
    text = dataclasses.replace(quantized_config("mini8").text, vocab_size=10_007)
    large = RandomSource(dataclasses.replace(quantized_config("mini8"), text=text), seed=3)
    whole = large.read("embed.weight")
    assert bits(large.read("embed.weight", slice(2040, 4100))) == bits(whole[2040:4100])
    assert bits(large.read("embed.weight", slice(9_000, 10_007))) == bits(whole[9_000:])


def test_random_values_depend_on_seed_and_name():
    config = quantized_config("mini8")
    a, b = RandomSource(config, seed=3), RandomSource(config, seed=4)
    for name in a.specs():
        if math.prod(a.specs()[name][1]) > 64:
            assert bits(a.read(name)) == bits(RandomSource(config, seed=3).read(name)), name
            assert bits(a.read(name)) != bits(b.read(name)), name
    assert bits(a.read("layers.0.hc_attn_fn")) != bits(a.read("layers.1.hc_attn_fn"))


def test_random_values_are_pinned():
    """The same seed must give the same model in every version of the libraries."""
    source = RandomSource(quantized_config("mini8"), seed=0)
    assert source.read("norm.weight", slice(0, 4)).astype(np.float32).tolist() == [1.078125, 0.8125, 1.140625, 1.21875]
    assert source.read("layers.0.attn.wq_a.weight")[0, :4].astype(np.float32).tolist() == [-16.0, -22.0, 64.0, 16.0]
    assert source.read("layers.0.ffn.experts.0.w1.weight")[0, :4].tolist() == [17, 62, 49, 74]


def test_random_weights_have_the_golden_spread():
    """Of each kind of tensor, over all layers: mean and deviation near those of a model that is known to be lively."""
    config = float_config("tiny40")
    target = abstract_parameters(config, storage="float32")
    kinds: dict[str, list[list[np.ndarray]]] = {}
    for i, source in enumerate((golden_reader("tiny40"), RandomSource(quantized_config("tiny40"), seed=0))):
        for path, leaf in flatten_tree(load_checkpoint(source, config, target)).items():
            kind = "/".join(p for p in path if not re.match(r"(encoder|decoder|groups|runs|engram|stages|blocks)", p))
            kinds.setdefault(kind, [[], []])[i].append(np.asarray(leaf, np.float64).ravel())
    compared = 0
    for kind, pair in kinds.items():
        golden, ours = map(np.concatenate, pair)
        if golden.size < 100:  # too few to estimate a deviation from
            continue
        assert ours.std() == pytest.approx(golden.std(), rel=0.35), kind
        assert ours.mean() == pytest.approx(golden.mean(), abs=0.3 * float(golden.std()) + 0.05), kind
        compared += 1
    assert compared > 60


def test_random_scales_keep_the_intended_deviation():
    config = quantized_config("mini8")
    text = dataclasses.replace(config.text, hidden_size=1024, moe_intermediate_size=1024)
    config = dataclasses.replace(config, text=text)
    source = RandomSource(config, seed=0)
    for name in (
        "layers.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.shared_experts.w1.weight",
        "layers.1.engram.wkv.weight",
    ):
        spec = checkpoint_layout(config)[name]
        scales = source.read(spec.scale_name)
        assert len(np.unique(scales)) == 3
        quantised = decode_rows(spec, source.read(name), scales, 0)
        plain = RandomSource(dataclasses.replace(config, quantization=None), seed=0).read(name).astype(np.float32)
        assert quantised.std() == pytest.approx(plain.std(), rel=0.05), name
        assert abs(quantised.mean()) < 0.02 * quantised.std()
