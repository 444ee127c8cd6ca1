"""The connection between the driver and an agent: typed messages as JSON, on an authenticated channel.

The agent connects and the driver listens; each proves that it has the run's secret, and each later message
has a code (`myriad.wire`). A message longer than `MAX_BYTES`, without a valid code, or without a JSON object
of a known kind ends the connection, never the process. Nothing is unpickled, and nothing that a message names
is run.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from myriad.wire.framing import Refused
from myriad.wire.message_codec import read_message, write_message
from myriad.wire.stream_channel import StreamChannel
from myriad.wire.tls import tls_identity

__all__ = ["MAX_BYTES", "MAX_UNREAD_BYTES", "AuthenticatedLink"]

_PROTOCOL = "driver"
MAX_BYTES = 2**22
MAX_UNREAD_BYTES = 2**24
"""Most bytes that a peer may leave unread; a peer that leaves more counts as lost."""


class AuthenticatedLink:
    """A connection on which both ends prove to have the run's secret."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.channel = StreamChannel(reader, writer, most_bytes=MAX_BYTES, most_unread_bytes=MAX_UNREAD_BYTES)

    async def accept(self, secret: bytes, *, encrypts: bool = False) -> None:
        """Authenticate as the driver. Raises `Refused`, ``OSError``."""
        await self.channel.accept(_PROTOCOL, [secret], tls_identity() if encrypts else None)

    async def connect(self, secret: bytes, *, encrypts: bool = False) -> None:
        """Authenticate as an agent, or as a person's command. Raises `Refused`, ``OSError``."""
        await self.channel.connect(_PROTOCOL, secret, encrypts=encrypts)

    def send(self, message: Any) -> None:
        """Send a dataclass, without waiting."""
        self.channel.send(write_message(message))

    async def receive(self, kinds: Iterable[type]) -> Any:
        """Return the next message, which must be one of these dataclasses. Raises `Refused`, ``OSError``."""
        text = await self.channel.receive()
        try:
            return read_message(text, kinds)
        except ValueError as error:
            raise Refused(str(error)) from None

    def is_closing(self) -> bool:
        """Return whether the connection can no longer be used."""
        return self.channel.is_closing()

    def close(self) -> None:
        """Close, which also wakes a pending receive; the other end may never read what is in flight."""
        self.channel.close()

    def abort(self) -> None:
        """Close at once; unsent messages may be lost."""
        self.channel.abort()
