"""Linen modules and the equations between them: parameters only, no state."""
