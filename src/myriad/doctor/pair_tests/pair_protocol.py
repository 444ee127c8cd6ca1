"""What both ends of the pairwise test's connections agree on: names, sizes. See `myriad.wire`.

node -> first node     PROTOCOL         each message has a code: rates, and which nodes test each other
node -> node           a protocol of its own for each test; after the handshake test data without codes
"""

from typing import Any

__all__ = ["MOST_BYTES", "PROTOCOL", "Message", "pair_protocol"]

Message = dict[str, Any]
PROTOCOL = "doctor"
MOST_BYTES = 2**16
"""Size of the largest message that is accepted."""


def pair_protocol(token: str) -> str:
    """Return the protocol of one test of a pair; ``token`` is new for each test."""
    return f"doctor pair {token}"
