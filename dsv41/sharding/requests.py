"""The state of requests on a mesh: made where it lies, and which pages a request may have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.settings import Settings
from dsv41.sharding.context import context_places
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import MeshError
from dsv41.sharding.steps import describe, place, state_spec
from dsv41.state.request import ModelState, create_sequential_state, create_state


def context_shards(parallel: Parallel) -> int:
    """Devices that the pages of one request are spread over."""
    return parallel.divided(context_places(parallel))


def check_state(parallel: Parallel, batch: int, pages: int, table_pages: int) -> None:
    """Refuses sizes of a state (:func:`empty_state`) that the mesh does not divide.

    Raises:
      MeshError: names the size and the mesh axes.
    """
    for name, size, places in (
        ("batch", batch, parallel.places("batch")),
        ("pages", pages, parallel.places("pages")),
        ("pages of a request", table_pages, context_places(parallel)),
    ):
        if size % parallel.divided(places):
            axes = " × ".join(f"{axis} {parallel.divided(axis)}" for axis in places)
            raise MeshError(f"{name} of {size} is not divisible by mesh axes {axes}")


def empty_state(settings: Settings, batch: int, pages: int, table_pages: int) -> ModelState:
    """An empty state on the mesh of the settings; arguments as of :func:`~dsv41.state.request.create_state`.

    Args:
      batch, pages: of the whole mesh.

    Raises:
      MeshError: the mesh does not divide them, or the pages of a request.
    """
    parallel = settings.parallel
    check_state(parallel, batch, pages, table_pages)
    shapes = jax.eval_shape(lambda: create_state(settings.whole, batch, pages, table_pages))
    where = jax.tree.map(lambda leaf: leaf.sharding, describe(shapes, state_spec(parallel), parallel))
    return jax.jit(lambda: create_state(settings.whole, batch, pages, table_pages), out_shardings=where)()


def sequential_state(settings: Settings, batch: int, tokens: int) -> ModelState:
    """An empty state in which every request holds its own pages for ``tokens`` tokens, on one device or the mesh."""
    parallel = settings.parallel
    if parallel.mesh is None:
        return create_sequential_state(settings, batch, tokens)
    shards, each = context_shards(parallel), batch // parallel.parts("batch")
    table_pages = -(-tokens // (settings.page_tokens * shards)) * shards
    state = empty_state(settings, batch, batch * table_pages, table_pages)
    # Page j of a request lies on shard j mod C of the context; numbers count from the pool of the batch shard.
    request, page = np.divmod(np.arange(batch * table_pages, dtype=np.int32).reshape(batch, table_pages), table_pages)
    rows = table_pages // shards
    table = page % shards * (each * rows) + request % each * rows + page // shards
    return state.replace(page_table=place(table.astype(np.int32), parallel.spec("batch"), parallel))


def local_rows(parallel: Parallel, rows: int) -> jax.Array:
    """Numbers of all requests inside their batch shards, int32 ``[rows]``: what steps over some requests are given."""
    return jnp.tile(jnp.arange(rows // parallel.parts("batch"), dtype=jnp.int32), parallel.parts("batch"))
