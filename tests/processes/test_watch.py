"""If these fail, a run cannot be watched, or whoever watches can hurt it, or who should not can watch."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from ranks import free_port
from watched_server import NAMES, WORLD, Watching, make_run, spans_of
from watching import wait_until

from myriad.dashboard.app import listen_at, make_server
from myriad.dashboard.tile import unpack_tile
from myriad.job import load_job
from myriad.run import Run
from myriad.telemetry.shipping.outlets import Collector
from myriad.telemetry.shipping.page_token import sender_tokens, span_token
from myriad.telemetry.span_io.span_batch import MAX_BATCH_BYTES, Origin, SpanBatch, encode
from myriad.telemetry.span_io.span_files import write_span_file
from myriad.wire.run_secret import run_secret


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "one <script>alert(1)<")


@pytest.fixture(scope="module")
def watching(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    kept = tmp_path_factory.mktemp("kept")
    with Watching(run, ("--collect", str(kept))) as watching:
        yield watching


def refused(*arguments: str) -> str:
    """What `myriad watch` says when it does not begin."""
    command = [sys.executable, "-m", "myriad.cli.main", "watch", "--no-open", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_spans_that_are_sent_are_seen_and_the_slow_rank_is_first(watching: Watching) -> None:
    for step in range(1, 6):
        assert watching.send(spans_of(step, slow=5)).status_code == 204
    told = watching.until(lambda told: told["dropped"]["spans_kept"] == 5 * WORLD)
    assert told["layout"]["dp"] == told["layout"]["pp"] == told["layout"]["tp"] == 2
    assert (told["world"], told["node_size"], told["first_step"], told["last_step"]) == (WORLD, 4, 1, 5)
    heat, facts = unpack_tile(watching.client.get("/api/heat?phase=forward&first=1&last=5").content)
    assert facts["missing"] == 0 and int(heat["z"].argmax()) == 5
    assert heat["seconds"][[4, 5]].tolist() == pytest.approx([0.1, 0.2])
    worst = watching.ask("worst?phase=forward&limit=1")
    assert worst[0]["rank"] == 5 and "rank 5" in worst[0]["sentence"]
    spans, facts = unpack_tile(watching.client.get("/api/timeline?ranks=4-5&steps=2-3").content)
    assert spans["rank"].tolist() == [4, 5, 4, 5] and facts["lanes"][1] == {"rank": 5, "worst_of": 1}
    assert watching.ask("rank/5")["groups"] == {"tp": [4, 5], "pp": [5, 7], "dp": [1, 5]}


def test_a_batch_that_comes_twice_counts_once_and_what_was_lost_meanwhile_is_reported(
    watching: Watching,
) -> None:
    """Its sender did not hear that it was taken, and sent it again."""

    def sent(number: int, step: int, num_dropped: int = 0, part: int = 0) -> None:
        batch = replace(spans_of(step), num_dropped=num_dropped, origin=Origin("node-0", number, part))
        assert watching.send(batch).status_code == 204

    before = watching.ask("run")["dropped"]
    sent(1, step=6)
    sent(1, step=6, num_dropped=3)
    sent(2, step=7)
    sent(2, step=8, part=1)
    sent(2, step=7)
    told = watching.until(lambda told: told["dropped"]["spans_kept"] == before["spans_kept"] + 3 * WORLD)[
        "dropped"
    ]
    assert (
        told["batches_sent_again"] == 2 and told["spans_lost_by_ranks"] == before["spans_lost_by_ranks"] + 3
    )
    heat, _ = unpack_tile(watching.client.get("/api/heat?phase=forward&first=6&last=8").content)
    assert heat["seconds"].tolist() == pytest.approx([0.1] * WORLD)


def test_what_is_sent_is_kept_where_it_was_asked_for(watching: Watching) -> None:
    assert watching.send(spans_of(1)).status_code == 204
    folder = Path(watching.options[1])
    wait_until(lambda: any(folder.glob("*.parquet")))


def wrong(**fields: int) -> bytes:
    """A batch with one span that has another value."""
    batch = spans_of(1)
    for name, value in fields.items():
        batch.records[name][3] = value
    return encode(batch)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not a batch",
        encode(spans_of(1))[:-5],
        encode(SpanBatch(0, 1, ("forward",) * 2000, spans_of(1).records)),
        encode(SpanBatch(2**40, 1, NAMES, spans_of(1).records)),
        encode(SpanBatch(0, -1, NAMES, spans_of(1).records)),
        encode(SpanBatch(0, 1, NAMES, spans_of(1).records, clock_error_seconds=float("nan"))),
        wrong(rank=WORLD),
        wrong(rank=-1),
        wrong(step=10**6),
        wrong(name=7),
        wrong(start_ns=2**62),
        wrong(duration_ns=-1),
    ],
)
def test_a_wrong_batch_is_refused_with_one_line_counted_and_reported(watching: Watching, body: bytes) -> None:
    before = watching.ask("run")["dropped"]
    answer = watching.send(body)
    assert answer.status_code == 400 and answer.text.count("\n") == 1
    after = watching.ask("run")
    assert after["dropped"]["batches_refused"] == before["batches_refused"] + 1
    assert answer.text.strip() in after["problems"][-1]


def test_a_batch_that_is_too_large_is_refused_before_it_is_sent(watching: Watching) -> None:
    assert begun(watching, MAX_BATCH_BYTES + 1).startswith(b"HTTP/1.1 413")
    chunked = watching.client.post("/api/spans", content=iter([b"a", b"b"]))
    assert chunked.status_code == 411


def begun(watching: Watching, length: int, keep: list[socket.socket] | None = None) -> bytes:
    """What the collector says when only the head of a batch has come; nothing, if it waits for the rest: of
    senders that are to be kept."""
    sender = socket.create_connection(("127.0.0.1", watching.port), timeout=60)
    sender.settimeout(60 if keep is None else 0.5)
    about = f"Host: 127.0.0.1:{watching.port}\r\nAuthorization: Bearer {watching.token}\r\n"
    head = f"POST /api/spans HTTP/1.1\r\n{about}Content-Length: {length}\r\n\r\n"
    sender.sendall(head.encode())
    try:
        return sender.recv(1000)
    except TimeoutError:
        return b""
    finally:
        sender.close() if keep is None else keep.append(sender)


def test_a_flood_is_refused_counted_and_over_when_it_is_over(watching: Watching) -> None:
    senders: list[socket.socket] = []
    for _ in range(4):
        assert begun(watching, MAX_BATCH_BYTES, senders) == b""
    assert watching.send(spans_of(1)).status_code == 429
    assert watching.ask("run")["dropped"]["batches_flooded"] == 1
    for sender in senders:
        sender.close()
    wait_until(lambda: watching.send(spans_of(1)).status_code != 429)


def test_a_half_written_file_is_reported_and_read_when_it_is_whole(watching: Watching, run: Run) -> None:
    folder = run.path / "spans"
    folder.mkdir(exist_ok=True)
    whole = folder / "attempt-1-node-1-0.parquet"
    write_span_file(whole, spans_of(9))
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    (folder / "attempt-1-node-1-1.parquet").symlink_to("/etc/passwd")
    (folder / "attempt-1-node-1-2.parquet").mkdir()
    os.mkfifo(folder / "attempt-1-node-1-3.parquet")
    told = watching.until(lambda told: told["dropped"]["files_refused"] == 1)
    assert whole.name in told["problems"][-1]
    whole.write_bytes(data)
    told = watching.until(lambda told: told["last_step"] == 9)
    assert told["dropped"]["files_refused"] <= 2


def test_lines_that_are_torn_or_of_another_kind_are_left_out(watching: Watching, run: Run) -> None:
    with run.metrics_path.open("a") as file:
        file.write(
            '{"step": "x", "loss": []}\n[1]\n{"step": 4, "loss": null, "step_seconds": "long"}\n{"step": 5'
        )
    with run.events_path.open("a") as file:
        file.write(
            '{"event": ["x"], "node": {}}\n{"event": "fault", "problem": "<img src=x>", "node": "0"}\n'
        )
    watching.until(lambda told: watching.ask("overview")["step"] == [4])
    overview = watching.ask("overview")
    assert overview["loss"] == [None] and overview["step_seconds"] == [None]
    assert watching.ask("run")["dropped"]["lines_wrong"] == 5, "three of steps, two of events"
    assert overview["events"][-1]["text"] == "<img src=x>"
    assert watching.ask("faults")["decisions"][-1]["event"] == "fault"
    assert len(watching.ask("faults")["nodes"]) == 2


@pytest.mark.parametrize(
    "question",
    [
        "heat?phase=nothing",
        "heat?phase=forward&first=x",
        "heat?phase=forward&first=9&last=2",
        "timeline?ranks=0-99",
        "timeline?ranks=9-2",
        "timeline?ranks=" + "1," * 20_000,
        "timeline?steps=1-5000000",
        "timeline?start=nan&end=1",
        "timeline?start=5&end=1",
        "timeline?lanes=0",
        "timeline?lanes=99999999999999999999",
        "rank/8",
        "rank/-1",
        "rank/%3Cscript%3E",
        "worst?phase=forward&limit=1e9",
        "overview?points=1",
    ],
)
def test_a_wrong_question_gets_one_line(watching: Watching, question: str) -> None:
    answer = watching.client.get(f"/api/{question}")
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/static/%2fetc/passwd",
        "/api/../../job.toml",
        "/api/nothing",
        "/job.toml",
        "/api/run/",
    ],
)
def test_no_address_leads_out_of_the_page(watching: Watching, path: str) -> None:
    with socket.create_connection(("127.0.0.1", watching.port), timeout=60) as asker:
        secret = f"Authorization: Bearer {watching.token}"
        asker.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n{secret}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: asker.recv(65536), b""))
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 307")), answer[:200]
    assert b"import" not in answer and b"root:" not in answer


def test_what_a_run_is_called_cannot_become_a_script(watching: Watching, run: Run) -> None:
    answer = watching.client.get("/api/run")
    assert answer.json()["name"] == run.path.name
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy


def test_a_page_of_another_site_may_not_ask(watching: Watching) -> None:
    assert watching.client.get("/api/run", headers={"Host": "evil.example"}).status_code == 403
    evil = {"Origin": "http://evil.example"}
    assert watching.client.post("/api/spans", content=encode(spans_of(1)), headers=evil).status_code == 403
    own = {"Origin": f"http://127.0.0.1:{watching.port}"}
    assert watching.client.post("/api/spans", content=encode(spans_of(1)), headers=own).status_code == 204


def test_the_server_writes_nothing_into_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "spans").mkdir()
    write_span_file(run.path / "spans" / "attempt-1-node-0-0.parquet", spans_of(1))

    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.rglob("*")}

    before = state()
    with Watching(run) as watching:
        assert watching.send(spans_of(2)).status_code == 204
        watching.until(lambda told: told["dropped"]["spans_kept"] == 2 * WORLD)
        for question in ("overview", "faults", "waterfall", "losses", "silent", "rank/0"):
            watching.ask(question)
    assert state() == before


def test_a_run_that_starts_again_with_more_ranks_is_followed_by_page_and_collector(tmp_path: Path) -> None:
    """Its spans may come before the server has read that it has begun: none of them is refused."""
    run = make_run(tmp_path / "run")
    with Watching(run) as watching:
        assert watching.send(spans_of(1)).status_code == 204
        watching.until(lambda told: told["last_step"] == 1)
        run.create_or_resume(load_job("tiny-3d", ["comm.node_size=4", "layout.dp=4", "train.steps=100"]))
        run.append_event("start", world=2 * WORLD)
        assert watching.send(spans_of(40, range(2 * WORLD))).status_code == 204
        told = watching.until(lambda told: told["last_step"] == 40)
        assert (told["world"], told["layout"]["dp"], len(told["nodes"])) == (2 * WORLD, 4, 4)
        assert told["dropped"]["batches_refused"] == 0
        assert watching.ask("rank/15")["groups"]["dp"] == [3, 7, 11, 15]
        assert watching.send(spans_of(41, range(3 * WORLD))).status_code == 400


def hear(client: httpx.Client, count: int, heard: list[dict[str, int]]) -> list[dict[str, int]]:
    """``heard`` gets the first so many changes that a page hears of, as they come."""
    with client.stream("GET", "/api/stream") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data: "):
                heard.append(json.loads(line.removeprefix("data: ")))
            if len(heard) == count:
                break
    return heard


def test_a_page_gets_changes_also_after_the_server_restarted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "spans").mkdir()
    write_span_file(run.path / "spans" / "attempt-1-node-0-0.parquet", spans_of(3))
    with Watching(run, ("--port", str(free_port()))) as first:
        first.until(lambda told: told["last_step"] == 3)
        heard: list[dict[str, int]] = []
        page = threading.Thread(target=hear, args=(first.client, 2, heard))
        page.start()
        wait_until(lambda: bool(heard))
        assert first.send(spans_of(4)).status_code == 204
        page.join(60)
        assert [each["last_step"] for each in heard] == [3, 4]
        assert heard[0].keys() == {"last_step", "events", "metrics"}
    with Watching(run, ("--port", str(first.port))) as again:
        again.until(lambda told: told["last_step"] == 3)
        assert hear(again.client, 1, [])[0]["last_step"] == 3


def test_ctrl_c_ends_it_at_once_and_without_a_word_while_a_page_is_open(tmp_path: Path) -> None:
    with Watching(make_run(tmp_path / "run")) as watching:
        with watching.client.stream("GET", "/api/stream") as page:
            assert next(page.iter_lines()).startswith("retry")
            watching.process.send_signal(signal.SIGINT)
            assert watching.process.wait(60) == 0
        assert watching.errors.read_text() == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_everyone_needs_the_token_on_this_machine_and_on_others(tmp_path: Path, host: str) -> None:
    with Watching(make_run(tmp_path / "run"), ("--host", host)) as watching:
        token, client = watching.token, watching.new_client()
        assert len(token) == 32 and watching.told["page"].endswith(f"/?token={token}")
        for path in ("/", "/api/run", "/api/stream", "/static/app.js", f"/api/run?token={token}"):
            assert client.get(path).status_code == 401
        wrong = ("Bearer", f"Bearer {token}x", f"Bearer {token[:-1]}", "Bearer é".encode().decode("latin-1"))
        for header in wrong:
            given = {"Authorization": header.encode("latin-1")}
            assert client.get("/api/run", headers=given).status_code == 401
        assert client.get(f"/?token={token[:-1]}").status_code == 401
        assert client.post("/api/spans", content=encode(spans_of(1))).status_code == 401
        bearer = {"Authorization": f"Bearer {token}"}
        assert client.post("/api/spans", content=encode(spans_of(1)), headers=bearer).status_code == 204
        entered = client.get(f"/?token={token}")
        assert (entered.status_code, entered.headers["refresh"]) == (200, "0; url=/")
        assert token not in entered.text
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie
        assert cookie.startswith(f"myriad_token_{watching.port}=")
        assert client.get("/api/run").status_code == 200, "the cookie is sent from now on"


def test_the_token_is_in_a_private_file_while_the_server_runs_and_in_no_argument(tmp_path: Path) -> None:
    with Watching(make_run(tmp_path / "run")) as watching:
        (file,) = watching.state.rglob("*.token")
        assert file.read_text() == f"{watching.token}\n"
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        refusal = httpx.get(f"{watching.told['url']}/api/run").text
        assert refusal.count("\n") == 1 and file.name in refusal
        assert watching.token.encode() not in Path(f"/proc/{watching.process.pid}/cmdline").read_bytes()
        command = [sys.executable, "-m", "myriad.cli.main", "watch", "--no-open", "--remote"]
        state = os.environ | {"XDG_STATE_HOME": str(watching.state)}
        own = subprocess.run([*command, watching.told["url"]], env=state, capture_output=True, timeout=60)
        assert own.returncode == 0, "the same user needs no token for a page of this machine"
    assert not file.exists()


def test_nodes_of_the_run_send_spans_without_a_token_from_the_user_and_no_other_does(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with Watching(run) as watching:
        sender = Collector(watching.told["url"], "run", lambda: sender_tokens(run.path, watching.told["url"]))
        with pytest.raises(OSError, match="the collector says 401"):
            sender.post([spans_of(1)])
        run_secret(run.path / "secret")  # as a driver creates it, here after the server has started
        sender.post([spans_of(1)])
        assert watching.until(lambda told: told["last_step"] == 1)
        bearer = {"Authorization": f"Bearer {span_token(run.path)}"}
        for path in ("/api/run", "/metrics", "/"):
            answer = httpx.get(f"{watching.told['url']}{path}", headers=bearer)
            assert answer.status_code == 401, "it opens nothing but the collector"


def test_a_client_that_takes_nothing_is_cut_off_and_others_are_not() -> None:
    size = 64 * 2**20

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    begun, listener = threading.Event(), listen_at("127.0.0.1", 0)
    server = make_server(app, begun.set, lambda: None, stall_seconds=0.3)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    begun.wait(60)
    with (
        socket.create_connection(listener.getsockname(), timeout=60) as idle,
        socket.create_connection(listener.getsockname(), timeout=60) as stalled,
    ):
        idle.sendall(b"GET / HTTP/1.1\r\n")  # and no more of its request
        stalled.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert len(httpx.get(address, timeout=60).content) == size
        time.sleep(1.5)
        with pytest.raises(OSError):  # what was on its way comes, then it is over
            while stalled.recv(2**20):
                pass
            raise ConnectionResetError
        with suppress(ConnectionResetError):
            assert idle.recv(1) == b"", "a request that never comes is not waited for"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def test_what_cannot_be_watched_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    assert "must be a run folder" in refused(str(tmp_path / "nothing"))
    assert 'run = "../../etc"' in refused("../../etc")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f'--port = "{port}": cannot be used' in refused(str(run.path), "--port", str(port))
    assert "--collect" in refused(str(run.path), "--collect", str(run.path / "spans"))
    (tmp_path / "short").write_text("short\n")
    assert "--token-file" in refused(str(run.path), "--token-file", str(tmp_path / "short"))
    assert "--token-file" in refused(str(run.path), "--token-file", str(tmp_path / "none"))
    assert "--memory" in refused(str(run.path), "--memory", "much")
    assert "--host" in refused(str(run.path), "--host", "no.such.machine.invalid")


def test_names_that_spans_bring_are_bounded(watching: Watching) -> None:
    for part in range(3):
        names = tuple(f"name {part}-{number}" for number in range(1000))
        batch = spans_of(2)
        batch.records["name"] = range(WORLD)
        assert watching.send(SpanBatch(0, 1, names, batch.records)).status_code == 204
    _, facts = unpack_tile(watching.client.get("/api/timeline?steps=2").content)
    assert len(facts["names"]) <= 1025 and NAMES[0] in facts["names"]
    assert len(watching.ask("run")["phases"]) <= 50


def test_a_run_elsewhere_is_shown_by_its_address_and_token(tmp_path: Path) -> None:
    token = "abcdefgh12345678"
    (tmp_path / "token").write_text(f"{token}\n")
    file = ("--token-file", str(tmp_path / "token"))
    with Watching(make_run(tmp_path / "run"), ("--host", "0.0.0.0", "--no-tls", *file)) as watching:
        url = f"http://127.0.0.1:{watching.port}"
        command = [sys.executable, "-m", "myriad.cli.main", "watch", "--no-open", "--remote", url]
        shown = subprocess.run([*command, *file], capture_output=True, text=True, timeout=60)
        assert (
            shown.returncode == 0
            and f"{url}/?token={token}" in shown.stdout
            and "step 0 of 20" in shown.stdout
        )
        assert "requires a token" in refused("--remote", url)
        old = subprocess.run([*command, "--token", token], capture_output=True, text=True, timeout=60)
        assert old.returncode == 0 and old.stderr.startswith("--token is deprecated")
        hidden = os.environ | {"MYRIAD_COLLECTOR_TOKEN": token}
        assert subprocess.run(command, env=hidden, capture_output=True, timeout=60).returncode == 0
    assert "is not a `myriad watch` server" in refused("--remote", url)


def test_what_was_predicted_lies_under_what_is_measured(tmp_path: Path) -> None:
    with Watching(make_run(tmp_path / "run"), ("--cluster", "megascale-256xa100")) as watching:
        assert watching.send(spans_of(1)).status_code == 204
        told = watching.until(lambda told: told["last_step"] == 1)
        assert told["predicted"] is True
        spans, facts = unpack_tile(watching.client.get("/api/timeline?ranks=2-3").content)
        assert [lane.get("predicted", False) for lane in facts["lanes"]] == [False, False, True, True]
        predicted = spans["rank"][spans["lane"] >= 2]
        assert sorted(set(predicted.tolist())) == [2, 3]
        assert {facts["names"][name] for name in spans["name"][spans["lane"] >= 2]} >= {"forward", "backward"}
        found = watching.ask("waterfall")["predicted"]
        assert found["losses"][-1]["left"] == pytest.approx(found["mfu"])
