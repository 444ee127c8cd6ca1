"""What a transport says when a rank does not answer, told in one line.

A peer that hangs and a link that is down look alike from here: nothing arrives until `comm.timeout_seconds`
have passed. A peer that ended is known at once, by its closed connection. The transports raise plain
`RuntimeError`, so their words decide; anything else passes through as it is.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from myriad.errors import RunFailedError

__all__ = ["LostPeerError", "lost_peers_told"]

_TIMED_OUT = re.compile(
    r"timed out waiting|timeout caused pair closure|wait timeout|timed out after \d+ ?ms"
    r"|collective operation timeout|milliseconds before timing out",
    re.IGNORECASE,
)
_CLOSED = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|communicator was aborted"
    r"|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)


class LostPeerError(RunFailedError):
    """Another rank is gone, or does not answer."""


@contextmanager
def lost_peers_told(timeout_seconds: float) -> Iterator[None]:
    """Turns an error of the transport about another rank into a `LostPeerError`."""
    try:
        yield
    except RuntimeError as error:
        if _TIMED_OUT.search(str(error)):
            told = (
                f"timed out: another rank did not answer for {timeout_seconds:g} s (comm.timeout_seconds): "
            )
            raise LostPeerError(told + "it hangs, or the link to it is down") from error
        if _CLOSED.search(str(error)):
            raise LostPeerError("a connection was closed by another rank, which has ended") from error
        raise
