"""Tokens of the page: which one `myriad watch` wants, where it is kept, and which ones senders of spans have.

    page token    drawn at each start, or given; opens every route. Kept in a file of the user, mode 0600
    span token    HMAC-SHA256(secret of the run, a label); opens POST /api/spans and nothing else

Node agents have the run's secret, on every machine, so they send spans without a token from the user. A
sender tries, in this order: the token in the environment, the run's span token, the page token of a server of
the same user on this machine. No token is an argument of a process: all users of a machine can read those.
"""

import hashlib
import hmac
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from myriad.system.state_folder import make_private, state_folder
from myriad.system.whole_file import write_whole
from myriad.wire.run_secret import secret_place

__all__ = [
    "LOOPBACK",
    "TOKEN",
    "TOKEN_FILE",
    "keep_private",
    "sender_tokens",
    "span_token",
    "token_file",
    "token_here",
]

TOKEN = "MYRIAD_COLLECTOR_TOKEN"
"""Environment variable with the token of a page. The token is in no job file."""
TOKEN_FILE = "MYRIAD_COLLECTOR_TOKEN_FILE"
"""Environment variable with the path of a file that has the token."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LABEL = b"myriad watch: spans of this run"
_MOST_TOKEN_BYTES = 4096


def token_file(port: int) -> Path:
    """Return the file with the token of the page on a port of this machine. Raises ``OSError`` if the user
    has no home folder."""
    return state_folder() / f"watch-{socket.gethostname()}-{port}.token"


def keep_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. Raises ``OSError``, also if another user can write into its
    folder."""
    make_private(path.parent)
    write_whole(path, text, mode=0o600)


def span_token(run: Path) -> str | None:
    """Return the token with which a run's node agents send spans; ``None`` if the run has no secret yet or
    this user cannot read it."""
    secret = _read(secret_place(run / "secret"))
    return hmac.new(secret, _LABEL, hashlib.sha256).hexdigest() if secret else None


def sender_tokens(run: Path, address: str) -> list[str]:
    """Return the tokens to try at a collector, best first."""
    found = [os.environ.get(TOKEN), _given_in_file(), span_token(run), token_here(address)]
    return list(dict.fromkeys(token for token in found if token))


def _given_in_file() -> str | None:
    name = os.environ.get(TOKEN_FILE)
    return _read(Path(name)).decode("latin-1") if name else None


def token_here(address: str) -> str | None:
    """Return the page token of this user's server at an address of this machine, or ``None``."""
    parts = urlsplit(address)
    if parts.hostname not in (*LOOPBACK, socket.gethostname()):
        return None
    try:
        return (
            _read(token_file(parts.port or (443 if parts.scheme == "https" else 80))).decode("latin-1")
            or None
        )
    except (OSError, ValueError):  # no home folder; no valid port
        return None


def _read(path: Path) -> bytes:
    """Return the text of a small file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_TOKEN_BYTES).strip()
    except OSError:
        return b""
