"""What trains indexers, against dense softmaxes: the divergence of their scores from where attention's heads look."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.layers.attention import Attention
from dsv41.layers.distillation import IndexScores
from dsv41.sharding.parallel import SINGLE
from pallas_kernels.formats import DenseFormat, Packed

BATCH, QUERIES, HEADS, WIDTH, ENTRIES, CHOSEN, WINDOW, SCALE = 2, 3, 4, 8, 12, 4, 2, 0.5
PLAIN = DenseFormat("float32")
VISIBLE = np.array([[0, 5, 12], [4, 9, 12]])
FIRST = np.array([[0, 0, 4], [0, 4, 8]])


def test_divergence_is_that_of_dense_softmaxes():
    """Heads look at a window, at chosen entries and at a sink; indexers score every visible entry."""
    rng = np.random.default_rng(0)
    q, index_q = rng.normal(size=(2, BATCH, QUERIES, HEADS, WIDTH)) * 2
    w = rng.normal(size=(BATCH, QUERIES, HEADS))
    entries, keys = rng.normal(size=(2, BATCH * 3, ENTRIES // 3, WIDTH))
    local, sink = rng.normal(size=(BATCH, WINDOW + QUERIES, WIDTH)), rng.normal(size=HEADS)
    table = rng.permutation(BATCH * 3).reshape(BATCH, 3)
    chosen, expected = np.full((BATCH, QUERIES, CHOSEN), -1), 0.0
    for b, s in np.ndindex(BATCH, QUERIES):
        seen = np.arange(FIRST[b, s], VISIBLE[b, s])
        some = rng.permutation(seen)[:CHOSEN]
        if not len(seen):
            continue
        chosen[b, s, : len(some)] = some
        window = q[b, s] @ local[b, s + 1 : s + 1 + WINDOW].T * SCALE
        looks = q[b, s] @ entries[table[b]].reshape(ENTRIES, WIDTH)[some].T * SCALE
        total = np.exp(window).sum(-1) + np.exp(looks).sum(-1) + np.exp(sink)
        mass = (np.exp(looks) / total[:, None]).sum(0)
        p = mass / mass.sum()
        scores = (w[b, s][:, None] * np.maximum(index_q[b, s] @ keys[table[b]].reshape(ENTRIES, WIDTH).T, 0)).sum(0)
        expected += np.sum(p * (np.log(p) - scores[some] + np.log(np.exp(scores[seen]).sum())))

    def pool(values: np.ndarray) -> Packed:
        return Packed(jnp.asarray(values, jnp.float32), None)

    table, visible, first = (jnp.asarray(x, jnp.int32) for x in (table, VISIBLE, FIRST))
    scores = IndexScores(*(jnp.asarray(x, jnp.float32) for x in (index_q, w)), pool(keys), PLAIN, table, visible, first)
    valid = jnp.ones(local.shape[:2], bool)
    global_entries = (pool(entries), PLAIN, table, jnp.asarray(chosen, jnp.int32))
    sink = jnp.asarray(sink, jnp.float32)
    static = {"window": WINDOW, "scale": SCALE, "probability_dtype": jnp.dtype("float32")}

    @jax.jit
    def divergence(queries: jax.Array) -> jax.Array:
        arguments = (queries, pool(local), PLAIN, valid, *global_entries, sink, None, None)
        layer = types.SimpleNamespace(settings=types.SimpleNamespace(parallel=SINGLE))
        return Attention._divergence(layer, scores, arguments, static)

    queries = jnp.asarray(q, jnp.float32)
    np.testing.assert_allclose(divergence(queries), expected, rtol=1e-5)
    assert not jax.grad(divergence)(queries).any()
