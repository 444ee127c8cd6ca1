"""Trace files: exports of spans, and traces that an operator requests."""
