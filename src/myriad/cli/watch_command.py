"""``myriad watch``: a run in the browser."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.shared_options import AsJson
from myriad.cli.watch_content import MEMORY, PageContent, content_of
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.cli.watch_access import PageTls
    from myriad.dashboard.request_guard import Guard

__all__ = ["register"]

_TOKEN_BYTES = 24
_IN_CLEAR = "the token crosses the network in clear unless a proxy in front of this page has TLS"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("watch")(_watch)


def _watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|FOLDER]...",
            help="Run folder, or its name under runs/. A folder of runs, several, or none (runs/): a "
            "table of runs.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on. The default accepts only this machine."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Deprecated: arguments are visible to all users of the machine. Use --token-file or "
            "MYRIAD_COLLECTOR_TOKEN.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="MYRIAD_COLLECTOR_TOKEN_FILE",
            help="File with the access token. Default: the text of MYRIAD_COLLECTOR_TOKEN, else a new token.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Serve with TLS and this certificate (PEM, with those that sign it)."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key of --tls-cert (PEM). Default: it is in the same file."),
    ] = None,
    tls: Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls",
            help="TLS, with a certificate that is made here and kept unless --tls-cert is given. "
            "Default: if --host is not the loopback. Use --no-tls behind a proxy that has TLS.",
            show_default=False,
        ),
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            envvar="MYRIAD_COLLECTOR_CA",
            help="File of certificates that --remote accepts, or sha256:FINGERPRINT of the page's.",
        ),
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Store spans that nodes send by HTTP in this folder as well, as Parquet. Needs one RUN.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER", help="Show the prediction for the job on this cluster as well. Needs one RUN."
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Show the page of a server on another machine, instead of RUN."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for spans and their aggregates; the oldest steps are dropped first. Needs one RUN.",
            show_default=MEMORY,
        ),
    ] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Let the table of runs write notes and tags, archive, and delete after a confirmation, and "
            "the pages of its runs take traces. Default: the table is read-only.",
        ),
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser of this machine.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Serve the dashboard of a run, while it trains or afterwards; or a table of runs.

    For one RUN, the page shows that run. For a folder of runs, for several runs or folders, and for none (the
    folder runs/), it is a table of all runs there: filter, sort and group by columns and keys of the job, see
    chosen runs in the same charts, and what differs between their jobs and environments. A click on a run
    opens its page. With --write it also takes notes and tags, archives runs, and deletes them after a
    confirmation.

    Reads the run folders. Only the page's Trace button affects the run: it slows down the traced ranks.

    Every request needs the access token: the printed address has it and gives the browser a cookie. The token
    is also in a file that only this user can read, in ~/.local/state/myriad. The run's nodes need no token to
    send spans to URL/api/spans; they use one that they derive from the run's secret. Prometheus can scrape
    URL/metrics with the token. Ctrl-C stops the server.

    A page for other machines (--host) has TLS, with a certificate that is made here and kept. Its fingerprint
    is printed: compare it in the browser, and give it to nodes that send spans, in MYRIAD_COLLECTOR_CA or the
    job key telemetry.collector_ca.

    With --remote URL it opens the page that `myriad watch --host ...` serves on another machine, with that
    page's token in --token-file or MYRIAD_COLLECTOR_TOKEN.

    Exit code: 0 stopped, 2 bad input.
    """
    from myriad.cli.watch_access import given_token, page_tls

    given = given_token(token, token_file)
    if remote is not None:
        return _show_remote(remote, " ".join(runs or []), given, tls_ca, open_page, as_json)
    _check_installed()
    content = content_of(runs or [], collect=collect, cluster=cluster, memory=memory, write=write)
    certificate = page_tls(host, tls_cert, tls_key, tls)
    _Page(content, host, given, certificate, open_page, as_json).serve(port)


@dataclass(frozen=True)
class _Page:
    """A page, served from this machine."""

    content: PageContent
    host: str
    given_token: str | None
    """The token that the user gave; ``None``: a new one is drawn."""
    certificate: "PageTls | None"
    open_page: bool
    as_json: bool

    def serve(self, port: int) -> None:
        """Serve the page until a signal ends the process."""
        import secrets

        from myriad.cli.watch_access import forget_token, keep_token
        from myriad.dashboard.app import listen_at, serve

        listener = listen_at(self.host, port)
        number = listener.getsockname()[1]
        secret = self.given_token or secrets.token_urlsafe(_TOKEN_BYTES)
        file = keep_token(number, secret)

        def end() -> None:
            forget_token(file)  # here: the process ends by the signal that stops the server
            self.content.end()

        tls = self.certificate
        files = None if tls is None else (tls.certificate, tls.key)
        serve(self._app(secret, file), listener, lambda: self._announce(number, secret, file), end, files)

    def _app(self, secret: str, file: Path | None) -> "Guard":
        from myriad.cli.watch_access import shown_path
        from myriad.dashboard.request_guard import Access
        from myriad.telemetry.shipping.page_token import LOOPBACK

        # A server with a given token may have a proxy in front of it, with a name of its own.
        is_local = self.host in LOOPBACK and self.given_token is None
        return self.content.app(Access(secret, shown_path(file), is_local, self.content.span_token))

    def _announce(self, port: int, secret: str, file: Path | None) -> None:
        """Print the address of the page, and a warning if its token can be read on the way."""
        from myriad.cli.watch_access import entry_page
        from myriad.telemetry.shipping.page_token import LOOPBACK

        tls = self.certificate
        address = f"{'https' if tls else 'http'}://{_in_address(self.host)}:{port}"
        fingerprint = None if tls is None else tls.fingerprint
        _announce(address, secret, self.open_page, self.as_json, entry_page(file), fingerprint)
        if tls is None and self.host not in LOOPBACK:
            typer.echo(_IN_CLEAR, err=True)
        elif tls is not None and not self.as_json:
            typer.echo(f"certificate {tls.public}, {tls.fingerprint}", err=True)


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise BadInputError("watch", ", ".join(missing), "not installed: pip install 'myriad-train[watch]'")


