"""LAMB, AdamW, learning-rate schedules, clipping, precision. ``myriad.optim.config`` needs no torch."""
