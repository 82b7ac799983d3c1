"""Text on its way to the model: the vocabulary and the compressed ids that the Engram hash reads."""
