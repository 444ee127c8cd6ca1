"""Kernels for a GPU, each the same as an operator beside this folder; imported where they run, not before."""
