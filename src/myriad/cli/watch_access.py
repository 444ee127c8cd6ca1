"""Access to the page of ``myriad watch``: its token, the file that keeps it, TLS, and the way into a browser.

A page that other machines can reach has TLS, unless --no-tls says that a proxy in front of it has. Without
a given certificate one is made, signed by its own key:

    STATE/watch-HOST.pem    key and certificate, mode 0600; kept, so that fingerprints stay valid
    STATE/watch-HOST.crt    the certificate alone, for clients to copy; mode 0600

STATE is the folder of the page's tokens. The certificate can sign no other (CA:FALSE), so a browser or a
machine that trusts it trusts this page only.
"""

import html
import os
import socket
import ssl
import stat
import sys
import threading
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from myriad.errors import BadInputError
from myriad.telemetry.shipping import page_token
from myriad.telemetry.shipping.page_token import LOOPBACK, TOKEN, keep_private
from myriad.telemetry.shipping.page_trust import fingerprint_of, page_certificate
from myriad.wire.tls import new_certificate

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

__all__ = [
    "PageTls",
    "entry_page",
    "forget_token",
    "given_token",
    "has_browser",
    "keep_token",
    "open_in_browser",
    "page_tls",
    "remote_entry_page",
    "shown_path",
]

_LEAST_TOKEN = 16


def given_token(token: str | None, file: Path | None) -> str | None:
    """Return the token that the user gives; ``None`` if a new one is wanted. Raises `BadInputError`."""
    if token is not None:
        typer.echo(
            f"--token is deprecated: other users see it in lists of processes; use --token-file or {TOKEN}",
            err=True,
        )
        return _checked("--token", token)
    if file is None:
        return _checked(TOKEN, given) if (given := os.environ.get(TOKEN)) else None
    try:
        return _checked("--token-file", file.read_text(errors="replace").strip(), str(file))
    except OSError as error:
        raise BadInputError("--token-file", str(file), f"a file with a token ({error.strerror})") from None


def _checked(key: str, token: str, value: str = "") -> str:
    """Return the token. The error does not have it: its text can end in a log."""
    letters = token.replace("-", "").replace("_", "")
    if len(token) < _LEAST_TOKEN or not (letters.isascii() and letters.isalnum()):
        allowed = f"at least {_LEAST_TOKEN} letters, digits, - and _"
        raise BadInputError(key, value or f"{len(token)} characters", allowed)
    return token


def keep_token(port: int, token: str) -> Path | None:
    """Write the token into the user's file for this port. Return the file, or ``None`` if that fails."""
    try:
        file = page_token.token_file(port)
        keep_private(file, f"{token}\n")
    except OSError as error:
        typer.echo(f"the token is in no file: {error}", err=True)
        return None
    return file


def forget_token(file: Path | None) -> None:
    """Delete the file and the one that leads a browser to the page."""
    for path in () if file is None else (file, file.with_suffix(".html")):
        with suppress(OSError):
            path.unlink()


def entry_page(file: Path | None) -> Path | None:
    """Return the file that leads a browser to the page."""
    return None if file is None else file.with_suffix(".html")


def remote_entry_page() -> Path | None:
    """Return the same for another machine's page. It stays, because this process ends before the browser
    reads it."""
    with suppress(OSError):
        return page_token.token_file(0).with_name("watch-remote.html")
    return None


def shown_path(file: Path | None) -> str:
    """Return the file's name for a client, without the name of the user."""
    if file is None:
        return ""
    with suppress(ValueError, RuntimeError):
        return f"~/{file.relative_to(Path.home())}"
    return str(file)


def open_in_browser(page: str, entry: Path | None, has_token: bool) -> None:
    """Open the page. One with a token is opened through ``entry``: a browser's arguments are visible to all
    users of the machine."""
    if has_token:
        refresh = f'<meta http-equiv="refresh" content="0; url={html.escape(page)}">'
        try:
            if entry is None:
                raise OSError("its address would show the token in lists of processes")
            keep_private(entry, f'<!doctype html><meta charset="utf-8">{refresh}\n')
        except OSError as error:
            return typer.echo(f"no browser is opened: {error}", err=True)
        page = entry.as_uri()
    # In a thread: a browser in the terminal blocks until it is closed; the server keeps serving.
    threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()


def has_browser() -> bool:
    """Return whether a window can open here. Without one, Python starts any installed text browser in this
    terminal."""
    named = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in named)


