"""Rehearsal of a cluster on one machine: the measured constants of its cores, and ranks that share cores."""
