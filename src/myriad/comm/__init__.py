"""The rank grid and its groups, collectives and point-to-point. ``myriad.comm.layout`` needs no torch.

For your own program, use ``from myriad import comm`` and `connect`. Its `Communicator` has asynchronous,
hierarchical and prioritised collectives (`myriad.comm.communicator`; docs/guide/collectives.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myriad.comm.communicator import Communicator, Transfer, connect

__all__ = ["Communicator", "Transfer", "connect"]


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, because the rest of the package works without torch."""
    if name in __all__:
        from myriad.comm import communicator

        return getattr(communicator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