_DAYS, _RENEW_DAYS = 800, 30
"""Browsers refuse certificates of more than 825 days."""
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class PageTls:
    """The certificate and key of a page."""

    certificate: Path
    """Certificate file, with its chain, in PEM format."""
    key: Path
    """File in PEM, the same or another one."""
    fingerprint: str
    """sha256: and the SHA-256 of the certificate."""
    public: Path
    """File with the certificate that clients can be given."""


def page_tls(host: str, certificate: Path | None, key: Path | None, wanted: bool | None) -> PageTls | None:
    """Return the certificate for a page at ``host``; ``None`` without TLS.

    ``wanted`` is --tls or --no-tls; ``None``: TLS if other machines can reach the page. Raises
    `BadInputError`."""
    if certificate is not None:
        if wanted is False:
            raise BadInputError("--no-tls", "given", "not with --tls-cert")
        return _given(certificate, key)
    if key is not None:
        raise BadInputError("--tls-key", str(key), "only with --tls-cert")
    if wanted is False or (wanted is None and host in LOOPBACK):
        return None
    return _own(host)


def _given(certificate: Path, key: Path | None) -> PageTls:
    key_file = key or certificate
    option, file = ("--tls-cert", certificate) if key is None else ("--tls-key", key)
    try:
        if key_file.stat().st_mode & stat.S_IROTH:
            raise BadInputError(option, str(file), "a key that other users cannot read: chmod o-r")
        text = certificate.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no PEM"
        raise BadInputError("--tls-cert", str(certificate), f"files in PEM ({why})") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key_file, _no_password)
        first = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        allowed = f"a certificate and its key without a passphrase, in PEM ({why})"
        raise BadInputError("--tls-cert", str(certificate), allowed) from None
    return PageTls(certificate, key_file, fingerprint_of(ssl.PEM_cert_to_DER_cert(first)), certificate)


_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def _no_password() -> str:
    raise ValueError("the key has a passphrase")


def _own(host: str) -> PageTls:
    """Return the certificate of this machine, which is made if there is none that is valid for ``host``."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding
    except ImportError:
        allowed = "needs the package cryptography (pip install 'myriad-train[watch]'); or --tls-cert FILE; "
        raise BadInputError("--host", host, f"{allowed}or --no-tls behind a proxy that has TLS") from None
    try:
        public = page_certificate()
        own = public.with_suffix(".pem")
        if not _is_valid(own, host):
            keep_private(own, _new(host))
        found = x509.load_pem_x509_certificate(own.read_bytes())
        keep_private(public, found.public_bytes(Encoding.PEM).decode())
    except OSError as error:
        allowed = (
            f"a certificate cannot be kept ({error}); --tls-cert FILE, or --no-tls behind a proxy with TLS"
        )
        raise BadInputError("--host", host, allowed) from None
    return PageTls(own, own, fingerprint_of(found.public_bytes(Encoding.DER)), public)


def _is_valid(own: Path, host: str) -> bool:
    """Return whether the kept certificate and key can serve ``host`` for some weeks."""
    from cryptography import x509

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(own)
        found = x509.load_pem_x509_certificate(own.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    has_name = host in _WILDCARDS or _general_name(host) in list(names)
    is_private = own.stat().st_mode & 0o077 == 0 and own.stat().st_uid == os.geteuid()
    return is_private and has_name and found.not_valid_after_utc - _now() > timedelta(days=_RENEW_DAYS)


def _new(host: str) -> str:
    """Return a new key and its certificate, in PEM."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usage = dict.fromkeys(_USAGES, False) | {"digital_signature": True}

    def extended(
        builder: x509.CertificateBuilder, public: "EllipticCurvePublicKey"
    ) -> x509.CertificateBuilder:
        names = x509.SubjectAlternativeName([_general_name(one) for one in _names(host)])
        return (
            builder.add_extension(names, False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(x509.KeyUsage(**usage), True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), False)
        )

    certificate, key = new_certificate(f"myriad watch {socket.gethostname()}", _DAYS, extended)
    return (key + certificate).decode()


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _now() -> datetime:
    return datetime.now(UTC)


def _names(host: str) -> list[str]:
    """Return the names and addresses at which the page may be opened."""
    own = socket.gethostname()
    found = [own, *LOOPBACK] if host in _WILDCARDS else [host, own, *LOOPBACK]
    with suppress(OSError):
        found += [str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(own, None)]
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # sends nothing; chooses the address of the default route
            found.append(probe.getsockname()[0])
    return list(dict.fromkeys(found))


def _general_name(text: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)
