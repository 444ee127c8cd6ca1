"""Keeping a run alive: starting ranks, watching them, saying which one failed."""
