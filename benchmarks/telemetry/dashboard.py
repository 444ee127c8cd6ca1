"""The server of `myriad watch` with 12,288 ranks: what it takes in, how quickly it answers, what it holds.

    python benchmarks/telemetry/dashboard.py [--ranks 12288] [--seconds 20] [--connections 16]
        [--memory "256 MiB"] [--json]

ingest     batches of a node's last two seconds, encoded beforehand, sent as fast as they are taken over some
           connections by another process; spans a second, and how many of those sent are not in the store
memory     the server's resident set after each tenth of that, with --memory for spans
delay      spans of all ranks in real time; from the end of a rank's span until the API tells it, when the
           node sends at once: what a node waits before it sends is added to that
queries    time until the answer is here, the middle and the 99th of a hundred: one after the other with what
           ingest left in the store; and twenty a second, as a person asks, while spans come in in real time
disk       the spans of a node for a minute, as its executor writes them: bytes a span

The server is a process of its own, as a user starts it; sender and asker are others of the same machine.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from myriad.run import Run
from myriad.telemetry.span_io.span_batch import SpanBatch, encode
from myriad.telemetry.span_io.span_files import write_span_file
from myriad.telemetry.span_io.span_records import RECORD, Records
from span_generator import MICRO_BATCHES, Sender, make_run, ranks_of
from span_player import NAMES, Player, Wrong, batches

NODE_SENDS_EVERY_SECONDS = 2
STEP_NS = 6 * 10**9
QUERIES = {
    "heat map of a phase, newest step": "heat?phase=forward",
    "heat map of a phase, all steps": "heat?phase=forward&first=0",
    "worst z-score of each step": "steps?phase=forward",
    "table of the worst 50": "worst?phase=forward",
    "timeline of a step, all ranks in 400 lanes": "timeline?lanes=400&steps={step}",
    "timeline of a step, a third of the ranks": "timeline?lanes=4096&ranks=0-{third}&steps={step}",
}


@dataclass
class Results:
    ranks: int
    spans_sent: int = 0
    spans_lost: int = 0
    spans_per_second: float = 0.0
    resident_bytes: list[int] = field(default_factory=list)
    delay_p50_seconds: float = 0.0
    delay_p99_seconds: float = 0.0
    live_spans_per_second: float = 0.0
    asked_spans_per_second: float = 0.0
    queries: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds: the middle, the 99th of a hundred."""
    live_queries: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The same while spans come in, twenty a second as a person makes them."""
    bytes_per_span: float = 0.0


class Server:
    """A `myriad watch` process."""

    def __init__(self, run: Run, memory: str) -> None:
        command = [
            sys.executable,
            "-m",
            "myriad.cli.main",
            "watch",
            str(run.path),
            "--no-open",
            "--port",
            "0",
        ]
        self.process = subprocess.Popen([*command, "--json", "--memory", memory], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.url, self.token = ready["url"], ready["token"]
        self._local = threading.local()

    def ask(self, question: str) -> bytes:
        """Over a connection that this thread keeps."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
            self._local.connection = connection
        connection.request("GET", f"/api/{question}", headers={"Authorization": f"Bearer {self.token}"})
        answer = connection.getresponse()
        body: bytes = answer.read()
        if answer.status != 200:
            raise OSError(f"{question}: {answer.status} {body[:200]!r}")
        return body

    def facts(self) -> dict[str, Any]:
        """Return facts about the run."""
        found: dict[str, Any] = json.loads(self.ask("run"))
        return found

    @property
    def resident_bytes(self) -> int:
        """As the kernel counts it."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def served(run: Run, memory: str) -> Iterator[Server]:
    """Ended afterwards."""
    server = Server(run, memory)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(10)


def encoded_steps(player: Player, steps: int) -> list[tuple[bytes, int]]:
    """Batches of some steps, as nodes send them."""
    return [
        (encode(batch), len(batch.records))
        for number in range(steps)
        for _, batch in batches(player, number, NODE_SENDS_EVERY_SECONDS)
    ]


def renumbered(body: bytes, spans: int, steps: int) -> bytes:
    """The same batch some steps later."""
    head = len(body) - spans * RECORD.itemsize
    records = np.frombuffer(body, RECORD, offset=head).copy()
    records["step"] += steps
    records["start_ns"] += steps * STEP_NS
    return body[:head] + records.tobytes()


def measure_ingest(server: Server, player: Player, given: argparse.Namespace, results: Results) -> None:
    """Sends for some seconds over many connections."""
    made, steps = encoded_steps(player, 2), 2
    stop, lock = threading.Event(), threading.Lock()
    work = _endless(made, steps)
    senders = [Sender(server.url, server.token) for _ in range(given.connections)]

    def send(sender: Sender) -> None:
        while not stop.is_set():
            with lock:
                body, spans, later = next(work)
            sender.send_encoded(renumbered(body, spans, later) if later else body, spans)

    threads = [threading.Thread(target=send, args=(sender,)) for sender in senders]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for _ in range(10):
        time.sleep(given.seconds / 10)
        results.resident_bytes.append(server.resident_bytes)
    stop.set()
    for thread in threads:
        thread.join()
    results.spans_sent = sum(sender.spans + sender.flooded for sender in senders)
    taken = _taken(server, results.spans_sent)
    results.spans_per_second = results.spans_sent / (time.perf_counter() - began)
    results.spans_lost = results.spans_sent - taken


def _endless(made: list[tuple[bytes, int]], steps: int) -> Iterator[tuple[bytes, int, int]]:
    later = 0
    while True:
        for body, spans in made:
            yield body, spans, later
        later += steps


def _taken(server: Server, sent: int) -> int:
    """Spans that are in the store, when all have been added or nothing is any more."""
    before = -1
    while True:
        dropped = server.facts()["dropped"]
        now = dropped["spans_kept"] + dropped["spans_too_old"]
        if now in (before, sent):
            return int(dropped["spans_kept"])
        before = now
        time.sleep(0.5)


def measure_live(server: Server, given: argparse.Namespace, results: Results) -> None:
    """Real time: spans come in, and questions are asked meanwhile."""
    stop, delays = threading.Event(), list[float]()
    here = Path(__file__).parent / "span_generator.py"
    command = [sys.executable, str(here), given.folder, "--url", server.url, "--ranks", str(given.ranks)]
    command += ["--steps", "1000", "--micro-batches", str(MICRO_BATCHES)]
    feeding = subprocess.Popen([*command, "--send-every", str(NODE_SENDS_EVERY_SECONDS)])
    probing = threading.Thread(target=_probe, args=(server, given.ranks - 1, stop, delays))
    try:
        while server.facts()["dropped"]["spans_kept"] < 2_000_000 * given.ranks / 12288:
            time.sleep(0.5)
        probing.start()
        with _rate(server) as rate:
            time.sleep(12.0)
        results.live_spans_per_second = rate[0]
        with _rate(server) as rate:
            for name, question in QUERIES.items():
                results.live_queries[name] = _times(server, question, pause_seconds=0.05)
        results.asked_spans_per_second = rate[0]
    finally:
        stop.set()
        feeding.kill()
        feeding.wait()
    probing.join()
    results.delay_p50_seconds, results.delay_p99_seconds = _middle_and_99th(delays)


@contextmanager
def _rate(server: Server) -> Iterator[list[float]]:
    """Spans a second that were taken meanwhile."""
    found: list[float] = []
    before, began = server.facts()["dropped"]["spans_kept"], time.perf_counter()
    yield found
    taken = server.facts()["dropped"]["spans_kept"] - before
    found.append(taken / (time.perf_counter() - began))


def _probe(server: Server, rank: int, stop: threading.Event, delays: list[float]) -> None:
    """A span of no step that ends now, on a rank that is asked for until something as new is told."""
    sender = Sender(server.url, server.token)
    while not stop.wait(0.1):
        ended = time.time()
        span = np.zeros(1, RECORD)
        span["start_ns"], span["duration_ns"] = int((ended - 1e-3) * 1e9), 10**6
        span["rank"], span["step"] = rank, -1
        sender.send(SpanBatch(0, 1, ("probe",), span))
        while not _is_told(server, rank, ended):
            time.sleep(0.002)
        delays.append(time.time() - ended)


def _is_told(server: Server, rank: int, ended: float) -> bool:
    last = json.loads(server.ask(f"rank/{rank}"))["last_entered"]
    return last is not None and time.time() - last["seconds_ago"] > ended - 5e-4


def _times(
    server: Server, question: str, count: int = 100, pause_seconds: float = 0.0
) -> tuple[float, float]:
    found = []
    for _ in range(count):
        facts = server.facts()
        asked = question.format(step=facts["last_step"], third=facts["world"] // 3 - 1)
        began = time.perf_counter()
        server.ask(asked)
        found.append(time.perf_counter() - began)
        time.sleep(pause_seconds)
    return _middle_and_99th(found)


def _middle_and_99th(found: list[float]) -> tuple[float, float]:
    return float(np.median(found)), float(np.quantile(found, 0.99))


def measure_disk(player: Player, folder: Path, results: Results) -> None:
    """A minute of one node in one file."""
    steps = round(60 / player.step_seconds)
    records = np.concatenate([_of_node_0(player.step(number), player) for number in range(steps)])
    path = folder / "attempt-1-node-0-0.parquet"
    write_span_file(path, SpanBatch(0, 1, NAMES, records))
    results.bytes_per_span = path.stat().st_size / len(records)


def _of_node_0(records: Records, player: Player) -> Records:
    return records[records["rank"] < player.ranks.node_size]


def show(results: Results) -> None:
    """The table."""
    rows = [("spans taken a second (aim: 300,000)", f"{results.spans_per_second:,.0f}")]
    rows.append(("of them lost (aim: 0)", f"{results.spans_lost:,} of {results.spans_sent:,}"))
    resident = " ".join(f"{each / 2**20:,.0f}" for each in results.resident_bytes)
    rows.append(("server's memory after each tenth, MiB", resident))
    live = f"{results.live_spans_per_second:,.0f}; with 20 questions a second"
    rows.append(("in real time, a second", f"{live} {results.asked_spans_per_second:,.0f}"))
    delay = f"{results.delay_p50_seconds * 1e3:.0f} ms, {results.delay_p99_seconds * 1e3:.0f} ms"
    rows.append(("from a span's end until the API tells it: middle, 99th", delay))
    for name, (middle, last) in results.queries.items():
        live = " to ".join(f"{each * 1e3:.0f}" for each in results.live_queries[name])
        rows.append((name, f"{middle * 1e3:.1f} to {last * 1e3:.1f} ms; while spans come in {live} ms"))
    rows.append(("bytes a span on disk (aim: 12)", f"{results.bytes_per_span:.1f}"))
    print(f"{results.ranks:,} ranks, {os.cpu_count()} cores")
    for name, value in rows:
        print(f"{name:58} {value}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=12288, choices=(64, 256, 1024, 12288))
    parser.add_argument("--seconds", type=float, default=20.0, help="of sending")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--memory", default="256 MiB")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measures all, one after the other."""
    given = parse(arguments)
    results = Results(given.ranks)
    with tempfile.TemporaryDirectory() as name:
        given.folder = str(Path(name) / "run")
        run = make_run(Path(given.folder), given.ranks)
        player = Player(ranks_of(run), MICRO_BATCHES, Wrong(slow_node=given.ranks // 8 // 2), time.time())
        measure_disk(player, Path(name), results)
        with served(run, given.memory) as server:
            measure_ingest(server, player, given, results)
            results.queries = {name: _times(server, question) for name, question in QUERIES.items()}
        with served(run, given.memory) as server:
            measure_live(server, given, results)
    if given.json:
        print(json.dumps(asdict(results)))
    else:
        show(results)
    return 1 if results.spans_lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
