"""Engram's tables outside the model's parameters: where their rows lie, which are needed, and when they are read."""
