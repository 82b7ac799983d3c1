"""Parts of Hopper kernels that several operations share."""
