"""A long chunk of a prompt over shards of the context: each device computes some of its columns.

Shard c of C has columns c·T/C … (c + 1)·T/C − 1 of the T of a step. Whatever a token alone decides is computed there:
streams, norms, linear maps, experts, Engram. What tokens see of each other crosses, along the columns:

    gathered     window entries, and what becomes of tokens before it is compressed (a group that is open at the end of
                 a shard's columns is completed by its right neighbour's); queries, and what they have chosen
    exchanged    each shard's candidates for a choice, to the shard that has the query
    scattered    sums over the entries of each shard (:mod:`dsv41.sharding.context`), to the shard that has the query

Short steps are not split: the fewer columns, the more they would wait, and a token must round alike wherever in such
a step it stands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from dsv41.sharding.parallel import SINGLE, Parallel
from dsv41.sharding.rules import MeshError

AXIS = "chunk"
"""The logical axis."""

_BESIDE = ("batch", "heads", "index_heads", "o_groups", "mlp", "expert_mlp", "experts", "vocab")
"""Divided beside the columns in some array, or in a matrix that multiplies them: on other mesh axes, then."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The columns of a step ``[batch, query, ...]``, and those that this device computes.

    Attributes:
      parallel: the mesh.
      places: mesh axes that columns are divided over; () where each device computes all.
    """

    parallel: Parallel = SINGLE
    places: tuple[str, ...] = ()

    @classmethod
    def of(cls, parallel: Parallel, queries: int, window: int) -> Split:
        """The split of a step of so many queries: of a long one that its shards divide.

        Raises:
          MeshError: the rules give the columns a mesh axis that what lies beside them has too, or other mesh axes than
            a request's pages.
        """
        places, pages = parallel.places(AXIS), set(parallel.places("pages")) - set(parallel.places("batch"))
        if not places or queries <= window or queries % parallel.divided(places):
            return cls(parallel)
        for name in _BESIDE:
            if shared := set(places) & set(parallel.places(name)):
                raise MeshError(f"logical axes {AXIS!r} and {name!r} both lie on mesh axis {min(shared)!r}")
        if pages and pages != set(places):
            names = (" × ".join(sorted(axes)) for axes in (places, pages))
            raise MeshError("logical axis {!r} lies on mesh axes {}, but a request's pages on {}".format(AXIS, *names))
        return cls(parallel, places)

    @property
    def parts(self) -> int:
        return self.parallel.divided(self.places)

    def own(self, tree: Any, axis: int = 1) -> Any:
        """This device's columns of arrays that have all of them along ``axis``."""
        if not self.places:
            return tree

        def part(x: jax.Array) -> jax.Array:
            width = x.shape[axis] // self.parts
            return lax.dynamic_slice_in_dim(x, self.start(x.shape[axis]), width, axis)

        return jax.tree.map(part, tree)

    def start(self, queries: int) -> jax.Array | int:
        """The first of this device's columns of a step of so many."""
        return lax.axis_index(self.places) * (queries // self.parts) if self.places else 0

    def band(self, tree: Any, window: int) -> Any:
        """The window entries ``[batch, window + query, ...]`` that this device's columns see."""
        if not self.places:
            return tree

        def part(x: jax.Array) -> jax.Array:
            queries = x.shape[1] - window
            return lax.dynamic_slice_in_dim(x, self.start(queries), window + queries // self.parts, 1)

        return jax.tree.map(part, tree)

    def sum(self, tree: Any, places: tuple[str, ...]) -> Any:
        """Sums ``[batch, query, ...]`` over ``places``, which divide the columns if anything does: this device's."""
        if not self.places:
            return lax.psum(tree, places)
        return jax.tree.map(lambda x: lax.psum_scatter(x, self.places, scatter_dimension=1, tiled=True), tree)

    def whole(self, tree: Any, axis: int = 1) -> Any:
        """All columns of arrays of which each device has its own along ``axis``."""
        if not self.places:
            return tree
        return jax.tree.map(lambda x: lax.all_gather(x, self.places, axis=axis, tiled=True), tree)


WHOLE = Split()
"""Every device computes all columns."""
