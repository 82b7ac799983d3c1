"""tokamax's operations for V4 against ours, where both compute the same function (pallas_kernels/TOKAMAX.md).

An independent reading of the same mathematics: its references come from another code base. Inputs lie on grids on which
float32 sums are exact wherever a choice or a rounding depends on them; then results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.benchmark import tokamax as tokamax_table
from pallas_kernels.block_linear import block_linear
from pallas_kernels.expert_matmul import ExpertWeights, expert_matmul
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat, Format, Packed, e4m3_encode
from pallas_kernels.index_select import index_select
from pallas_kernels.mhc import HyperConnection, Update, mhc
from pallas_kernels.paged_memory import gather
from pallas_kernels.router import route
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.top_k import top_k

tokamax = pytest.importorskip("tokamax", exc_type=ImportError)
tokamax_ops = pytest.importorskip("tokamax.ops", exc_type=ImportError)

F32, BF16 = DenseFormat("float32"), DenseFormat("bfloat16")
# Float32 sums of at most a few hundred terms in another order, and an exp: some 1e-6 of the largest value.
TOLERANCE = 1e-5


def operation(name: str) -> Callable:
    """One of tokamax's operations by its public name; the test is skipped where the installed version has it not."""
    if not hasattr(tokamax_ops, name):
        pytest.skip(f"tokamax {tokamax.__version__} has no {name}")
    function = getattr(tokamax_ops, name)
    return lambda *args, **kwargs: function(*args, **kwargs, implementation="xla")


def assert_close(actual: jax.Array, wanted: jax.Array) -> None:
    """Equal to the tolerance, relative to the largest value."""
    actual, wanted = np.asarray(actual, np.float32), np.asarray(wanted, np.float32)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("hostile", [False, True], ids=["random", "ties and nothing"])
def test_top_k(hostile: bool):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((6, 300)).astype(np.float32)
    if hostile:
        scores = np.round(scores) + 0.0  # no −0: tokamax's reference sorts it below +0, for us they are equal
        scores[0] = 1.0
        scores[1] = -np.inf
        scores[2, 5:] = -np.inf
    values, indices = jax.jit(top_k, static_argnums=1)(scores, 40)
    theirs, bits = operation("top_k")(jnp.asarray(scores), 40, return_scores=True)
    # It names no entry of score −inf; ours, which has indices for all that exist, leaves that to the caller.
    np.testing.assert_array_equal(np.where(values == -np.inf, -1, indices), theirs)
    np.testing.assert_array_equal(values, np.asarray(bits).view(np.float32))


def index_keys(rng: np.random.Generator, pages: int, page_entries: int, integers: bool) -> tuple[Packed, np.ndarray]:
    """Keys that both hold exactly: FP4 with one scale for a whole key, and the same as FP8 bytes and that scale."""
    width = 128
    values = rng.integers(-1, 2, (pages, page_entries, width)).astype(np.float32)
    if not integers:
        values = rng.choice(np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6]), values.shape) * rng.choice([-1, 1], values.shape)
    exponents = rng.integers(-2, 3, (pages, page_entries, 1)) * (not integers)
    # The largest value is 6 scales, so that encoding finds the scale meant.
    values[..., ::32] = 6
    ours = jax.jit(FP4_E8M0.encode)(values * np.exp2(exponents).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(ours.scales), np.broadcast_to(exponents + 127, ours.scales.shape))
    payload = np.asarray(jax.jit(e4m3_encode)(values))
    return ours, np.concatenate([payload, (exponents + 127).astype(np.uint8)], axis=-1)


