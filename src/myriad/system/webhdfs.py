"""HDFS through WebHDFS, its HTTP interface: fsspec's client with the error handling that training needs.

    hdfs://NAMENODE[:PORT]/PATH       PORT is the name node's for Hadoop's own protocol, and is not used here:
                                      WebHDFS requests go to http://NAMENODE:9870, or to MYRIAD_WEBHDFS
    webhdfs://HOST:PORT/PATH          PORT is that of WebHDFS or of an HttpFS gateway; default 9870
    swebhdfs://HOST:PORT/PATH         the same over TLS; default 9871

    MYRIAD_WEBHDFS    http(s)://HOST:PORT of WebHDFS or HttpFS, of several name nodes with commas: the first
                      that answers and is not on standby is used
    HADOOP_USER_NAME  user.name of each request; a user in the URL (hdfs://USER@HOST/...) comes first
    MYRIAD_HDFS_TOKEN a delegation token as text (`hdfs fetchdt --print`), in place of a user
    MYRIAD_HDFS_KERBEROS=1   SPNEGO by the tickets of kinit; needs the package requests-kerberos

A request for bytes takes two steps: the name node answers with the address of a data node, which sends or
receives the bytes. This module adds what fsspec's client (2026.9) lacks: time limits, checks of the status
and length of a data node's answer, retries after temporary errors, name nodes on standby, and answers of
``false``. Reference: hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
"""

import os
import time
from typing import Any
from urllib.parse import quote, urlsplit

import requests
from fsspec.implementations.webhdfs import WebHDFile, WebHDFS

__all__ = ["HdfsByHttp"]

_PORTS = {"hdfs": 9870, "webhdfs": 9870, "swebhdfs": 9871}
_CONNECT_SECONDS, _SILENCE_SECONDS = 5.0, 30.0
"""Longest wait for a connection, and for the next byte of an answer."""
_TRIES = 3
_PAUSE_SECONDS = 0.5
_MOST_ERROR_CHARACTERS = 300
_BUSY = ("StandbyException", "RetriableException", "SafeModeException")
"""Errors of a name node that cannot answer now; another one may, or the same one later."""
_PREFIX = "/webhdfs/v1"


