"""Exact top-k on Hopper in Pallas-Triton: a tree of maxima, then a search from its top.

Order elements by (value, then lower index). A group of consecutive elements is as good as its best element, and the k
best elements lie in the k best groups, whatever ties there are: were one in another group, k groups would each hold
something better. So one pass over the scores leaves the maxima of groups of 8; the k best groups hold 8k candidates,
a fixed number, and the same step over groups of groups leads there from a level that one program can hold. Nothing
is counted in shared counters, so the worst case (all scores equal) costs what a random row does.

Triton, because selecting is loads by computed positions, scans and sums; there is no matrix product to feed.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import interpreted

# Elements that one program selects from at once: 32 registers a thread with 16 warps.
_SELECTED_FROM = 16384
# Elements of a group. With 16 the candidates of k = 2048 would not fit one program; 4 would need more levels.
_BRANCH = 8
# Elements that one program of the maxima reads: enough loads in flight, enough programs for all processors.
_MAXIMA_TILE = 4096
# Of the final ordering: elements that are compared all with all, and how many of them a program places.
_RUN, _OWN = 512, 32
# Below the key of every float, -inf included.
_NOTHING = -(2**31)


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.top_k.top_k`."""
    n = scores.shape[-1]
    flat = scores.reshape(-1, n)
    lengths = jnp.full(flat.shape[0], n, jnp.int32)
    values, indices = select_rows(flat, lengths, k)
    return values.reshape(*scores.shape[:-1], k), indices.reshape(*scores.shape[:-1], k)


def unsupported(scores: jax.Array, k: int) -> str | None:
    """Why the kernels do not run these arguments; None if they do."""
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype}, not float32"
    if not 1 <= k <= _SELECTED_FROM // 2:
        return f"k is {k}, not in 1 … {_SELECTED_FROM // 2}"
    if scores.size == 0:
        return f"scores are empty: {scores.shape}"
    if scores.shape[-1] > 2**30:
        return f"a row has {scores.shape[-1]} elements"
    return None