def index_cache(keys: np.ndarray, layout: str) -> jax.Array:
    """Bytes ``[pages, page_entries, width + 1]`` in one of tokamax's two layouts of a page."""
    pages, page_entries, size = keys.shape
    if layout == "head_along_sublane":
        padded = np.pad(keys, ((0, 0), (0, 0), (0, 256 - size)), constant_values=255)
        return jnp.asarray(padded.reshape(pages, page_entries // 4, 4, 256))
    padded = np.pad(keys, ((0, 0), (0, 0), (0, -size % 4)), constant_values=255)
    return jnp.asarray(padded.swapaxes(1, 2).reshape(pages, -1, 4, page_entries))


@pytest.mark.parametrize(
    ("layout", "k", "integers", "ratio"),
    [
        pytest.param("head_along_sublane", 16, False, 1, id="random"),
        pytest.param("seq_along_lane", 16, True, 1, id="ties"),
        pytest.param("seq_along_lane", 100, False, 1, id="more than there are"),
        pytest.param("head_along_sublane", 16, False, 2, id="one entry for two tokens"),
    ],
)
def test_lightning_indexer(layout: str, k: int, integers: bool, ratio: int):
    """Scores are multiples of a power of two and small, so float32 has them exactly and ties are real."""
    rng = np.random.default_rng(k + integers)
    page_entries, table_pages, heads = 8, 6, 4
    # The last request is empty: its query sees nothing. With two tokens an entry, one query each: in a chunk tokamax
    # lets a query see the entry of its own unfinished group, which V4.1 does not.
    lengths, asked = np.array([47, 17, 3, 0]), np.array([5, 1, 3, 1] if ratio == 1 else [1, 1, 1, 1])
    batch, longest, tokens = len(lengths), asked.max(), asked.sum()
    pool, keys = index_keys(rng, batch * table_pages + 2, page_entries, integers)
    table = rng.permutation(batch * table_pages + 2)[: batch * table_pages].reshape(batch, table_pages).astype(np.int32)
    queries = rng.integers(-2, 3, (batch, longest, heads, 128)).astype(np.float32)
    weights = rng.integers(-4, 5, (batch, longest, heads)).astype(np.float32) / 4
    if integers:
        queries[..., 4:] = 0
    positions = (lengths - asked)[:, None] + np.arange(longest)
    visible = np.maximum((positions + 1) // ratio, 0).astype(np.int32)
    # Pages that no request has and entries beyond a request's: NaN for both.
    spare = np.setdiff1d(np.arange(len(keys)), table)
    dead = np.zeros(keys.shape[:2], bool)
    dead[spare] = True
    dead[table] = np.arange(table_pages * page_entries).reshape(1, table_pages, -1) >= (lengths // ratio)[:, None, None]
    keys[dead] = 255
    pool = pool.map(lambda leaf: jnp.where(dead[..., None], jnp.uint8(255), leaf))

    run = jax.jit(index_select, static_argnames=("fmt", "top_k"))
    ours = run(queries, weights, pool, FP4_E8M0, table, visible, top_k=k).indices
    flat = np.arange(longest) < asked[:, None]
    padding = 3  # rows that belong to no request
    theirs = operation("lightning_indexer")(
        jnp.pad(queries[flat], ((0, padding), (0, 0), (0, 0)), constant_values=np.nan),
        jnp.pad(weights[flat], ((0, padding), (0, 0))),
        index_cache(keys, layout),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(table.reshape(-1)),
        jnp.asarray(np.concatenate([[0], np.cumsum(asked)]), jnp.int32),
        jnp.asarray([0, 0, batch], jnp.int32),
        k=k,
        compression_ratio=ratio,
        kv_layout=layout,
    )
    np.testing.assert_array_equal(np.asarray(ours)[flat], theirs[:tokens])
    np.testing.assert_array_equal((np.asarray(ours)[flat] >= 0).sum(-1), np.minimum(visible[flat], k))


@pytest.mark.parametrize("biased", [False, True])
def test_router(biased: bool):
    """The choice; with no bias to take off again, also the weights. Whole-number products tie often."""
    rng = np.random.default_rng(3)
    rows, experts, k, scale = 40, 64, 6, 1.5
    x = rng.integers(-1, 2, (rows, 8)).astype(np.float32)
    weight = rng.integers(-1, 2, (experts, 8)).astype(np.float32)
    x[0] = 0
    bias = (rng.integers(-2, 3, experts) * biased).astype(np.float32)
    valid = np.arange(rows) % 5 != 4
    run = jax.jit(route, static_argnames=("k", "scale"))
    chosen, weights = run(x, weight, bias, -bias, np.zeros(rows, bool), valid, k=k, scale=scale)
    scores = jnp.sqrt(jax.nn.softplus(jnp.asarray(x @ weight.T)))
    best, theirs = operation("router_topk")(scores + bias, k)
    np.testing.assert_array_equal(chosen[valid], theirs[valid])
    np.testing.assert_array_equal(chosen[~valid], experts)
    if not biased:
        assert_close(weights[valid], (scale * best / best.sum(-1, keepdims=True))[valid])


def attention_pool(rng: np.random.Generator, fmt: Format, pages: int, page_entries: int) -> tuple[Packed, np.ndarray]:
    """Entries that both hold exactly, ours and as V4's words: ``[pages, page_entries, 128]``, rotary a quarter of it.

    V4 has FP8 and a power of two for every 64th channel of 448, and bfloat16 for 64. A packed entry of ours is such an
    entry if all its blocks have one power of two as scale.
    """
    exponents = rng.integers(-3, 2, (pages, page_entries, 1))
    if fmt == FP4_E4M3:
        values = rng.choice(np.float32([0, 0.5, 1, 1.5, 2, 3, 4]), (pages, page_entries, 512))
        values[..., ::16] = 6
    else:
        codes = rng.integers(0, 2**7 - 8, (pages, page_entries, 512)).astype(np.uint8)
        values = np.array(FP8_E8M0.decode(Packed(codes, np.full((*codes.shape[:2], 16), 127, np.uint8))))
        values[..., ::32] = 448
        exponents = exponents - 7
    values = values * rng.choice([-1, 1], values.shape)
    entries = (values * 2.0**exponents).astype(np.float32)
    ours = jax.jit(fmt.encode)(entries)
    np.testing.assert_array_equal(jax.jit(fmt.decode)(ours), entries)

    scales = np.broadcast_to(exponents + 127, (pages, page_entries, 64)).astype(np.uint8)
    slabs = np.concatenate([np.asarray(jax.jit(e4m3_encode)(values[..., :448].astype(np.float32))), scales], axis=-1)
    nope = np.ascontiguousarray(slabs.reshape(pages, page_entries, 4, 128).swapaxes(2, 3)).view(np.int32)[..., 0]
    bits = entries[..., 448:].view(np.uint32) >> 16  # bfloat16: nothing is lost
    rope = (bits[..., :32] | bits[..., 32:] << 16).view(np.int32).reshape(pages, page_entries // 4, 128)
    return ours, nope, rope


PAGE_ENTRIES, TABLE_PAGES, WINDOW = 8, 4, 4
FORMATS = {"bfloat16": BF16, "fp8": FP8_E8M0, "fp4": FP4_E4M3}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_sparse_mla(fmt: Format):
    """Ours over window and chosen entries, against tokamax's over the chosen ones, given our sums of the window."""
    rng = np.random.default_rng(5)
    batch, queries, heads, chosen = 2, 3, 4, 128
    pages = batch * TABLE_PAGES + 1
    pool, nope, rope = attention_pool(rng, fmt, pages, PAGE_ENTRIES)
    table = rng.permutation(pages)[:-1].reshape(batch, TABLE_PAGES).astype(np.int32)
    indices = np.full((batch, queries, chosen), -1, np.int32)
    indices[:, :, ::5] = rng.integers(0, TABLE_PAGES * PAGE_ENTRIES, indices[:, :, ::5].shape)  # gaps, repeats
    indices[0, 0] = -1
    indices[1, 0] = 7
    valid = rng.random((batch, WINDOW + queries)) < 0.7
    valid[0, : WINDOW + 1] = False  # the query without chosen entries sees nothing at all
    arrays = {
        "queries": jnp.asarray(rng.standard_normal((batch, queries, heads, 512)), jnp.float32),
        "local": Packed(jnp.asarray(rng.standard_normal((batch, WINDOW + queries, 512)), jnp.float32), None),
        "local_valid": jnp.asarray(valid),
        "sink": jnp.asarray([-50.0, 0.0, 3.0, 30.0]),
    }
    static = {"local_fmt": F32, "pool_fmt": fmt, "window": WINDOW, "scale": 512**-0.5, "probability_dtype": jnp.float32}
    run = jax.jit(lambda **given: sparse_attention(**given, **static))
    ours = run(**arrays, pool=pool, page_table=table, indices=indices)
    nothing = {"pool": None, "page_table": None, "indices": None}
    window = jax.jit(lambda **given: sparse_attention(**given, **nothing, **static, return_partial=True))(**arrays)

    tokens = batch * queries
    theirs = operation("sparse_mla")(
        arrays["queries"].reshape(tokens, heads, 512),
        jnp.asarray(nope),
        jnp.asarray(rope),
        jnp.asarray(indices.reshape(tokens, chosen)),
        jnp.asarray(table.reshape(-1)),
        jnp.arange(batch + 1, dtype=jnp.int32) * queries,
        jnp.asarray([0, 0, batch], jnp.int32),
        arrays["sink"],
        window.out.reshape(tokens, heads, 512),
        window.total.reshape(tokens, heads),
        window.top.reshape(tokens, heads),
        sm_scale=static["scale"],
    )
    assert_close(ours.reshape(theirs.shape), theirs)
    assert not np.asarray(ours[0, 0]).any()
    assert not np.asarray(theirs[0]).any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_csa_gather(fmt: Format):
    """Its rows stay packed and the halves of a block of rows side by side; unpacked, they are the rows we decode."""
    rng = np.random.default_rng(6)
    pages, count = 5, 128
    pool, nope, rope = attention_pool(rng, fmt, pages, PAGE_ENTRIES)
    table = rng.permutation(pages).astype(np.int32)
    indices = rng.integers(0, pages * PAGE_ENTRIES, 2 * count).astype(np.int32)
    ours = jax.jit(lambda *a: gather(a[0], fmt, *a[1:]))(pool, table[None], indices[None])[0]
    physical = table[indices // PAGE_ENTRIES] * PAGE_ENTRIES + indices % PAGE_ENTRIES
    rows, words = operation("csa_gather")(jnp.asarray(nope), jnp.asarray(rope), jnp.asarray(physical), top_k=count)
    slabs = np.asarray(rows).view(np.uint8).reshape(-1, 128, 4).swapaxes(1, 2).reshape(-1, 512)
    one = FP8_E8M0.decode(Packed(slabs[:, :448], np.full((len(slabs), 14), 127, np.uint8)))
    scale = np.exp2(slabs[:, 448:].astype(np.float32) - 127)
    np.testing.assert_array_equal(np.asarray(one).reshape(-1, 7, 64) * scale[:, None], ours[:, :448].reshape(-1, 7, 64))
    halves = np.asarray(words).view(np.uint32)
    bits = np.stack([halves & 0xFFFF, halves >> 16], axis=1).reshape(2, count // 2, 2, 64).swapaxes(1, 2)
    turned = (bits.reshape(2 * count, 64) << 16).view(np.float32)
    np.testing.assert_array_equal(turned, ours[:, 448:])


def test_grouped_lowrank_proj():
    """V4's output map with a rotation by nothing: whole numbers and powers of two, so one rounding at the end."""
    rng = np.random.default_rng(7)
    rows, groups, head_dim, out = 5, 2, 128, 4
    x = jnp.asarray(rng.integers(-8, 9, (rows, groups * 8, head_dim)), jnp.bfloat16)
    weight = rng.integers(-8, 9, (8 * head_dim, groups * out)).astype(np.float32)
    scale = np.exp2(rng.integers(-6, 3, groups * out)).astype(np.float32)
    still = jnp.concatenate([jnp.ones((4, 32)), jnp.zeros((4, 32))], axis=-1)
    theirs = operation("grouped_lowrank_proj")(
        x,
        jnp.zeros(rows, jnp.int32),
        still,
        jnp.asarray(weight, jnp.float8_e4m3fn),
        jnp.asarray(scale),
        quantize_activations=False,
    )
    run = jax.jit(block_linear, static_argnames=("activation_fmt", "groups"))
    flat, matrix = x.reshape(rows, -1), jnp.asarray(weight * scale).T.astype(jnp.bfloat16)
    ours = run(flat, matrix, None, activation_fmt=BF16, groups=groups)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_ragged_dot():
    """The routed experts out of three ragged products over rows sorted by expert, some experts without a row."""
    ragged_dot = operation("ragged_dot")
    rng = np.random.default_rng(8)
    rows, k, experts, hidden, inner, limit = 12, 3, 7, 32, 16, 1.0
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    ids = np.stack([rng.permutation(experts - 1)[:k] for _ in range(rows)]).astype(np.int32)  # nobody asks for the last
    ids[3] = experts  # a padded row
    ids[4, 1] = -1
    weights = rng.random((rows, k)).astype(np.float32)
    w1, w3 = (rng.standard_normal((experts, inner, hidden)).astype(np.float32) for _ in range(2))
    w2 = rng.standard_normal((experts, hidden, inner)).astype(np.float32)
    run = jax.jit(expert_matmul, static_argnames=("limit", "activation_fmt"))
    matrices = [ExpertWeights(jnp.asarray(w), None) for w in (w1, w3, w2)]
    ours = run(x, ids, weights, *matrices, limit=limit, activation_fmt=F32)

    real = (ids >= 0) & (ids < experts)
    order = np.argsort(np.where(real, ids, experts).reshape(-1), kind="stable")[: real.sum()]
    sizes = jnp.asarray(np.bincount(ids[real], minlength=experts), jnp.int32)
    row, share = order // k, weights.reshape(-1)[order]
    product = lambda a, w: ragged_dot(a, jnp.asarray(w.swapaxes(1, 2)), sizes, precision="highest")  # noqa: E731
    gate, up = product(jnp.asarray(x[row]), w1), product(jnp.asarray(x[row]), w3)
    inside = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit) * share[:, None]
    theirs = jnp.zeros((rows, hidden)).at[row].add(product(inside, w2))
    assert_close(ours, theirs)


def test_mhc():
    """The streams and coefficients of a boundary; the input of the next sub-layer is V4's, mixed by the new ``pre``."""
    rng = np.random.default_rng(9)
    rows, copies, width = 6, 4, 64
    # Sums of sixteenths: the new streams are exact before they are rounded to bfloat16.
    streams = jnp.asarray(rng.integers(-16, 17, (rows, copies, width)) / 4, jnp.bfloat16)
    streams = streams.at[0].set(0)  # padding
    y = jnp.asarray(rng.integers(-16, 17, (rows, width)) / 4, jnp.bfloat16).at[0].set(0)
    post = jnp.asarray(rng.integers(0, 33, (rows, copies)) / 16, jnp.float32)
    comb = jnp.asarray(rng.integers(0, 17, (rows, copies, copies)) / 16, jnp.float32)
    mixes = copies * (copies + 2)
    connection = HyperConnection(
        jnp.asarray(rng.standard_normal((mixes, copies * width)) / 8, jnp.float32),
        jnp.asarray(rng.standard_normal(mixes), jnp.float32),
        jnp.asarray([0.5, 2.0, 1.5], jnp.float32),
    )
    static = {"norm_eps": 1e-20, "eps": 1e-6, "iterations": 20}
    run = jax.jit(mhc, static_argnames=tuple(static))
    mix = jnp.ones((rows, copies), jnp.float32)
    ours = run(streams, mix, connection, jnp.ones(width, jnp.bfloat16), Update(y, post, comb), **static)
    constants = (1e-20, static["eps"], static["eps"], 2.0, static["iterations"])
    after, their_post, their_comb, mixed = operation("mhc_fused_post_pre")(
        y, streams.reshape(rows, -1), post, comb, connection.fn, connection.scale, connection.base, *constants
    )
    np.testing.assert_array_equal(
        np.asarray(ours.streams, np.float32), np.asarray(after, np.float32).reshape(rows, copies, width)
    )
    assert_close(ours.coefficients.post, their_post)
    assert_close(ours.coefficients.comb, their_comb)
    # pre is not returned, but what it mixes is, rounded to bfloat16: half a unit of its 8 bits.
    wanted = np.einsum("rc,rcd->rd", ours.coefficients.pre, np.asarray(ours.streams, np.float32))
    np.testing.assert_allclose(
        np.asarray(mixed, np.float32), wanted, rtol=2.0**-8, atol=TOLERANCE * np.abs(wanted).max()
    )


@pytest.mark.tpu_aot
def test_the_comparison_compiles(capsys: pytest.CaptureFixture):
    pytest.importorskip("libtpu", exc_type=ImportError)
    operation("top_k")
    assert tokamax_table.main(["--chips", "tpu7x", "--only", "top-512 of 64"]) == 0
    (row,) = (line.split(" | ") for line in capsys.readouterr().out.splitlines() if "top-512" in line)
    arguments, kernels = ([float(part) for part in row[column].split(" / ")] for column in (2, 5))
    assert min(arguments) >= 1
    assert min(kernels) >= 1
