"""``myriad watch``: a run in the browser."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.run_argument import existing_run
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from myriad.dashboard.watched_run import MakePlan, Watched
    from myriad.run import Run

__all__ = ["register"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LEAST_TOKEN = 16


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("watch")(_watch)


def _watch(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on; clients on other machines need a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            envvar="MYRIAD_COLLECTOR_TOKEN",
            help="Access token that remote clients need. Default: generated and printed.",
        ),
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Store spans that nodes send by HTTP in this folder as well, as Parquet."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="Show the prediction for the job on this cluster as well."),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Show the page of a server on another machine, instead of RUN."),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Memory for spans and their aggregates; the oldest steps are dropped first."
        ),
    ] = "2 GiB",
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser of this machine.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
) -> None:
    """Serve the dashboard of a run, while it trains or afterwards.

    Reads the run folder. Only the page's Trace button affects the run: it slows down the traced ranks.

    Nodes can send spans to URL/api/spans instead of writing them into the run folder. Prometheus can scrape
    URL/metrics. Ctrl-C stops the server.

    With --remote URL it opens the page that `myriad watch --host ...` serves on another machine, with its
    --token.

    Exit code: 0 stopped, 2 bad input.
    """
    if remote is not None:
        return _show_remote(remote, run, token, open_page, as_json)
    if run is None:
        raise BadInputError("run", "", "a run folder, or the name of one under runs/; or --remote URL")
    _check_installed()
    from myriad.dashboard.api.export_api import more_routes
    from myriad.dashboard.app import build_app
    from myriad.dashboard.server import listen_at, serve
    from myriad.supervise.driver_requests import tracer

    path, secret, size = existing_run(run), _token(host, token), _memory_bytes(memory)
    _check_collect(collect, path)
    watched = _watched(path, size, cluster)
    app = build_app(watched, secret, collect, more_routes(watched, tracer(watched.files.run)))
    listener = listen_at(host, port)
    address = f"http://{_in_address(host)}:{listener.getsockname()[1]}"
    serve(app, listener, lambda: _tell(address, secret, open_page, as_json), watched.end)


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise BadInputError("watch", ", ".join(missing), "not installed: pip install 'myriad-train[watch]'")


def _watched(path: Path, memory_bytes: int, cluster: str | None) -> "Watched":
    from myriad.dashboard.run_files import RunFiles
    from myriad.dashboard.store.span_store import SpanStore
    from myriad.dashboard.watched_run import Watched
    from myriad.run import Run

    files = RunFiles(Run(path))
    store = SpanStore(files.job.layout.world, files.job.train.steps, memory_bytes)
    make_plan = None if cluster is None else _plan_maker(cluster)
    return Watched(files, store, lambda: _account(files.run), make_plan)


def _show_remote(url: str, run: str | None, token: str | None, open_page: bool, as_json: bool) -> None:
    """Query the server before the page opens, so that a wrong address or token is an error here."""
    import urllib.error
    import urllib.request

    url = url.rstrip("/")
    if run is not None:
        raise BadInputError("run", run, "none with --remote: it is the other server's")
    if not url.startswith(("http://", "https://")):
        raise BadInputError("--remote", url, "http://HOST:PORT")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(f"{url}/api/run", headers=headers)
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        why = "wants another --token" if error.code == 401 else f"answers {error.code}"
        raise BadInputError("--remote", url, why) from None
    except (OSError, ValueError) as error:
        raise BadInputError("--remote", url, f"is no `myriad watch` ({error})") from None
    if not isinstance(told, dict) or "sentence" not in told:
        raise BadInputError("--remote", url, "is no `myriad watch`")
    if not as_json:
        typer.echo(f"{told.get('name')}: {told['sentence']}")
    _tell(url, token, open_page, as_json)


def _plan_maker(name: str) -> "MakePlan":
    from myriad.cli.measured_cluster import cluster_path
    from myriad.dashboard.insight.predicted_step import Plan
    from myriad.forecasts.iteration_forecast import costs_of
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(cluster_path(name))
    return lambda job: Plan(costs_of(job, cluster))


def _account(run: "Run") -> "Mapping[str, Any]":
    from myriad.reports.run_report.run_facts import facts_of

    return facts_of(run).as_json()


def _memory_bytes(text: str) -> int:
    from myriad.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError:
        size = 0
    if size < 2**26:
        raise BadInputError("--memory", text, 'a size of at least "64 MiB"')
    return size


def _token(host: str, token: str | None) -> str | None:
    import secrets

    if token is not None and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isalnum()):
        raise BadInputError("--token", token, f"at least {_LEAST_TOKEN} letters and digits")
    return token or (None if host in _LOOPBACK else secrets.token_hex(16))


def _check_collect(folder: Path | None, run: Path) -> None:
    """Create the folder if it does not exist. Raises `BadInputError` for a folder inside the run's, which
    holds only the run's own files."""
    if folder is None:
        return
    if folder.resolve().is_relative_to(run.resolve()):
        raise BadInputError("--collect", str(folder), "a folder outside of the run's")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError("--collect", str(folder), f"a folder ({error.strerror})") from None


def _in_address(host: str) -> str:
    """Return the host for a URL: the machine's name in place of an address that means all interfaces."""
    import socket

    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _tell(address: str, token: str | None, open_page: bool, as_json: bool) -> None:
    page = f"{address}/?token={token}" if token else address
    if as_json:
        typer.echo(
            json.dumps({"url": address, "page": page, "spans": f"{address}/api/spans", "token": token})
        )
    else:
        typer.echo(page)
        if tunnel := _tunnel(address):
            typer.echo(f"on your own machine: {tunnel}, then open {page} there", err=True)
    if open_page and _has_browser():
        import threading
        import webbrowser

        # In a thread: a browser in the terminal blocks until it is closed; the server keeps serving.
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()


def _has_browser() -> bool:
    """Return whether a window can open here. Without one, Python starts any installed text browser in this
    terminal."""
    import os
    import sys

    named = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in named)


def _tunnel(address: str) -> str:
    """Return the command that forwards the page over ssh; "" without ssh, or where the page is reachable."""
    import getpass
    import os
    from urllib.parse import urlsplit

    from_to = os.environ.get("SSH_CONNECTION", "").split()
    parts = urlsplit(address)
    if len(from_to) != 4 or parts.hostname not in _LOOPBACK:
        return ""
    try:
        user = f"{getpass.getuser()}@"
    except (OSError, KeyError):  # A container's user may have no name.
        user = ""
    port = "" if from_to[3] == "22" else f"-p {from_to[3]} "
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"ssh {port}-L {parts.port}:{host}:{parts.port} {user}{from_to[2]}"
