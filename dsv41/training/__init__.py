"""Training: texts to batches, the losses and the step, the optimizers, the loop around them."""
