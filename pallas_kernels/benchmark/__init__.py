"""Times operations at real shapes against the machine's limits, XLA and PyTorch (:mod:`pallas_kernels.bench`)."""
