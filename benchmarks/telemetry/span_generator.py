"""Plays the ranks of a large run: a run's folder with metrics and events, and spans sent to its collector.

    python benchmarks/telemetry/span_generator.py RUN [--url http://127.0.0.1:8765] [--steps 60]
        [--micro-batches 4] [--ranks 12288] [--speed 1] [--files] [--hang-at STEP] [--no-faults]
        [--ahead STEPS]

12,288 ranks are 1,536 nodes of 8, dp 192 x pp 8 x tp 8, and run the job's program (`span_player.py`) in steps
of about 6 s with the phases data, gather, forward, tensor, backward, send, receive wait, reduce, optimizer.
Three things are wrong:

slow    one host computes 10 % slower from --slow-from on; its pipeline waits for it, in the end all replicas
drift   one rank begins each step 0.2 ms later than in the step before
hang    from --hang-at on one rank ends no span any more, and nobody gets past the next reduction

Spans of a node are sent when they have ended, once in --send-every seconds, as executors do. --speed 0: as
fast as they are taken. --files: written into RUN/spans instead of being sent.
"""

import argparse
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.job import load_job
from myriad.run import Run
from myriad.system.jsonl import append_line
from myriad.telemetry.shipping.page_token import sender_tokens
from myriad.telemetry.span_io.span_batch import SpanBatch, encode
from myriad.telemetry.span_io.span_files import write_span_file
from span_player import LAYOUTS, Player, Wrong, batches

MICRO_BATCHES = 16


