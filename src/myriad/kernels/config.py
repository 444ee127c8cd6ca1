"""Values of job keys that name operators and their kernels. No torch here."""

from typing import Literal

__all__ = ["CLAMPED_SWIGLU_ALPHA", "CLAMPED_SWIGLU_LIMIT", "GATED", "Activation", "Kernels"]

Kernels = Literal["auto", "plain", "triton"]
"""auto: chosen per operator, device and shape (`myriad.kernels.choice`). plain: the library's operators
everywhere. triton: Myriad's own Triton kernels, with an error if one of them cannot run."""
Activation = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "clamped_swiglu", "geglu", "geglu_tanh"]
"""Activation functions of an MLP (`myriad.kernels.activation`)."""
GATED: tuple[Activation, ...] = ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh")
"""Activations of two products, a gate and a value (Shazeer, arXiv 2002.05202)."""
CLAMPED_SWIGLU_LIMIT = 7.0
"""Largest gate, and largest magnitude of a value, in ``clamped_swiglu``."""
CLAMPED_SWIGLU_ALPHA = 1.702
"""Factor of the gate inside the sigmoid of ``clamped_swiglu``."""
