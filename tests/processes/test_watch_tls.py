"""If these fail, a page's token, or a run's spans, cross a network in clear or reach a stranger's server."""

import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from watched_server import Watching, make_run, spans_of

from myriad.cli.watch_access import page_tls
from myriad.errors import BadInputError
from myriad.telemetry.shipping.outlets import Collector
from myriad.telemetry.shipping.page_token import sender_tokens, span_token
from myriad.telemetry.shipping.page_trust import CERTIFICATES
from myriad.wire.run_secret import run_secret

ALL = ("--host", "0.0.0.0")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of the page's user, also in this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(CERTIFICATES, raising=False)
    return tmp_path / "state" / "myriad"


def refused(*options: str) -> str:
    command = [sys.executable, "-m", "myriad.cli.main", "watch", "--no-open", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended
    return ended.stderr


def certificate_of(port: int) -> bytes:
    """The certificate that a server on this machine has, in DER."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 60) as plain, context.wrap_socket(plain) as link:
        return link.getpeercert(binary_form=True) or b""


def test_a_page_for_other_machines_has_tls_and_a_private_key(tmp_path: Path, state: Path) -> None:
    with Watching(make_run(tmp_path / "run"), ALL) as watching:
        assert watching.told["url"].startswith("https://") and watching.ask("run")["name"] == "run"
        (own,) = state.glob("*.pem")
        (public,) = state.glob("*.crt")
        assert own.stat().st_mode & 0o777 == 0o600 and "PRIVATE" not in public.read_text()
        entered = watching.client.get(f"/?token={watching.token}")
        assert "secure" in entered.headers["set-cookie"].lower()
        with socket.create_connection(("127.0.0.1", watching.port), 60) as plain:
            plain.sendall(f"GET /?token={watching.token} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b"HTTP/1.1 2" not in plain.recv(4096), "nothing is answered in clear"
        first, served = watching.told["fingerprint"], certificate_of(watching.port)
    with Watching(watching.run, ALL) as again:
        assert again.told["fingerprint"] == first and certificate_of(again.port) == served, (
            "a pin stays valid"
        )


def test_spans_go_to_the_page_with_the_right_certificate_only(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    run_secret(run.path / "secret")
    with Watching(run, ALL) as watching:

        def post(step: int, trust: str | None, scheme: str = "https") -> None:
            url = f"{scheme}://127.0.0.1:{watching.port}"
            Collector(url, "run", lambda: [span_token(run.path) or ""], trust).post([spans_of(step)])

        pin = watching.told["fingerprint"]
        (public,) = state.glob("*.crt")
        post(1, None)  # of the same user, on the same machine
        public.rename(tmp_path / "elsewhere.crt")
        with pytest.raises(OSError, match=f"certificate.*{CERTIFICATES} names"):
            post(2, None)
        post(2, str(tmp_path / "elsewhere.crt"))
        post(3, pin.upper().replace("SHA256", "sha256"))
        wrong = f"sha256:{'0' * 64}"
        with pytest.raises(OSError, match=f"the server's certificate is {pin}, not {wrong}"):
            post(4, wrong)
        with pytest.raises(OSError, match="no certificates can be read"):
            post(4, str(tmp_path / "missing.crt"))
        with pytest.raises(OSError, match="name https://"):
            post(4, None, "http")
        monkeypatch.setenv(CERTIFICATES, pin)
        post(4, wrong)  # the environment of a machine is before the job's key
        assert watching.until(lambda told: told["last_step"] == 4)


def test_the_page_of_another_machine_is_verified_before_it_gets_the_token(
    tmp_path: Path, state: Path
) -> None:
    with Watching(make_run(tmp_path / "run"), ALL) as watching:
        url, pin = f"https://127.0.0.1:{watching.port}", watching.told["fingerprint"]
        (tmp_path / "token").write_text(f"{watching.token}\n")
        command = ["--remote", url, "--token-file", str(tmp_path / "token")]
        shown = subprocess.run(
            [sys.executable, "-m", "myriad.cli.main", "watch", "--no-open", *command, "--tls-ca", pin],
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "other")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert shown.returncode == 0, shown
        wrong = refused(*command, "--tls-ca", f"sha256:{'1' * 64}")
        assert "a certificate that is not accepted" in wrong and wrong.count("\n") == 1
        assert "named https://" in refused(*[word.replace("https", "http") for word in command])


def test_a_certificate_of_the_users_own(tmp_path: Path, state: Path) -> None:
    made = page_tls("0.0.0.0", None, None, None)
    assert made is not None
    text = made.certificate.read_text()
    cert, key = tmp_path / "page.crt", tmp_path / "page.key"
    begin = text.index("-----BEGIN CERT")
    cert.write_text(text[begin:])
    key.write_text(text[:begin])
    key.chmod(0o644)  # whatever the umask of the process is
    run = make_run(tmp_path / "run")
    assert "--tls-key" in refused(str(run.path), "--tls-cert", str(cert), "--tls-key", str(key)), "0644"
    key.chmod(0o600)
    files = ("--tls-cert", str(cert), "--tls-key", str(key))
    with Watching(run, files) as watching:
        assert watching.told["fingerprint"] == made.fingerprint and watching.ask("run")["name"] == "run"
    assert "--tls-cert" in refused(str(run.path), "--tls-cert", str(tmp_path / "none"))
    cert.chmod(0o600)
    assert "--tls-cert" in refused(str(run.path), "--tls-cert", str(cert)), "without its key"
    assert "only with --tls-cert" in refused(str(run.path), "--tls-key", str(key))
    assert "not with --tls-cert" in refused(str(run.path), *files, "--no-tls")
    locked = tmp_path / "locked.key"
    options = ["-aes256", "-passout", "pass:word", "-in", str(key), "-out", str(locked)]
    if subprocess.run(["openssl", "ec", *options], capture_output=True).returncode == 0:
        locked.chmod(0o600)
        assert "passphrase" in refused(str(run.path), "--tls-cert", str(cert), "--tls-key", str(locked))


def test_a_certificate_is_made_again_if_it_is_old_readable_or_of_another_name(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(host: str = "0.0.0.0") -> str:
        found = page_tls(host, None, None, None)
        assert found is not None
        return found.fingerprint

    first = made()
    assert made() == first
    assert page_tls("127.0.0.1", None, None, None) is None and page_tls("0.0.0.0", None, None, False) is None
    local = page_tls("127.0.0.1", None, None, True)
    assert local is not None and local.fingerprint == first
    named = made("192.0.2.7")
    assert named != first and made() == named
    (own,) = state.glob("*.pem")
    own.chmod(0o644)
    readable = made()
    assert readable != named and own.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("myriad.cli.watch_access._RENEW_DAYS", 900)
    assert made() != readable
    own.write_text("torn")
    assert made().startswith("sha256:")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(BadInputError, match="needs the package cryptography"):
        made()


def test_without_tls_the_user_is_warned(tmp_path: Path, state: Path) -> None:
    run = make_run(tmp_path / "run")
    with Watching(run, (*ALL, "--no-tls")) as watching:
        assert httpx.get(f"http://127.0.0.1:{watching.port}/api/run").status_code == 401
        assert watching.ask("run")["name"] == "run" and "fingerprint" not in watching.told
        watching.until(lambda told: "in clear" in watching.errors.read_text())
    assert watching.errors.read_text().count("\n") == 1
    assert sender_tokens(run.path, watching.told["url"]) == [], "the token file goes with the server"


def test_a_client_that_never_ends_its_handshake_does_not_keep_the_server(tmp_path: Path, state: Path) -> None:
    with Watching(make_run(tmp_path / "run"), ALL) as watching:
        with socket.create_connection(("127.0.0.1", watching.port), 60):
            assert json.loads(watching.client.get("/api/run").content)
            with watching.client.stream("GET", "/api/stream") as page:
                next(page.iter_lines())
                watching.process.terminate()
                assert watching.process.wait(10) is not None