class HdfsByHttp(WebHDFS):
    """An HDFS file system. Errors are ``OSError`` with a one-line message."""

    protocol = ("hdfs", "webhdfs", "swebhdfs")

    def __init__(
        self, host: str = "", addresses: tuple[str, ...] = (), root: str = "", **options: Any
    ) -> None:
        """``addresses``: addresses of WebHDFS. ``root``: the URL without its path. ``options``: those of
        `fsspec.implementations.webhdfs.WebHDFS`."""
        if self._cached:
            return
        super().__init__(host, **options)
        self._bases, self._root = list(addresses), root
        self.url = f"{addresses[0]}{_PREFIX}"

    @staticmethod
    def _get_kwargs_from_urls(urlpath: str) -> dict[str, Any]:
        """Return the constructor's arguments. Raises ``ValueError`` if no address is configured."""
        scheme, _, rest = urlpath.partition("://")
        parts = urlsplit(f"{scheme}://{rest.partition('/')[0]}")
        user = {"user": parts.username} if parts.username else {}
        return {
            "host": parts.hostname or "",
            "addresses": tuple(_addresses(scheme, parts.hostname or "", parts.port)),
            "root": f"{scheme}://{parts.netloc}",
            **(_credentials() | user),
        }

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path."""
        return f"{self._root}{self._strip_protocol(name)}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = str(path)
        if "://" in text:  # without urllib, because # and ? may be part of a name
            text = "/" + text.partition("://")[2].partition("/")[2]
        return text.rstrip("/") or "/"

    def _call(
        self,
        op: str,
        method: str = "get",
        path: Any = None,
        data: Any = None,
        redirect: bool = True,
        **keys: Any,
    ) -> Any:
        """Send a request to a name node, with retries after temporary errors. Raises ``OSError``."""
        name = "" if path is None else self._strip_protocol(path)
        params = {**keys, **self.pars, "op": op.upper()}
        most = _TRIES * len(self._bases)
        for number in range(1, most + 1):
            url = self._apply_proxy(self.url + quote(name, safe="/="))
            try:
                return self._ask(method, url, params=params, data=data, allow_redirects=redirect)
            except OSError as error:
                if number == most or not _may_pass(error):
                    raise _plain(error, self.url) from None
            bases = self._bases[1:] + self._bases[:1]  # another name node, if there is one
            self._bases, self.url = bases, f"{bases[0]}{_PREFIX}"
            if number >= len(self._bases):
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable: the last attempt raises")

    def _ask(self, method: str, url: str, **keys: Any) -> Any:
        """Send one request with time limits. Raises ``OSError`` for an answer with an error status."""
        limits = (_CONNECT_SECONDS, _SILENCE_SECONDS)
        answer = self.session.request(method.upper(), url, timeout=limits, **keys)
        if answer.status_code >= 400:
            raise _error_of(answer)
        return answer

    def _send(self, method: str, answer: Any, body: bytes | None) -> bytes:
        """Make the second step: send the request to the data node named in ``answer``, and return its body.

        Raises ``OSError``."""
        location = answer.headers.get("Location")
        if location is None:  # HttpFS answers reads itself
            return _content(answer)
        headers = {"content-type": "application/octet-stream"}
        location = self._apply_proxy(location)
        try:
            return _content(self._ask(method, location, data=body, headers=headers, allow_redirects=False))
        except requests.RequestException as error:
            raise _plain(error, location) from error

    def _true(self, op: str, method: str, path: str, **keys: Any) -> None:
        """Send a request that is answered with true or false. Raises ``OSError`` for false."""
        answer = self._call(op, method, path=path, **keys).json()
        if answer.get("boolean") is False:
            raise OSError(f"{op} of {path} was refused by HDFS")

    def mkdir(self, path: str, create_parents: bool = True, **keys: Any) -> None:
        self._true("MKDIRS", "put", path)

    def mv(self, path1: str, path2: str, **keys: Any) -> None:
        self._true("RENAME", "put", self._strip_protocol(path1), destination=self._strip_protocol(path2))

    def rm(self, path: Any, recursive: bool = False, **keys: Any) -> None:
        for one in path if isinstance(path, list) else [path]:
            answer = self._call("DELETE", "delete", path=one, recursive=str(recursive).lower()).json()
            if answer.get("boolean") is False:
                raise FileNotFoundError(str(one))

    def rm_file(self, path: str, **keys: Any) -> None:
        self.rm(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **keys: Any) -> bytes:
        """Return a file, or a range of it, with one redirected request.

        Raises ``OSError`` if the answer has fewer bytes than the file has there."""
        if (start or 0) < 0 or (end is not None and end < 0):
            return bytes(super().cat_file(path, start, end, **keys))
        if end is not None and end <= (start or 0):
            return b""
        wanted: dict[str, Any] = {} if end is None else {"length": end - (start or 0)}
        return self._two_steps("OPEN", "get", path, offset=start or 0, **wanted)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **keys: Any) -> None:
        """Write a small file with one upload."""
        self._two_steps("CREATE", "put", path, body=bytes(value), overwrite=str(mode == "overwrite").lower())

    def _two_steps(self, op: str, method: str, path: str, body: bytes | None = None, **keys: Any) -> bytes:
        """Return the complete answer of a data node. Raises ``OSError``.

        If a data node fails, the name node is asked again, and may name another data node."""
        for number in range(1, _TRIES + 1):
            answer = self._call(op, method, path=path, redirect=False, **keys)
            try:
                return self._send(method, answer, body)
            except OSError as error:  # the name node may name another data node
                if number == _TRIES or isinstance(error, FileNotFoundError | PermissionError):
                    raise
            time.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable: the last attempt raises")

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **keys: Any) -> Any:
        kind = _Upload if "w" in mode or "a" in mode else _Download
        size = block_size or self.blocksize
        return kind(self, path, mode=mode, block_size=size, tempdir=self.tempdir, autocommit=True)


class _Download(WebHDFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        start, end = max(start, 0), min(self.size, end)
        found = self.fs.cat_file(self.path, start, end) if start < end else b""
        if len(found) != max(0, end - start):
            raise OSError(f"{self.path}: {len(found)} bytes came from byte {start} on, not {end - start}")
        return bytes(found)


class _Upload(WebHDFile):
    """Upload with CREATE for the first part and APPEND for each later one.

    A part that fails is not sent again: a data node may have stored some of it, and the file would then have
    those bytes twice."""

    def _initiate_upload(self) -> None:
        self._created = "a" in self.mode

    def _upload_chunk(self, final: bool = False) -> bool:
        content = self.buffer.getvalue()
        if self._created and not content:
            return True
        op, method = ("APPEND", "post") if self._created else ("CREATE", "put")
        keys = {} if self._created else {"overwrite": "true"}
        answer = self.fs._call(op, method, path=self.path, redirect=False, **keys)
        if "Location" not in answer.headers:
            raise OSError(f"{self.fs.url} names no data node for {op} of {self.path}")
        self.fs._send(method, answer, content)
        self._created = True
        return True


def _addresses(scheme: str, host: str, port: int | None) -> list[str]:
    """Return the addresses of WebHDFS. Raises ``ValueError`` if neither URL nor environment names one."""
    given = os.environ.get("MYRIAD_WEBHDFS", "")
    if scheme == "hdfs" and given:
        found = [one.strip().rstrip("/") for one in given.split(",") if one.strip()]
        if not all(one.startswith(("http://", "https://")) for one in found):
            raise ValueError(
                f"MYRIAD_WEBHDFS = {given!r}: http://HOST:PORT of WebHDFS; comma-separated if several"
            )
        return found
    if not host:
        raise ValueError(f"{scheme}:// needs a host: {scheme}://NAMENODE/PATH, or MYRIAD_WEBHDFS for hdfs://")
    web = port if port and scheme != "hdfs" else _PORTS[scheme]
    return [f"{'https' if scheme == 'swebhdfs' else 'http'}://{host}:{web}"]


def _credentials() -> dict[str, Any]:
    if token := os.environ.get("MYRIAD_HDFS_TOKEN"):
        return {"token": token}
    if os.environ.get("MYRIAD_HDFS_KERBEROS") == "1":
        return {"kerberos": True}
    user = os.environ.get("HADOOP_USER_NAME")
    return {"user": user} if user else {}


class HdfsError(OSError):
    """An error answer of Hadoop."""

    def __init__(self, message: str, exception: str, status: int) -> None:
        """``exception``: name of Hadoop's exception class; "": unknown."""
        super().__init__(message)
        self.exception, self.status = exception, status


