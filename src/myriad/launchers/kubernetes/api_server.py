"""A client of the API server for pods, with the token and the certificate authority that each pod has."""

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["Api", "ApiError", "in_cluster"]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ANSWER_SECONDS = 10.0
_MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """A request failed, or the API server refused it."""


class Api:
    """Client of one API server, for use in one thread."""

    def __init__(self, url: str, account: Path = _ACCOUNT) -> None:
        """``account``: the folder with ``token`` and ``ca.crt``."""
        self._url, self._account = url, account

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return an object, or a list of objects. Raises `ApiError`."""
        return self._ask("GET", f"{path}?{urllib.parse.urlencode(query)}" if query else path)

    def patch(self, path: str, change: dict[str, Any]) -> None:
        """Merge ``change`` into an object. Raises `ApiError`."""
        self._ask("PATCH", path, change, _MERGE)

    def delete(self, path: str, grace_seconds: int) -> None:
        """Request the deletion of an object. Raises `ApiError`."""
        self._ask("DELETE", path, {"gracePeriodSeconds": grace_seconds})

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            headers = {"Authorization": f"Bearer {self._token()}", "Content-Type": kind}
            request = urllib.request.Request(self._url + path, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS, context=self._context()) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ApiError(f"{method} {path}: {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            raise ApiError(f"{method} {path}: {error}") from None
        if not isinstance(found, dict):
            raise ApiError(f"{method} {path}: no object")
        return found

    def _token(self) -> str:
        """Read the token each time, because it is renewed every hour."""
        return (self._account / "token").read_text().strip()

    def _context(self) -> ssl.SSLContext | None:
        if not self._url.startswith("https:"):
            return None
        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))


def in_cluster() -> Api | None:
    """Return the client for the cluster of this pod; ``None`` outside a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return Api(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")
