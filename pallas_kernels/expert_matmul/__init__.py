"""Routed SwiGLU experts: each row through its own experts, weighted and summed."""

from pallas_kernels.expert_matmul.api import expert_matmul
from pallas_kernels.expert_matmul.weights import ExpertWeights, decode_weights

__all__ = ["ExpertWeights", "decode_weights", "expert_matmul"]
