"""Spans in memory: bounded, in columns, summed as they come in."""
