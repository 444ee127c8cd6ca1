"""A Redis server with users and TLS: without the password no client can read or drive a run, and no other
server is taken for it."""

import datetime
import ipaddress
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from redis_server import Server

from myriad.comm.rendezvous.redis_address import RedisAddress, redis_address
from myriad.errors import RunFailedError

lease = pytest.importorskip("myriad.supervise.driver.redis_lease", reason="needs the package redis")
redis_store = pytest.importorskip("myriad.comm.rendezvous.redis_store", reason="needs the package redis")
x509 = pytest.importorskip("cryptography.x509", reason="needs the package cryptography")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths = folder / "server.pem", folder / "server.key"
    for path, content in zip(paths, (built.public_bytes(encoding), private), strict=True):
        path.write_bytes(content)
    return paths


@pytest.fixture
def protected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisAddress]:
    """The address of a server that takes only TLS and the user ``run`` with a password."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (apt-get install redis-server)")
    public, private = certificate(tmp_path)
    monkeypatch.setenv("MYRIAD_REDIS_PASSWORD", "right")
    monkeypatch.setenv("MYRIAD_REDIS_CA", str(public))
    tls = ["--tls-port", "{port}", "--tls-cert-file", str(public), "--tls-key-file", str(private)]
    (tmp_path / "users").write_text("user default off\nuser run on >right ~* &* +@all\n")
    users = ["--aclfile", str(tmp_path / "users")]
    server = Server("rediss://run@127.0.0.1", "--port", "0", *tls, "--tls-auth-clients", "no", *users)
    try:
        server.start()
        address = redis_address(server.url)
        assert address is not None
        yield address
    finally:
        server.kill()


def opened(address: RedisAddress):
    return redis_store.RedisStore(address, "a", timedelta(seconds=20))


def test_store_and_lease_reach_a_server_with_users_and_tls(protected: RedisAddress) -> None:
    store = opened(protected)
    store.set("key", "value")
    assert store.get("key") == b"value"
    lease.check_server(protected)


@pytest.mark.parametrize("password", ["wrong", ""])
def test_a_wrong_password_ends_the_start_at_once_and_is_not_repeated(
    protected: RedisAddress, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setenv("MYRIAD_REDIS_PASSWORD", password)
    with pytest.raises(RunFailedError, match="refuses") as refused:
        opened(protected)
    assert "wrong" not in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(lease.StoreUnavailableError):
        lease.check_server(protected)


def test_a_server_whose_certificate_is_unsigned_gets_no_password(
    protected: RedisAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MYRIAD_REDIS_CA")
    with pytest.raises(RunFailedError, match="certificate"):
        opened(protected)
