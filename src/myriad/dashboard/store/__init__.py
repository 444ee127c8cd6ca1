"""Spans in bounded memory, in columns, with sums that are updated as spans arrive."""
