"""Execution of a program on real processes: tensor, pipeline and sharded data parallelism, and the
runtime."""
