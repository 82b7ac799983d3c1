"""Hyper-connections: the residual streams at the boundary between two sub-layers."""

from pallas_kernels.mhc.api import mhc
from pallas_kernels.mhc.types import Boundary, Coefficients, HyperConnection, Update

__all__ = ["Boundary", "Coefficients", "HyperConnection", "Update", "mhc"]
