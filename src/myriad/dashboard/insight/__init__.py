"""Analyses of spans: time losses, stragglers, waits and the critical path. Pure functions of arrays."""
