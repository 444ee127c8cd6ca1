"""Values of job keys that name operators and their kernels. No torch here."""

from typing import Literal

__all__ = ["GATED", "Activation", "Kernels"]

Kernels = Literal["auto", "plain", "triton"]
"""auto: chosen per operator, device and shape (`myriad.kernels.choice`). plain: the library's operators
everywhere. triton: Myriad's own Triton kernels, with an error if one of them cannot run."""
Activation = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]
"""Activation functions of an MLP (`myriad.kernels.activation`)."""
GATED: tuple[Activation, ...] = ("swiglu", "geglu", "geglu_tanh")
"""Activations of two products, a gate and a value (Shazeer, arXiv 2002.05202)."""
