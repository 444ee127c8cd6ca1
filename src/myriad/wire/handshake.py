"""Mutual authentication: both ends of a connection prove that they have a secret, and derive its keys.

    listener ──challenge: nonce A───────────────► connector
             ◄─answer: nonce B, proof─────────────            extract = HMAC-SHA256(A + B, secret)
             ──proof────────────────────────────►             proof, keys = expand(extract, label)
             ◄──────── messages with codes ──────►

This is HKDF (RFC 5869) with both nonces as the salt. The label of each output has the protocol, the direction
and, inside TLS, the fingerprint of the listener's certificate. A proof or a key is therefore worth nothing on
another connection, in the other direction, for another protocol, or through a man in the middle with a
certificate of its own. The secret never crosses the connection; who has only listened to it can test guesses
of the secret, so it must be long and random. Keys are as safe as the secret: use TLS if recorded traffic is
to stay unreadable after the secret is known.
"""

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from myriad.wire.frame_codes import KEY_BYTES, DirectionCodes
from myriad.wire.framing import VERSION, Refused

__all__ = [
    "ANSWER_BYTES",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "ConnectorHandshake",
    "ListenerHandshake",
    "SessionCodes",
]

NONCE_BYTES = PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES

_OTHER_SECRET = "the peer does not know the secret"
_End = Literal["listener", "connector"]


@dataclass(frozen=True)
class SessionCodes:
    """Codes of both directions of one connection, as one end uses them."""

    sent: DirectionCodes
    received: DirectionCodes


class _Derived:
    """What follows from a secret and two nonces."""

    def __init__(self, secret: bytes, challenge: bytes, nonce: bytes, protocol: str, channel: bytes) -> None:
        self._extract = hmac.digest(challenge + nonce, secret, "sha256")
        self._label = f"myriad {VERSION}\0{protocol}\0".encode() + channel

    def _expand(self, what: str, count: int) -> bytes:
        info, block, found = self._label + f"\0{what}".encode(), b"", b""
        for number in range(1, -(-count // 32) + 1):
            block = hmac.digest(self._extract, block + info + bytes([number]), "sha256")
            found += block
        return found[:count]

    def proof(self, end: _End) -> bytes:
        """Return the proof that this end has the secret."""
        return self._expand(f"proof of the {end}", PROOF_BYTES)

    def codes(self, end: _End) -> SessionCodes:
        """Return the codes as this end uses them."""
        listener = DirectionCodes(self._expand("frames of the listener", KEY_BYTES))
        connector = DirectionCodes(self._expand("frames of the connector", KEY_BYTES))
        return SessionCodes(listener, connector) if end == "listener" else SessionCodes(connector, listener)


class ListenerHandshake:
    """The handshake of the end that listened."""

    def __init__(self, protocol: str, secrets_: Iterable[bytes], channel: bytes = b"") -> None:
        """``secrets_``: the connector must prove one of them. ``channel``: fingerprint of this end's
        certificate, inside TLS."""
        self._protocol, self._secrets, self._channel = protocol, list(secrets_), channel
        self.challenge = secrets.token_bytes(NONCE_BYTES)
        self.refusal = secrets.token_bytes(PROOF_BYTES)
        """Sent in place of a proof to a peer that is refused: it then knows that the secrets differ."""

    def accept(self, answer: bytes) -> tuple[bytes, SessionCodes]:
        """Check the connector's answer; return the proof to send, and the codes. Raises `Refused`."""
        if len(answer) != ANSWER_BYTES:
            raise Refused("an answer of the wrong size")
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        for secret in self._secrets:
            found = _Derived(secret, self.challenge, nonce, self._protocol, self._channel)
            if hmac.compare_digest(proof, found.proof("connector")):
                return found.proof("listener"), found.codes("listener")
        raise Refused(_OTHER_SECRET)


class ConnectorHandshake:
    """The handshake of the end that connected."""

    def __init__(self, protocol: str, secret: bytes, channel: bytes = b"") -> None:
        """``channel``: fingerprint of the listener's certificate, inside TLS."""
        self._protocol, self._secret, self._channel = protocol, secret, channel
        self._derived: _Derived | None = None

    def answer(self, challenge: bytes) -> bytes:
        """Return the answer to the listener's challenge. Raises `Refused`."""
        if len(challenge) != NONCE_BYTES:
            raise Refused("a challenge of the wrong size")
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._derived = _Derived(self._secret, challenge, nonce, self._protocol, self._channel)
        return nonce + self._derived.proof("connector")

    def finish(self, proof: bytes) -> SessionCodes:
        """Check the listener's proof and return the codes. Raises `Refused`."""
        assert self._derived is not None, "answered before"
        if not hmac.compare_digest(proof, self._derived.proof("listener")):
            raise Refused(_OTHER_SECRET)
        return self._derived.codes("connector")