def _show_remote(
    url: str, run: str, token: str | None, trust: str | None, open_page: bool, as_json: bool
) -> None:
    """Query the server before the page opens, so that a wrong address or token is an error here."""
    from urllib.parse import urlsplit

    from myriad.telemetry.config import is_address

    url = url.rstrip("/")
    if run:
        raise BadInputError("run", run, "not allowed with --remote: the remote server shows its own run")
    if not is_address(url):
        raise BadInputError("--remote", url, "http://HOST:PORT or https://HOST:PORT")
    from myriad.cli.watch_access import remote_entry_page
    from myriad.telemetry.shipping.page_token import LOOPBACK, token_here

    token = token or token_here(url)
    if token and url.startswith("http:") and urlsplit(url).hostname not in LOOPBACK:
        typer.echo(_IN_CLEAR, err=True)
    answer = _query_run(url, token, trust)
    if not as_json:
        typer.echo(f"{answer.get('name')}: {answer['sentence']}")
    _announce(url, token, open_page, as_json, remote_entry_page())


def _query_run(url: str, token: str | None, trust: str | None) -> dict[str, Any]:
    """Return what a page answers about its run. Raises `BadInputError`."""
    import http.client
    import ssl
    from urllib.parse import urlsplit

    from myriad.telemetry.shipping.page_token import TOKEN
    from myriad.telemetry.shipping.page_trust import CERTIFICATES, connect_page

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection = connect_page(url, 10.0, trust)
        try:
            connection.request("GET", f"{urlsplit(url).path}/api/run", headers=headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        answer = json.loads(text) if response.status == 200 else None
    except ssl.SSLCertVerificationError as error:
        why = f"has a certificate that is not accepted ({getattr(error, 'verify_message', '') or error})"
        raise BadInputError("--remote", url, f"{why}: --tls-ca, or {CERTIFICATES}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        hint = "" if url.startswith("https:") else "; one with TLS is named https://"
        raise BadInputError("--remote", url, f"is not a `myriad watch` server ({error}){hint}") from None
    if response.status == 401:
        raise BadInputError("--remote", url, f"requires a token: --token-file, or {TOKEN}")
    if response.status != 200:
        raise BadInputError("--remote", url, f"answered with HTTP status {response.status}")
    if not isinstance(answer, dict) or "sentence" not in answer:
        raise BadInputError("--remote", url, "is not a `myriad watch` server")
    return answer


def _in_address(host: str) -> str:
    """Return the host for a URL: the machine's name in place of an address that means all interfaces."""
    import socket

    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _announce(
    address: str,
    token: str | None,
    open_page: bool,
    as_json: bool,
    entry: Path | None = None,
    fingerprint: str | None = None,
) -> None:
    """Print the address, and open it in the browser through ``entry``, which is written here."""
    page = f"{address}/?token={token}" if token else address
    if as_json:
        answer = {"url": address, "page": page, "spans": f"{address}/api/spans", "token": token}
        typer.echo(json.dumps(answer | ({"fingerprint": fingerprint} if fingerprint else {})))
    else:
        typer.echo(page)
        if tunnel := _tunnel(address):
            typer.echo(f"on your own machine: {tunnel}, then open {page} there", err=True)
    from myriad.cli.watch_access import has_browser, open_in_browser

    if open_page and has_browser():
        open_in_browser(page, entry, token is not None)


def _tunnel(address: str) -> str:
    """Return the command that forwards the page over ssh; "" without ssh, or where the page is reachable."""
    import getpass
    import os
    from urllib.parse import urlsplit

    from myriad.telemetry.shipping.page_token import LOOPBACK

    from_to = os.environ.get("SSH_CONNECTION", "").split()
    parts = urlsplit(address)
    if len(from_to) != 4 or parts.hostname not in LOOPBACK:
        return ""
    try:
        user = f"{getpass.getuser()}@"
    except (OSError, KeyError):  # A container's user may have no name.
        user = ""
    port = "" if from_to[3] == "22" else f"-p {from_to[3]} "
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"ssh {port}-L {parts.port}:{host}:{parts.port} {user}{from_to[2]}"
