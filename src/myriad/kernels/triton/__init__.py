"""Triton kernels for a GPU, each equivalent to an operator in the parent folder. Import them where they
run."""

from myriad.kernels.triton.compile_once import share_compilations

share_compilations()
