"""Choice of the kernels that compute the operators (``train.kernels``). No torch here."""

from typing import Literal

__all__ = ["Kernels"]

Kernels = Literal["auto", "plain", "triton"]
"""auto: chosen per operator, device and shape (`myriad.kernels.choice`). plain: the library's operators
everywhere. triton: Myriad's own Triton kernels, with an error if one of them cannot run."""
