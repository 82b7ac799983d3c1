"""The byte n-gram baseline: cases worked out by hand, and what every smoothed model must satisfy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.evaluation.ngram import END, MAX_ORDER, SYMBOLS, ByteModel, bits_per_byte

A, B, C = b"abc"


def gram(*symbols: int) -> np.ndarray:
    key = 0
    for symbol in symbols:
        key = key * SYMBOLS + symbol
    return np.array([key])


def test_order_one_by_hand():
    # a, b and the end, once each; every discount is a half.
    model = ByteModel([b"ab"], 1)
    rest = (3 * 0.5 / 3) / SYMBOLS
    seen, unseen = 0.5 / 3 + rest, rest
    for symbol, expected in ((A, seen), (B, seen), (END, seen), (C, unseen)):
        assert model.probabilities(gram(symbol)) == pytest.approx(expected)
    assert model.bits([b"ac"]) == pytest.approx(-math.log2(seen * unseen * seen))


def test_order_two_by_hand():
    # Pairs (end a), (a a), (a b), (b end), once each. Different predecessors: a 2, b 1, end 1.
    model = ByteModel([b"aab"], 2)
    rest = (3 * 0.5 / 4) / SYMBOLS
    a, b, end, other = (2 - 0.5) / 4 + rest, 0.5 / 4 + rest, 0.5 / 4 + rest, rest
    assert model.probabilities(gram(A, A)) == pytest.approx(0.5 / 2 + (2 * 0.5 / 2) * a)
    assert model.probabilities(gram(A, B)) == pytest.approx(0.5 / 2 + (2 * 0.5 / 2) * b)
    assert model.probabilities(gram(A, C)) == pytest.approx((2 * 0.5 / 2) * other)
    assert model.probabilities(gram(B, END)) == pytest.approx(0.5 / 1 + 0.5 * end)
    assert model.probabilities(gram(END, A)) == pytest.approx(0.5 / 1 + 0.5 * a)
    assert model.probabilities(gram(C, B)) == pytest.approx(b)  # a context never seen


def test_lower_orders_count_different_predecessors():
    # Pairs: (end a) 2, (a b) 2, (b end) 3, (end c) 1, (c b) 1. So b occurs three times, but after a and c only.
    model = ByteModel([b"ab", b"ab", b"cb"], 2)
    y = 2 / (2 + 2 * 2)
    d1, d2, d3 = 1 - 2 * y * 2 / 2, 2 - 3 * y * 1 / 2, 3
    rest = (4 * 0.5 / 5) / SYMBOLS
    b, end = (2 - 0.5) / 5 + rest, (1 - 0.5) / 5 + rest
    assert model.probabilities(gram(A, B)) == pytest.approx((2 - d2) / 2 + d2 / 2 * b)
    assert model.probabilities(gram(C, B)) == pytest.approx((1 - d1) / 1 + d1 * b)
    assert model.probabilities(gram(B, END)) == pytest.approx((3 - d3) / 3 + d3 / 3 * end)


def test_discounts_are_estimated_from_the_counts_of_counts():
    # Order 1: six symbols once, three twice, two three times, one four times, the ends twelve times.
    model = ByteModel(
        [*(bytes([i]) for i in range(6)), *(bytes([i, i]) for i in (6, 7, 8)), b"kkk", b"lll", b"mmmm"], 1
    )
    y = 6 / (6 + 2 * 3)
    d1, d2, d3 = 1 - 2 * y * 3 / 6, 2 - 3 * y * 2 / 3, 3 - 4 * y * 1 / 2
    total = 6 + 6 + 6 + 4 + 12
    rest = (6 * d1 + 3 * d2 + 4 * d3) / total / SYMBOLS
    for symbol, count, d in ((0, 1, d1), (6, 2, d2), (ord("k"), 3, d3), (ord("m"), 4, d3), (END, 12, d3)):
        assert model.probabilities(gram(symbol)) == pytest.approx((count - d) / total + rest), count


def test_some_discount_is_always_left():
    # a and the end once, b twice, c three times, five symbols four times: the estimate for three and more is −7.
    model = ByteModel([b"abbcccddddeeeeffffgggghhhh"], 1)
    rest = (2 * 0.5 + 0.5 + 6 * 0.05) / 27 / SYMBOLS
    assert model.probabilities(gram(ord("d"))) == pytest.approx((4 - 0.05) / 27 + rest)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=12), min_size=1, max_size=6),
    st.integers(1, MAX_ORDER),
    st.lists(st.sampled_from([0, 65, 66, 255, END]), min_size=MAX_ORDER, max_size=MAX_ORDER),
)
def test_probabilities_are_positive_and_sum_to_one(documents, order, context):
    model = ByteModel(documents, order)
    grams = np.concatenate([gram(*context[: order - 1], symbol) for symbol in range(SYMBOLS)])
    probabilities = model.probabilities(grams)
    assert probabilities.min() > 0
    assert probabilities.sum() == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=4), st.integers(1, 5))
def test_code_length_is_the_sum_over_bytes_and_ends(documents, order):
    model = ByteModel([b"abcab", b"bca"], order)
    total = 0.0
    for document in documents:
        symbols = [END] * (order - 1) + [*document, END]
        for at in range(order - 1, len(symbols)):
            total -= math.log2(model.probabilities(gram(*symbols[at - order + 1 : at + 1]))[0])
    assert model.bits(documents) == pytest.approx(total)


def test_bits_per_byte_of_text():
    text = "ein Käse "
    held_out = [text * 30]
    repeated = bits_per_byte([text * 200], held_out)
    assert repeated < 0.1 < bits_per_byte([text[::-1] * 200], held_out)
    assert repeated == bits_per_byte([(text * 200).encode()], [held_out[0].encode()])
    # Of uniformly drawn bytes nothing can be learnt: eight bits each, and a little for the counts' noise.
    noise = np.random.default_rng(0).integers(0, 256, 60_000, np.uint8).tobytes()
    assert 8 < bits_per_byte([noise[:50_000]], [noise[50_000:]], 1) < 8.05


def test_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="order: 8"):
        ByteModel([b"a"], 8)
    with pytest.raises(ValueError, match="documents: none"):
        bits_per_byte([], ["a"])
    with pytest.raises(ValueError, match="held_out: 1 documents without a byte"):
        bits_per_byte(["a"], [""])
