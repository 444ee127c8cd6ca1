"""An authenticated connection on asyncio streams.

    channel = StreamChannel(reader, writer)
    await channel.accept("driver", secret)       the end that listened; the other: connect("driver", secret)
    channel.send(b"...")
    body = await channel.receive()

Before the peer has authenticated, each frame that it may send has one known kind and at most 64 bytes, and
all of them must arrive within `AUTHENTICATION_SECONDS`. Afterwards a frame has at most ``most_bytes`` and a
code. A frame that breaks a rule raises `Refused`; the caller then closes the connection. A connection that
ends is never taken for the end of a message.
"""

import asyncio
import logging
from collections.abc import Iterable

from myriad.wire.frame_codes import DirectionCodes
from myriad.wire.frame_reader import FrameReader, packed_frame
from myriad.wire.framing import FrameKind, Refused
from myriad.wire.handshake import (
    ANSWER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ConnectorHandshake,
    ListenerHandshake,
    SessionCodes,
)
from myriad.wire.pending_connections import AUTHENTICATION_SECONDS
from myriad.wire.tls import TlsIdentity, connector_context, peer_fingerprint

__all__ = ["StreamChannel"]

_LOG = logging.getLogger(__name__)
_READ_BYTES = 2**16


class StreamChannel:
    """A connection whose ends authenticate, and then exchange messages of bytes."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        most_bytes: int,
        most_unread_bytes: int,
    ) -> None:
        """``most_bytes``: largest message. ``most_unread_bytes``: what the peer may leave unread; if it
        leaves more, the connection is ended."""
        self._reader, self._writer = reader, writer
        self._most_bytes, self._most_unread_bytes = most_bytes, most_unread_bytes
        self._frames = FrameReader()
        self._sent: DirectionCodes | None = None

    async def accept(self, protocol: str, secrets: Iterable[bytes], tls: TlsIdentity | None = None) -> None:
        """Authenticate as the end that listened; the peer must prove one of the secrets. ``tls``: encrypt.
        Raises `Refused`, ``OSError``, also for a peer that sends nothing."""
        async with asyncio.timeout(AUTHENTICATION_SECONDS):
            handshake = ListenerHandshake(protocol, secrets, b"" if tls is None else tls.fingerprint)
            self._write(FrameKind.CHALLENGE, handshake.challenge)
            if tls is not None:  # the peer waits for the challenge, so none of its bytes is read before
                await self._writer.start_tls(tls.context)
            answer = await self._next(FrameKind.ANSWER, ANSWER_BYTES)
            try:
                proof, codes = handshake.accept(answer)
            except Refused:
                self._write(FrameKind.PROOF, handshake.refusal)
                raise
            self._write(FrameKind.PROOF, proof)
        self._use(codes)

    async def connect(self, protocol: str, secret: bytes, *, encrypts: bool = False) -> None:
        """Authenticate as the end that connected. ``encrypts``: whether the listener uses TLS. Raises
        `Refused`, ``OSError``."""
        async with asyncio.timeout(AUTHENTICATION_SECONDS):
            challenge, certificate = await self._next(FrameKind.CHALLENGE, NONCE_BYTES), b""
            if encrypts:
                await self._writer.start_tls(connector_context())
                certificate = peer_fingerprint(self._writer.get_extra_info("ssl_object"))
            handshake = ConnectorHandshake(protocol, secret, certificate)
            self._write(FrameKind.ANSWER, handshake.answer(challenge))
            codes = handshake.finish(await self._next(FrameKind.PROOF, PROOF_BYTES))
        self._use(codes)

    def _use(self, codes: SessionCodes) -> None:
        self._sent, self._frames.codes = codes.sent, codes.received

    def send(self, body: bytes) -> None:
        """Send a message, without waiting."""
        assert len(body) <= self._most_bytes, "what is sent is known, and short"
        self._write(FrameKind.MESSAGE, body)

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was sent. Raises ``OSError``."""
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next message. Raises `Refused`, ``OSError``."""
        assert self._frames.codes is not None, "authenticated before"
        return await self._next(FrameKind.MESSAGE, self._most_bytes)

    def _write(self, kind: FrameKind, body: bytes) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(packed_frame(kind, body, self._sent))
        if self._unread_bytes() > self._most_unread_bytes:
            _LOG.warning("%s reads nothing, and its connection is ended", self.peer_name)
            self._writer.transport.abort()

    @property
    def peer_name(self) -> object:
        """Address of the peer, for messages."""
        return self._writer.get_extra_info("peername")

    def _unread_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def _next(self, kind: FrameKind, most_bytes: int) -> bytes:
        while (body := self._frames.next_body(kind, most_bytes)) is None:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise ConnectionError("the other end is gone")
            self._frames.add(data)
        return body

    def is_closing(self) -> bool:
        """Return whether the connection can no longer be used."""
        return self._writer.is_closing()

    def close(self) -> None:
        """Close, which also wakes a pending receive; the other end may never read what is in flight."""
        if self._unread_bytes():
            self._writer.transport.abort()
        else:
            self._writer.close()

    def abort(self) -> None:
        """Close at once; unsent messages may be lost."""
        self._writer.transport.abort()
