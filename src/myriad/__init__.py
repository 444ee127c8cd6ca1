"""Myriad: plan, rehearse, run, show and keep alive the training of large language models."""

__version__ = "0.1.0"

__all__ = ["__version__"]
