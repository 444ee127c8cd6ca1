"""Fault injection: cause faults in a real run on purpose, and grade how the run recovers."""
