"""Measuring what the model's approximations and parts cost in quality."""