def select_rows(
    scores: jax.Array,
    lengths: jax.Array,
    k: int,
    maxima: tuple[jax.Array, int] | None = None,
    pinned: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Top-k of the first elements of each row.

    Args:
      scores: ``[rows, n]`` float32.
      lengths: ``[rows]`` int32: elements of a row that count; what lies behind is not looked at.
      k: how many (static).
      maxima: maxima of groups of consecutive scores, if they are there already: ``[rows, ≥ ⌈n / size⌉]`` and the
        group's size, a power of two (static).
      pinned: ``[rows]`` int32: this element counts as +inf, and all others as finite; −1: none.

    Returns:
      values ``[rows, k]``, descending, and indices ``[rows, k]`` int32; −inf and −1 beyond a row's length.
    """
    width = pl.next_power_of_2(k)
    branch = min(_BRANCH, _SELECTED_FROM // width)
    levels, branches = [scores], []
    if maxima is not None and scores.shape[1] > _SELECTED_FROM and width * maxima[1] <= _SELECTED_FROM:
        levels.append(maxima[0])
        branches.append(maxima[1])
    while levels[-1].shape[1] > _SELECTED_FROM:
        levels.append(_group_maxima(levels[-1], lengths, branch, math.prod(branches)))
        branches.append(branch)
    # Without pinned elements any array of that shape will do.
    pins = lengths if pinned is None else pinned
    keys, indices = _search(levels, branches, lengths, pins, k, pinned is not None)
    return _order(keys, indices, lengths, k)


def _group_maxima(level: jax.Array, lengths: jax.Array, branch: int, below: int) -> jax.Array:
    """Maxima ``[rows, ⌈n / branch⌉]`` of groups; an element of ``level`` stands for ``below`` scores."""
    rows, n = level.shape

    def kernel(level_ref, lengths_ref, out_ref):
        row, tile = pl.program_id(0), pl.program_id(1)
        count = pl.cdiv(lengths_ref[row], below)

        @pl.when(tile * _MAXIMA_TILE < count)
        def _():
            at = tile * _MAXIMA_TILE + jnp.arange(_MAXIMA_TILE)
            x = plt.load(level_ref.at[row, at], mask=at < count, other=-jnp.inf)
            best = jnp.max(x.reshape(_MAXIMA_TILE // branch, branch), axis=1)
            group = tile * (_MAXIMA_TILE // branch) + jnp.arange(_MAXIMA_TILE // branch)
            plt.store(out_ref.at[row, group], best, mask=group < out_ref.shape[1])

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, pl.cdiv(n, branch)), jnp.float32),
        grid=(rows, pl.cdiv(n, _MAXIMA_TILE)),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpreted(),
        name="top_k_maxima",
    )(level, lengths)


def _search(
    levels: list[jax.Array], branches: list[int], lengths: jax.Array, pinned: jax.Array, k: int, pin: bool
) -> tuple[jax.Array, jax.Array]:
    """Keys and indices ``[rows, k up to a power of two]`` of each row's k best, in order of their index."""
    width = pl.next_power_of_2(k)
    top = max(pl.next_power_of_2(levels[-1].shape[1]), width)
    largest = max([top] + [width * branch for branch in branches])
    barrier = (lambda: None) if interpreted() else plt.debug_barrier

    def kernel(lengths_ref, pinned_ref, *refs):
        *level_refs, keys_ref, indices_ref = refs
        row = pl.program_id(0)
        length, pinned_at = lengths_ref[row], pinned_ref[row]
        at = jnp.arange(top)
        real = at < top
        for depth in reversed(range(len(level_refs))):
            below = math.prod(branches[:depth])
            x = plt.load(level_refs[depth].at[row, at], mask=real & (at < pl.cdiv(length, below)), other=-jnp.inf)
            if pin:
                x = jnp.where((pinned_at >= 0) & (at == pinned_at // below), jnp.inf, jnp.minimum(x, _LARGEST))
            keys = jnp.where(real, _key(x), _NOTHING)
            taken, position = _best(keys, k)
            plt.store(indices_ref.at[row, position], at, mask=taken)
            if depth == 0:
                plt.store(keys_ref.at[row, position], keys, mask=taken)
                return
            # What follows is read by other threads than wrote it.
            barrier()
            branch = branches[depth - 1]
            child = jnp.arange(width * branch)
            real = child // branch < k
            parent = plt.load(indices_ref.at[row, child // branch], mask=real, other=0)
            at = parent * branch + child % branch
            barrier()

    shape = jax.ShapeDtypeStruct((levels[0].shape[0], width), jnp.int32)
    return pl.pallas_call(
        kernel,
        out_shape=(shape, shape),
        grid=(levels[0].shape[0],),
        compiler_params=plt.CompilerParams(num_warps=max(min(largest // 1024, 16), 4)),
        interpret=interpreted(),
        name="top_k_search",
    )(lengths, pinned, *levels)


_LARGEST = float(jnp.finfo(jnp.float32).max)


def _key(x: jax.Array) -> jax.Array:
    """int32 that orders as the floats do, -0 as +0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def _best(keys: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Which k of the keys are the largest (first of equals), and where each goes if their order is kept."""

    def undecided(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        shift, _, count = state
        return (shift >= 0) & (count != k)

    def next_digit(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        # The k-th largest key from its highest bits down, two at a time; as if unsigned, so that bits only add. Once
        # k keys are at least the threshold, its lower bits change nothing.
        shift, threshold, count = state
        one, two, three = ((threshold | (digit << shift)) ^ _NOTHING for digit in map(jnp.int32, (1, 2, 3)))
        both = jnp.sum((keys >= one).astype(jnp.int32) + ((keys >= two).astype(jnp.int32) << 16))
        counts = (both & 0xFFFF, both >> 16, jnp.sum((keys >= three).astype(jnp.int32)))
        digit = sum((c >= k).astype(jnp.int32) for c in counts)
        for c in counts:
            count = jnp.where(c >= k, c, count)
        return shift - 2, threshold | (digit << shift), count

    start = (jnp.int32(30), jnp.int32(0), jnp.int32(keys.size))
    threshold = lax.while_loop(undecided, next_digit, start)[1] ^ _NOTHING
    above, equal = (keys > threshold).astype(jnp.int32), (keys == threshold).astype(jnp.int32)
    # One scan for both counts: neither passes 2¹⁵.
    packed = above + (equal << 16)
    before = jnp.cumsum(packed) - packed
    above_before, equal_before = before & 0xFFFF, before >> 16
    needed = k - jnp.sum(above)
    taken = (above > 0) | ((equal > 0) & (equal_before < needed))
    return taken, above_before + jnp.minimum(equal_before, needed)


def _order(keys: jax.Array, indices: jax.Array, lengths: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Sorts each row of keys in order of index: values and indices ``[rows, k]``."""
    runs = pl.cdiv(k, _RUN)
    keys, indices = _sort_runs(keys, indices, k)
    if runs > 1:
        keys, indices = _merge_runs(keys, indices, k)
    exists = indices[:, :k] < lengths[:, None]
    return jnp.where(exists, _value(keys[:, :k]), -jnp.inf), jnp.where(exists, indices[:, :k], -1)


def _sort_runs(keys: jax.Array, indices: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Sorts runs of a row: an element goes where as many of its run stand before it as are better."""
    rows, width = keys.shape
    run, own = min(_RUN, width), min(_OWN, width)

    def kernel(keys_ref, indices_ref, keys_out, indices_out):
        row = pl.program_id(0)
        here = pl.program_id(1) * own + jnp.arange(own)
        first = pl.program_id(1) * own // run * run
        there = first + jnp.arange(run)
        key = plt.load(keys_ref.at[row, here], mask=here < k, other=_NOTHING)
        other = plt.load(keys_ref.at[row, there], mask=there < k, other=_NOTHING)
        better = (other[None] > key[:, None]) | ((other[None] == key[:, None]) & (there[None] < here[:, None]))
        to = first + jnp.sum(better.astype(jnp.int32), axis=1)
        plt.store(keys_out.at[row, to], key)
        plt.store(indices_out.at[row, to], plt.load(indices_ref.at[row, here], mask=here < k, other=0))

    shape = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    return pl.pallas_call(
        kernel,
        out_shape=(shape, shape),
        grid=(rows, width // own),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpreted(),
        name="top_k_sort_runs",
    )(keys, indices)


def _merge_runs(keys: jax.Array, indices: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Joins sorted runs: an element goes where as many of all runs stand before it as are better."""
    rows, width = keys.shape
    runs = width // _RUN

    def kernel(keys_ref, indices_ref, keys_out, indices_out):
        row = pl.program_id(0)
        here = pl.program_id(1) * _OWN + jnp.arange(_OWN)
        run = jnp.arange(runs)[None]
        key = keys_ref[row, here]
        # Of equals, those of earlier runs come first: there they count as better.
        earlier = run < (here // _RUN)[:, None]

        def halve(i: jax.Array, better: jax.Array) -> jax.Array:
            # A binary search in every run at once. ``better`` elements are known to be; are half as many more?
            step = _RUN >> (i + 1)
            other = keys_ref[row, run * _RUN + better + step - 1]
            before = (other > key[:, None]) | ((other == key[:, None]) & earlier)
            return jnp.where(before, better + step, better)

        better = lax.fori_loop(0, _RUN.bit_length() - 1, halve, jnp.zeros((_OWN, runs), jnp.int32))
        # The last one: the steps add up to one less than a run.
        other = keys_ref[row, run * _RUN + better]
        better += ((other > key[:, None]) | ((other == key[:, None]) & earlier)).astype(jnp.int32)
        to = jnp.sum(jnp.where(run == (here // _RUN)[:, None], (here % _RUN)[:, None], better), axis=1)
        plt.store(keys_out.at[row, to], key)
        plt.store(indices_out.at[row, to], indices_ref[row, here])

    shape = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    return pl.pallas_call(
        kernel,
        out_shape=(shape, shape),
        grid=(rows, width // _OWN),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpreted(),
        name="top_k_merge_runs",
    )(keys, indices)
