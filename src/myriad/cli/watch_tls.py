"""TLS of the page of ``myriad watch``: the certificate that is given, or one that is made here.

A page that other machines can reach has TLS, unless --no-tls says that a proxy in front of it has. Without a
given certificate one is made, signed by its own key:

    STATE/watch-HOST.pem    key and certificate, mode 0600; kept, so that fingerprints stay valid
    STATE/watch-HOST.crt    the certificate alone, for clients to copy; mode 0600

STATE is the folder of the page's tokens. The certificate can sign no other (CA:FALSE), so a browser or a
machine that trusts it trusts this page only.
"""

import os
import socket
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from myriad.errors import BadInputError
from myriad.telemetry.shipping.page_token import LOOPBACK, keep_private
from myriad.telemetry.shipping.page_trust import fingerprint_of, page_certificate

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["PageTls", "page_tls"]

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
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"myriad watch {socket.gethostname()}"[:64])])
    usage = dict.fromkeys(_USAGES, False) | {"digital_signature": True}
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - timedelta(days=1))  # clocks of other machines
        .not_valid_after(_now() + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(one) for one in _names(host)]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.KeyUsage(**usage), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)).decode()


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
