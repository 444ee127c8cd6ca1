"""Myriad: plan, rehearse, run, show and keep alive the training of large language models.

The Python interface is `myriad.api`.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
