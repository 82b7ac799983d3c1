"""What the TPU kernels share: reading packed memory, unpacking it."""
