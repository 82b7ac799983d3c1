"""Number formats as the model uses them: rounding policies and rotary positions."""
