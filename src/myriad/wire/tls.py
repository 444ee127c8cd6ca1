"""TLS 1.3 between processes of a run, with certificates that are made at start and never stored.

    listener     makes a key and a self-signed certificate when it starts, in memory only
    connector    takes any certificate, and puts the fingerprint of the one it saw into its proof
    listener     puts the fingerprint of its own certificate into its proof

TLS hides what is sent and gives forward secrecy; the handshake of the run's secret inside it (`handshake`)
says who the other end is. A man in the middle must show a certificate of his own, so the two ends prove
different fingerprints, and both refuse.
"""

import hashlib
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING

__all__ = ["TlsIdentity", "connector_context", "new_certificate", "peer_fingerprint", "tls_identity"]

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import CertificateBuilder

_DAYS = 3650
"""Validity of a certificate in days. The connector does not check it; the key ends with the process."""


@dataclass(frozen=True)
class TlsIdentity:
    """The key and certificate of a process that listens."""

    context: ssl.SSLContext
    fingerprint: bytes
    """SHA-256 of the certificate."""


@cache
def tls_identity() -> TlsIdentity:
    """Return the identity of this process, which is made at the first call."""
    certificate, key = new_certificate("myriad", _DAYS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # connections are not resumed
    descriptor = os.memfd_create("myriad-tls")  # `ssl` reads files only; this one has no name
    try:
        os.write(descriptor, key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return TlsIdentity(context, _fingerprint(ssl.PEM_cert_to_DER_cert(certificate.decode())))


@cache
def connector_context() -> ssl.SSLContext:
    """Return the settings of the end that connects. It accepts any certificate: see `peer_fingerprint`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_fingerprint(connection: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the fingerprint of the listener's certificate, which this end's proof must contain."""
    certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None, "a TLS 1.3 listener has a certificate"
    return _fingerprint(certificate)


def _fingerprint(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def new_certificate(
    common_name: str,
    days: int,
    extended: Callable[["CertificateBuilder", "EllipticCurvePublicKey"], "CertificateBuilder"] | None = None,
) -> tuple[bytes, bytes]:
    """Return a new self-signed certificate and its key, in PEM. ``extended`` adds extensions."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of other machines
        .not_valid_after(now + timedelta(days=days))
    )
    builder = builder if extended is None else extended(builder, key.public_key())
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private
