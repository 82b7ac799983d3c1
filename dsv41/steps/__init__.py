"""Jitted steps: ``step(model, variables, state, inputs) -> (state, outputs)``, with the state donated."""
