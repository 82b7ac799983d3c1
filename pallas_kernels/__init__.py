"""The model's hot operations on plain arrays: one folder an operation, one file a back end.

Nothing here knows the model. Every operation has a public function that picks the back end
(:mod:`pallas_kernels.backend`), a readable reference, and one file for each implementation.
"""
