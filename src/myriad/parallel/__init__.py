"""Execution of a program on real processes: the runtime, with tensor, pipeline and data parallelism."""