class Sender:
    """One connection that is kept, as an executor has it; counts what was refused. As little work a batch as
    can be: it shares the machine with who is measured."""

    def __init__(self, url: str, token: str | None, wait_seconds: float = 30.0) -> None:
        """Raises ``OSError`` where there is no collector so long."""
        self._address = (urlsplit(url).hostname or "", urlsplit(url).port or 80)
        secret = f"Authorization: Bearer {token}\r\n" if token else ""
        self._head = f"POST /api/spans HTTP/1.1\r\nHost: {self._address[0]}\r\n{secret}Content-Length: "
        self.spans, self.flooded = 0, 0
        until = time.monotonic() + wait_seconds
        while True:
            try:
                self._socket = socket.create_connection(self._address, timeout=60)
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")

    def send(self, batch: SpanBatch) -> None:
        """Raises ``OSError`` when it is refused for another reason than its number."""
        self.send_encoded(encode(batch), len(batch.records))

    def send_encoded(self, body: bytes, spans: int) -> None:
        """The same of one that is encoded already."""
        self._socket.sendall(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        status, length = int(self._answers.readline().split()[1]), 0
        while (line := self._answers.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        told = self._answers.read(length)
        if status == 429:
            self.flooded += spans
        elif status != 204:
            raise OSError(f"{status}: {told.decode(errors='replace').strip()}")
        else:
            self.spans += spans


class Senders:
    """Some connections side by side; a node's batches keep their order."""

    def __init__(self, url: str, token: str | None, connections: int) -> None:
        """Raises ``OSError`` where there is no collector."""
        self._senders = [Sender(url, token) for _ in range(connections)]
        self._queues: list[queue.Queue[SpanBatch | None]] = [queue.Queue(1000) for _ in self._senders]
        self._problem: OSError | None = None
        pairs = zip(self._senders, self._queues, strict=True)
        self._threads = [threading.Thread(target=self._work, args=pair) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def send(self, batch: SpanBatch) -> None:
        """Soon. Raises what an earlier one met."""
        if self._problem is not None:
            raise self._problem
        self._queues[batch.node % len(self._queues)].put(batch)

    def close(self) -> int:
        """When all are sent; the number of spans that were refused."""
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        return sum(sender.flooded for sender in self._senders)

    def _work(self, sender: Sender, waiting: "queue.Queue[SpanBatch | None]") -> None:
        while (batch := waiting.get()) is not None:
            try:
                if self._problem is None:
                    sender.send(batch)
            except OSError as problem:
                self._problem = problem


def make_run(folder: Path, ranks: int) -> Run:
    """Its folder, with the job in it."""
    dp, pp, tp = LAYOUTS[ranks]
    keys = {"layout.dp": dp, "layout.pp": pp, "layout.tp": tp, "layout.virtual_stages": 1, "layout.zero": 1}
    keys |= {"comm.node_size": 8, "layout.micro_batch": 1, "train.global_batch": dp * MICRO_BATCHES}
    job = load_job("megascale-175b-12288", [f"{key}={value}" for key, value in keys.items()])
    run = Run(folder)
    run.create_or_resume(job)
    return run


def ranks_of(run: Run) -> Ranks:
    """The grid on nodes of 8."""
    return Ranks(run.job().layout, 8)


def tell_step(run: Run, player: Player, number: int, began: float) -> None:
    """The line that rank 0 would write."""
    seconds = player.begin_seconds - began
    tokens = player.ranks.layout.dp * player.micro_batches * 2048
    line = {
        "time": player.begin_seconds,
        "step": number,
        "loss": 2.1 + 6.0 / (1 + number / 10),
        "tokens": number * tokens,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "mfu": 0.552 * player.step_seconds / seconds,
        "exposed_comm_seconds": 0.1 * seconds,
    }
    append_line(run.metrics_path, line)


def play(run: Run, player: Player, given: argparse.Namespace, senders: Senders | None) -> int:
    """All steps; how many spans there were."""
    spans = 0
    for number in range(1, given.steps + 1):
        began = player.begin_seconds
        for place, (when, batch) in enumerate(batches(player, number, given.send_every, given.nodes_each)):
            if given.speed and (wait := when - time.time()) > 0:
                time.sleep(wait)
            if senders is not None:
                senders.send(batch)
            else:
                path = run.path / "spans" / f"attempt-1-node-{batch.node}-{number * 10**6 + place}.parquet"
                path.parent.mkdir(exist_ok=True)
                write_span_file(path, batch)
            spans += len(batch.records)
        if player.hangs:
            time.sleep(given.speed * (given.steps - number) * given.step_seconds)
            break
        tell_step(run, player, number, began)
    return spans


def parse(arguments: list[str]) -> argparse.Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=12288, choices=tuple(LAYOUTS))
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--nodes-each", type=int, default=1, help="nodes of one batch")
    parser.add_argument("--send-every", type=float, default=1.0, help="seconds between a node's batches")
    parser.add_argument("--step-seconds", type=float, default=6.0)
    parser.add_argument("--speed", type=int, default=1, choices=(0, 1), help="1: in real time; 0: at once")
    parser.add_argument("--ahead", type=int, default=0, help="steps that lie in the past already")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--slow-from", type=int, default=5)
    parser.add_argument("--hang-at", type=int, default=-1)
    return parser.parse_args(arguments)


def wrong_of(given: argparse.Namespace) -> Wrong:
    """The slow host is the 588th of 1,536 or its like in a smaller run."""
    if given.no_faults:
        return Wrong()
    nodes = given.ranks // 8
    return Wrong(
        slow_node=nodes * 588 // 1536,
        slow_from=given.slow_from,
        drift_rank=given.ranks * 9001 // 12288,
        hang_rank=given.ranks * 4711 // 12288 if given.hang_at >= 0 else -1,
        hang_at=given.hang_at,
    )


def main(arguments: list[str]) -> int:
    """Plays a run."""
    given = parse(arguments)
    run = make_run(given.run, given.ranks)
    begin = time.time() - given.ahead * given.step_seconds
    player = Player(ranks_of(run), given.micro_batches, wrong_of(given), begin, given.step_seconds)
    run.append_event(
        "start",
        world=given.ranks,
        device="cuda",
        precision="bfloat16",
        peak_flops=312e12 * given.ranks,
        peak_source="A100 data sheet",
    )
    began = time.perf_counter()
    spans = flooded = 0
    senders = None
    try:
        token = next(iter(sender_tokens(given.run, given.url)), None)
        senders = None if given.files else Senders(given.url, token, given.connections)
        spans = play(run, player, given, senders)
    except OSError as error:
        print(f"the collector at {given.url}: {error}", file=sys.stderr)
        return 1
    finally:
        flooded = senders.close() if senders is not None else 0
    seconds = time.perf_counter() - began
    rate = f"{spans / seconds:,.0f} a second" + (f", {flooded:,} refused" if flooded else "")
    print(f"{spans:,} spans of {given.ranks:,} ranks in {seconds:.1f} s: {rate}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
