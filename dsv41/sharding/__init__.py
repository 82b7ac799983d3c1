"""Meshes, and how parameters, state and activations lie on them."""
