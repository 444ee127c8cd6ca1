"""LAMB, AdamW, learning-rate schedules, gradient clipping, precision. ``myriad.optim.config`` needs no torch."""
