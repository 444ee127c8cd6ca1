"""Servers that alarms are sent to in tests: HTTP and SMTP on loopback, as strict as the real ones."""

import base64
import http.server
import json
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["HookServer", "MailServer", "certificate"]


class HookServer:
    """Answers POSTs with what `answers` holds, the last again and again."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.answers: list[tuple[int, str, dict[str, str]]] = [(200, "ok", {})]
        self.hangs = threading.Event()
        """Set: nothing is answered until it is cleared."""
        self.released = threading.Event()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    @contextmanager
    def serving(self) -> Iterator[str]:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.hangs.is_set():
                    outer.released.wait(60)
                outer.requests.append((dict(self.headers), json.loads(body)))
                answers = outer.answers
                code, text, headers = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()


def certificate(folder: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, in one file."""
    pem = folder / "server.pem"
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        [*words, "-keyout", key, "-out", cert, "-days", "2", *subject], check=True, capture_output=True
    )
    pem.write_text(key.read_text() + cert.read_text())
    return pem


class MailServer:
    """An SMTP server that wants STARTTLS and a login before it takes mail (RFC 5321, 3207, 4954)."""

    def __init__(self, pem: Path | None, user: str = "", password: str = "") -> None:
        self.mails: list[tuple[list[str], str]] = []
        """Receivers and text of each mail."""
        self.refuses = 0
        """Status with which mail is refused; 0: it is taken."""
        self.is_tls_from_start = False
        self._login = base64.b64encode(f"\0{user}\0{password}".encode()).decode() if user else ""
        self._context = None
        if pem is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(pem)

    @contextmanager
    def serving(self) -> Iterator[str]:
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    outer._talk(self.request)

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    def _talk(self, connection: Any) -> None:
        is_secret, is_known, receivers = False, not self._login, list[str]()
        if self.is_tls_from_start and self._context is not None:
            connection, is_secret = self._context.wrap_socket(connection, server_side=True), True
        file = connection.makefile("rwb", buffering=0)

        def say(text: str) -> None:
            file.write(text.encode() + b"\r\n")

        say("220 test")
        while line := file.readline().decode().rstrip("\r\n"):
            verb = line.split(" ")[0].upper()
            if verb == "EHLO":
                say("250-test")
                say("250 AUTH PLAIN" if is_secret else "250 STARTTLS" if self._context else "250 HELP")
            elif verb == "STARTTLS" and self._context is not None:
                say("220 go on")
                connection = self._context.wrap_socket(connection, server_side=True)
                file, is_secret = connection.makefile("rwb", buffering=0), True
            elif verb == "AUTH" and is_secret:
                is_known = line.split(" ")[-1] == self._login
                say("235 welcome" if is_known else "535 5.7.8 wrong password " + line)
            elif verb == "MAIL":
                receivers = []
                say("250 ok" if is_known and not self.refuses else f"{self.refuses or 530} no")
            elif verb == "RCPT":
                receivers.append(line.partition("<")[2].partition(">")[0])
                say("250 ok")
            elif verb == "DATA":
                say("354 go on")
                text = ""
                while (part := file.readline().decode()) != ".\r\n":
                    text += part
                self.mails.append((receivers, text))
                say("250 taken")
            elif verb == "QUIT":
                say("221 bye")
                return
            else:
                say("250 ok" if verb in ("RSET", "NOOP") else "502 unknown")
