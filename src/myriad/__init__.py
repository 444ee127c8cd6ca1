"""Myriad: plan, rehearse, run, show and keep alive the training of large language models.

The Python interface is `myriad.api`; `log` records values of a user's own code in a step.
"""

from myriad.system.user_metrics import log

__all__ = ["__version__", "log"]

__version__ = "0.1.0"