def _error_of(answer: Any) -> OSError:
    """Return the error that an answer represents: Hadoop's RemoteException, or the HTTP status."""
    try:
        remote = answer.json()["RemoteException"]
        name, message = str(remote["exception"]), _one_line(remote["message"])
    except (ValueError, KeyError, TypeError):
        text = "" if "<" in answer.text[:200] else _one_line(answer.text)
        return HdfsError(f"HTTP {answer.status_code} {answer.reason} {text}".strip(), "", answer.status_code)
    if name == "FileNotFoundException":
        return FileNotFoundError(message)
    if name in ("AccessControlException", "SecurityException"):
        return PermissionError(message)
    return HdfsError(f"{name}: {message}", name, answer.status_code)


def _content(answer: Any) -> bytes:
    """Return the body of an answer, checked against its Content-Length. Raises ``OSError``."""
    body = bytes(answer.content)
    length = answer.headers.get("Content-Length") or ""
    if length.isdigit() and not answer.headers.get("Content-Encoding") and len(body) != int(length):
        raise ConnectionError(f"{len(body)} of {length} bytes came")
    return body


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:_MOST_ERROR_CHARACTERS]


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later, or at another name node."""
    if isinstance(error, HdfsError):
        return error.exception in _BUSY or error.status in (429, 502, 503, 504)
    return isinstance(error, requests.RequestException | ConnectionError)


def _plain(error: OSError, url: str) -> OSError:
    """Return the error as one line that names the server."""
    where = "/".join(url.split("/")[:3])
    if isinstance(error, FileNotFoundError | PermissionError):
        return error
    if isinstance(error, requests.Timeout):
        return OSError(f"WebHDFS at {where} did not answer in time")
    if isinstance(error, requests.ConnectionError):
        return OSError(f"WebHDFS at {where} cannot be reached; MYRIAD_WEBHDFS gives another address")
    return OSError(f"WebHDFS at {where}: {_one_line(error)}")
