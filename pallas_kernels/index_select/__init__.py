"""The lightning indexer's selection: the best entries of a request for each query, and the best blocks of them."""

from pallas_kernels.index_select.api import index_reselect, index_select
from pallas_kernels.index_select.types import BlockSelection, Selection

__all__ = ["BlockSelection", "Selection", "index_reselect", "index_select"]
