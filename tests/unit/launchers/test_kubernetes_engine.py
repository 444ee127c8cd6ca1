"""What a run asks of Kubernetes when its driver has given a node up; an API server that refuses or is
gone never harms the run."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers.kubernetes.kubernetes_launcher import Api, KubernetesLauncher
from myriad.launchers.launcher import check_engine
from myriad.run import Run

_INDEX = "batch.kubernetes.io/job-completion-index"


class Server:
    """As much of an API server as is asked for: pods, nodes, and what was changed."""

    def __init__(self) -> None:
        self.pods = [make_pod(node) for node in range(3)]
        self.ready = {f"machine-{node}": True for node in range(3)}
        self.refuses: set[str] = set()
        self.changes: list[tuple[str, str, Any]] = []
        self.tokens: set[str | None] = set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            do_PATCH = do_DELETE = do_GET

            def log_message(self, *words: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.tokens.add(request.headers["Authorization"])
        path, query = urlsplit(request.path).path, parse_qs(urlsplit(request.path).query)
        if request.command != "GET":
            body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
            self.changes.append((request.command, path, body))
        refused = request.command in self.refuses
        request.send_response(403 if refused else 200)
        request.end_headers()
        found = {} if refused or request.command != "GET" else self.look_up(path, query)
        request.wfile.write(json.dumps(found).encode())

    def look_up(self, path: str, query: dict[str, list[str]]) -> dict[str, Any]:
        if path.startswith("/api/v1/nodes/"):
            ready = self.ready[path.rpartition("/")[2]]
            condition = {"type": "Ready", "status": "True" if ready else "Unknown"}
            return {"spec": {}, "status": {"conditions": [condition]}}
        assert path == "/api/v1/namespaces/research/pods"
        wanted = dict(pair.split("=") for pair in query["labelSelector"][0].split(","))
        return {"items": [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]}


def make_pod(node: int, **metadata: str) -> dict[str, Any]:
    labels = {"myriad/run": "big", "myriad/role": "node", _INDEX: str(node)}
    created = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    return {
        "metadata": {"name": f"big-node-0-{node}-abcde", "labels": labels, **created, **metadata},
        "spec": {"nodeName": f"machine-{node}"},
        "status": {"phase": "Running", "containerStatuses": [{"restartCount": 0}]},
    }


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("a token\n")
    return tmp_path


def give_up(url: str, account: Path, *nodes: int, spares: int = 1) -> Run:
    """The engine's whole life; its thread has done all when this returns."""
    run = Run(account / "run")
    run.path.mkdir(exist_ok=True)
    engine = KubernetesLauncher(run, Api(url, account), "research", "big", spares)
    engine.start()
    for node in nodes:
        engine.replace(node)
    engine.close()
    engine._thread.join()
    return run


def cordoned(server: Server) -> list[str]:
    return [
        path for method, path, body in server.changes if method == "PATCH" and body["spec"]["unschedulable"]
    ]


def deleted(server: Server) -> list[str]:
    return [path.rpartition("/")[2] for method, path, _ in server.changes if method == "DELETE"]


def test_a_suspect_machine_is_cordoned_and_its_pod_recreated(server: Server, account: Path) -> None:
    run = give_up(server.url, account, 1)
    assert cordoned(server) == ["/api/v1/nodes/machine-1"]
    assert deleted(server) == ["big-node-0-1-abcde"]
    assert server.changes[0][2]["metadata"]["annotations"] == {"myriad/cordoned-by": "research.big"}
    assert server.tokens == {"Bearer a token"}
    (event,) = run.read_events()
    assert (event["event"], event["node"], event["machine"], event["cordoned"]) == (
        *("replace", 1, "machine-1"),
        True,
    )


def test_what_kubernetes_repairs_already_is_left_to_it(server: Server, account: Path) -> None:
    """A container that was restarted in place; a pod that is going; one that is not there."""
    server.pods[0]["status"]["containerStatuses"][0]["restartCount"] = 1
    server.pods[1] = make_pod(1, deletionTimestamp="2026-01-01T00:00:01Z")
    server.pods[2]["status"]["phase"] = "Pending"
    give_up(server.url, account, 0, 1, 2, 7)
    assert server.changes == []


def test_a_machine_that_is_known_to_be_down_needs_no_cordon(server: Server, account: Path) -> None:
    server.ready["machine-2"] = False
    give_up(server.url, account, 2)
    assert (cordoned(server), deleted(server)) == ([], ["big-node-0-2-abcde"])


def test_a_network_that_fails_empties_no_cluster(server: Server, account: Path) -> None:
    give_up(server.url, account, 0, 1, 2, spares=2)
    assert (len(cordoned(server)), len(deleted(server))) == (2, 3)


def test_without_the_right_to_cordon_the_pod_is_replaced_even_so(server: Server, account: Path) -> None:
    server.refuses = {"PATCH"}
    run = give_up(server.url, account, 0)
    assert deleted(server) == ["big-node-0-0-abcde"]
    assert run.read_events()[0]["cordoned"] is False


def test_an_api_server_that_refuses_or_is_gone_harms_nothing(
    server: Server, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuses = {"GET"}
    assert give_up(server.url, account, 0).read_events() == []
    give_up("http://127.0.0.1:9", account, 0)
    (account / "token").unlink()
    give_up(server.url, account, 0)
    told = [record.message for record in caplog.records]
    assert len(told) == 3 and "403" in told[0] and "token" in told[2]


def test_it_is_refused_outside_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that names what to do instead."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BadInputError, match="myriad manifests"):
        check_engine(load_job("tiny", ["resilience.engine=kubernetes"]))
