"""AdamW, LAMB, Muon, learning-rate schedules, clipping, precision. ``myriad.optim.config`` needs no torch."""
