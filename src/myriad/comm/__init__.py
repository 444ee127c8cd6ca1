"""The rank grid and its groups, collectives and point-to-point. ``myriad.comm.layout`` needs no torch.

For a program of its own: ``from myriad import comm`` and `connect`, whose `Communicator` has asynchronous,
hierarchical and prioritised collectives (`myriad.comm.communicator`; docs/collectives.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myriad.comm.communicator import Communicator, Transfer, connect

__all__ = ["Communicator", "Transfer", "connect"]


def __getattr__(name: str) -> Any:
    """The public names, loaded when they are first used: the rest of the room works without torch."""
    if name in __all__:
        from myriad.comm import communicator

        return getattr(communicator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
