"""Whose kernels compute the operators: a job's wish. No torch here."""

from typing import Literal

__all__ = ["Kernels"]

Kernels = Literal["auto", "plain", "triton"]
"""auto: per operator, device and shape (`myriad.kernels.choice`); plain: the library's operators everywhere;
triton: Myriad's own Triton kernels, or a refusal where one of them cannot run."""
