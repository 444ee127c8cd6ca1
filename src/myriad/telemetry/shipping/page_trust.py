"""Which certificate of a page with TLS its clients accept: senders of spans, and `myriad watch --remote`.

    MYRIAD_COLLECTOR_CA       a file of certificates (PEM) that sign the page's or are it, or
                              sha256:FINGERPRINT of the page's own; before the job key telemetry.collector_ca
    page on this machine      the certificate that `myriad watch` of the same user has made
    else                      the certificates of the system

A fingerprint is compared before a byte is sent, so that no token reaches another server. The name of the
server is then not compared: the certificate is known.
"""

import hashlib
import hmac
import http.client
import os
import re
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from myriad.system.state_folder import state_folder
from myriad.telemetry.shipping.page_token import LOOPBACK

__all__ = ["CERTIFICATES", "connect_page", "fingerprint_of", "is_trust", "page_certificate"]

CERTIFICATES = "MYRIAD_COLLECTOR_CA"
"""Environment variable with the certificates that a page's clients accept."""
_PIN = re.compile(r"sha256:([0-9a-f]{64})")


def page_certificate() -> Path:
    """Return the file with the certificate that `myriad watch` of this user makes on this machine. Raises
    ``OSError`` if the user has no home folder."""
    return state_folder() / f"watch-{socket.gethostname()}.crt"


def fingerprint_of(certificate: bytes) -> str:
    """Return sha256:FINGERPRINT of a certificate in DER."""
    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


def is_trust(text: str) -> bool:
    """Return whether the text is a fingerprint or may be the path of a file."""
    return _pin(text) is not None or not text.lower().startswith("sha256:")


def connect_page(address: str, timeout: float, trust: str | None = None) -> http.client.HTTPConnection:
    """Prepare a connection to a page at http[s]://HOST[:PORT], which verifies the page's certificate when it
    connects. ``trust`` is a file or a fingerprint; without it, `CERTIFICATES` is read. Raises ``OSError`` if
    the certificates cannot be read."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme != "https":
        return http.client.HTTPConnection(host, parts.port, timeout=timeout)
    trust = trust or os.environ.get(CERTIFICATES) or _own(host)
    pin = None if trust is None else _pin(trust)
    if trust is not None and pin is None:
        if not is_trust(trust):
            raise OSError(f"{trust} is no fingerprint: sha256: and 64 digits from 0 to f")
        try:
            context = ssl.create_default_context(cafile=trust)
        except OSError as error:
            raise OSError(f"{trust}: no certificates can be read ({error.strerror or error})") from None
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout, context=context)
    if pin is None:
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout)
    return _PinnedConnection(host, parts.port, timeout, pin)


class _PinnedConnection(http.client.HTTPSConnection):
    """A connection to the one server whose certificate has the fingerprint."""

    def __init__(self, host: str, port: int | None, timeout: float, pin: str) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # `connect` compares it
        super().__init__(host, port, timeout=timeout, context=context)
        self._pin = pin

    def connect(self) -> None:
        """Connect, and compare the server's certificate. Raises ``OSError`` if it is another one."""
        super().connect()
        found = fingerprint_of(self.sock.getpeercert(binary_form=True) or b"")
        if not hmac.compare_digest(found, self._pin):
            self.close()
            raise ssl.SSLCertVerificationError(f"the server's certificate is {found}, not {self._pin}")


def _pin(text: str) -> str | None:
    """Return the fingerprint in its usual form; colons and capitals, as browsers show it, are accepted."""
    scheme, _, digits = text.partition(":")
    usual = f"{scheme}:{digits.replace(':', '')}".lower()
    return usual if _PIN.fullmatch(usual) else None


def _own(host: str) -> str | None:
    """Return the file with the certificate of this user's pages, for a page of this machine."""
    if host not in (*LOOPBACK, socket.gethostname()):
        return None
    try:
        file = page_certificate()
        return str(file) if file.is_file() else None
    except OSError:
        return None
