"""Spans and counters of a rank. Nothing here can block or kill a run."""
