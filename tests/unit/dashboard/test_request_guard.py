"""If these fail, another user of the machine, or a page of another site, reads a run or traces it."""

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from myriad.dashboard.api.export_api import more_routes
from myriad.dashboard.app import build_app
from myriad.dashboard.many.live_table import LiveTable
from myriad.dashboard.many.run_pages import RunPages
from myriad.dashboard.many.runs_app import build_runs_app
from myriad.dashboard.request_guard import SPANS_PATH, Access, Guard, cookie_name
from myriad.dashboard.run_files import RunFiles
from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.watched_run import WatchedRun
from myriad.job import load_job
from myriad.many_runs.row_cache import RowCache
from myriad.run import Run

TOKEN, SPAN_TOKEN = "a" * 32, "b" * 64
HERE = "http://127.0.0.1:8765"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class AskedError(Exception):
    """A request came through."""


def refuse(*arguments: Any) -> Any:
    raise AskedError(arguments)


@pytest.fixture(params=["one run", "many runs"])
def app(tmp_path: Path, request: pytest.FixtureRequest) -> Guard:
    """Both pages have the same guard."""
    if request.param == "many runs":
        table = LiveTable([tmp_path], RowCache(tmp_path))
        return build_runs_app(table, Access(TOKEN, "~/the/file"), RunPages(table, refuse))
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny"))
    watched = WatchedRun(RunFiles(run), SpanStore(1, 100), dict)
    access = Access(TOKEN, "~/the/file", span_token=lambda: SPAN_TOKEN)
    return build_app(watched, access, more=more_routes(watched, refuse))


def addresses(app: Guard) -> list[str]:
    """An address of every route, so that no new one is forgotten."""
    routes = app._app.routes  # type: ignore[attr-defined]
    mounted = [route for route in routes if type(route) is not Route]
    assert [route.path for route in mounted] in ([], ["/run/{id}"]), "another kind of route: test it here"
    below = ["/run/0/", "/run/0/api/run", "/run/0/api/trace"] if mounted else []
    return [re.sub(r"{[^}]*}", "0", route.path) for route in routes] + below


def test_no_route_answers_without_the_token(app: Guard) -> None:
    client, paths = TestClient(app, base_url=HERE), addresses(app)
    of_run = {"/", "/metrics", "/api/trace", "/api/stream", "/api/traces/0", SPANS_PATH}
    assert of_run < set(paths) or {"/", "/api/runs", "/api/runs/curves"} < set(paths)
    other, port = TOKEN[:-1] + "b", HERE.rpartition(":")[2]
    attempts: list[tuple[str, dict[str, str]]] = [
        ("", {}),
        ("", {"authorization": TOKEN[:-1]}),
        ("", {"authorization": f"Bearer {other}"}),
        ("", {"authorization": "Bearer "}),
        ("", {"cookie": f"myriad_token_{port}={other}"}),
        ("", {"cookie": f"myriad_token_{port}="}),
        ("", {"cookie": f"myriad_token_{port}={SPAN_TOKEN}"}),
        ("", {"cookie": f"myriad_token={TOKEN}; myriad_token_80={TOKEN}"}),
        (f"?token={other}", {}),
        (f"?token={SPAN_TOKEN}", {}),
        ("?token=", {}),
    ]
    for path in [*paths, "/api/nothing", "//", "/nothing"]:
        for method in METHODS:
            for query, headers in attempts:
                answer = client.request(method, path + query, headers=headers)
                assert answer.status_code == 401, (method, path, query, headers)
                if method != "HEAD":
                    assert answer.text.count("\n") == 1 and "~/the/file" in answer.text
                assert "set-cookie" not in answer.headers


def test_no_route_but_the_page_takes_the_token_from_the_address(app: Guard) -> None:
    client = TestClient(app, base_url=HERE)
    for path in set(addresses(app)) - {"/"}:
        assert client.get(f"{path}?token={TOKEN}").status_code == 401


@pytest.mark.parametrize("app", ["one run"], indirect=True)
def test_the_senders_token_opens_nothing_but_the_collector(app: Guard) -> None:
    client = TestClient(app, base_url=HERE, headers={"authorization": f"Bearer {SPAN_TOKEN}"})
    for path in addresses(app):
        status = client.post(path, content=b"").status_code
        assert (status == 401) == (path != SPANS_PATH)
    with TestClient(app, base_url=HERE) as running:
        assert running.post(SPANS_PATH, content=b"x", headers=client.headers).status_code == 400


@pytest.mark.parametrize(
    "header",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},  # a traceback for each such request would fill the log
        {"host": "evil.example"},
        {"host": "["},
    ],
)
def test_a_page_of_another_site_is_refused_with_the_cookie_as_well(
    app: Guard, header: dict[str, str]
) -> None:
    cookies = dict.fromkeys(("myriad_token_8765", "myriad_token_80"), TOKEN)
    client = TestClient(app, base_url=HERE, cookies=cookies)
    for path in addresses(app):
        assert client.post(path, headers=header).status_code == 403


def test_the_address_with_the_token_sets_a_cookie_of_its_port(app: Guard) -> None:
    client = TestClient(app, base_url=HERE)
    answer = client.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["refresh"]) == (200, "0; url=/") and TOKEN not in answer.text
    assert answer.headers["set-cookie"].lower() == (
        f"myriad_token_8765={TOKEN}; httponly; path=/; samesite=strict"
    )
    assert client.get("/api/run").status_code == 200
    assert [cookie_name(host) for host in ("a:1", "[::1]:2", "a", "a:x", "[")] == [
        f"myriad_token_{port}" for port in (1, 2, 80, 80, 80)
    ]


def test_a_websocket_is_closed(app: Guard) -> None:
    client = TestClient(app, base_url=HERE)
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/stream"):
        pass
