"""Report a transport error about an unresponsive rank in one line.

A peer that hangs and a link that is down look alike from here: nothing arrives until `comm.timeout_seconds`
have passed. A peer that ended is detected at once, by its closed connection. The transports raise plain
`RuntimeError`, so the text of the error decides; any other error passes through unchanged.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from myriad.errors import RunFailedError

__all__ = ["LostPeerError", "report_lost_peers"]

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
    """Another rank has ended or does not respond."""


@contextmanager
def report_lost_peers(timeout_seconds: float) -> Iterator[None]:
    """Turn a transport error about another rank into a `LostPeerError`."""
    try:
        yield
    except RuntimeError as error:
        if _TIMED_OUT.search(str(error)):
            reason = (
                f"timed out: another rank did not answer for {timeout_seconds:g} s (comm.timeout_seconds): "
            )
            raise LostPeerError(reason + "it hangs, or the link to it is down") from error
        if _CLOSED.search(str(error)):
            raise LostPeerError("a connection was closed by another rank, which has ended") from error
        raise
