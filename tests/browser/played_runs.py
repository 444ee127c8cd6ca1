"""Runs with something wrong in them, as the span generator plays them, and the server that shows them."""

import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
for folder in ("benchmarks/telemetry", "tests/processes"):
    sys.path.insert(0, str(REPOSITORY / folder))

from ranks import free_port  # noqa: E402

from myriad.run import Run  # noqa: E402
from myriad.system import child_process  # noqa: E402
from myriad.telemetry.span_io.span_batch import SpanBatch, encode  # noqa: E402
from myriad.telemetry.span_io.span_files import write_span_file  # noqa: E402
from span_generator import make_run, ranks_of, tell_step  # noqa: E402
from span_player import Player, Wrong, batches  # noqa: E402

SLOW_NODE, SLOW_FROM = 12, 3
SILENT_RANK, HANG_AT = 98, 6
STEP_SECONDS = 6.0


@dataclass
class Watch:
    """``myriad watch`` as a process of its own; ends with this one."""

    run: Run
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Watch":
        """Returns when it answers."""
        watch = [
            "-m",
            "myriad.cli.main",
            "watch",
            self.run.path,
            "--no-open",
            "--port",
            self.port,
            *self.options,
        ]
        command = [sys.executable, "-S", child_process.__file__, os.getpid(), sys.executable, *watch]
        environment = os.environ | {"MYRIAD_COLLECTOR_TOKEN": self.token}
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, env=environment)
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(self.request("/api/run"), timeout=60).read()
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)

    def post(self, batch: SpanBatch) -> None:
        """As a node sends its spans."""
        urllib.request.urlopen(self.request("/api/spans", encode(batch)), timeout=60).read()

    def request(self, path: str, body: bytes | None = None) -> urllib.request.Request:
        """With the token, as a program sends it."""
        return urllib.request.Request(
            f"{self.address}{path}", body, {"Authorization": f"Bearer {self.token}"}
        )


def chromium() -> str | None:
    """The system's browser."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def player_of(run: Run, wrong: Wrong, steps: int, ago_seconds: float = 0.0, micro_batches: int = 4) -> Player:
    """Whose last step ends about now, or a while ago."""
    begin = time.time() - steps * STEP_SECONDS - ago_seconds
    return Player(ranks_of(run), micro_batches, wrong, begin, STEP_SECONDS)


def tell_start(run: Run, player: Player) -> None:
    """As rank 0 does."""
    world = player.ranks.layout.world
    facts = {"world": world, "peak_flops": world * 312e12, "peak_source": "A100 data sheet"}
    run.append_event("start", time=player.begin_seconds, **facts)


def slow_run(
    folder: Path, ranks: int = 256, steps: int = 8, ago_seconds: float = 0.0, micro_batches: int = 4
) -> Run:
    """Its thirteenth node computes 10 % slower from step 3 on. In files."""
    run = make_run(folder, ranks)
    wrong = Wrong(slow_node=SLOW_NODE, slow_from=SLOW_FROM)
    player = player_of(run, wrong, steps, ago_seconds, micro_batches)
    tell_start(run, player)
    (run.path / "spans").mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        began = player.begin_seconds
        for place, (_, batch) in enumerate(batches(player, step, 10.0, ranks // 8)):
            write_span_file(run.path / "spans" / f"attempt-1-node-0-{10 * step + place}.parquet", batch)
        tell_step(run, player, step, began)
    return run


def tell_repair(run: Run, began: float) -> None:
    """What a driver and the ranks write when a node breaks and is replaced."""
    blamed = {"rank": 41, "node": 5}
    beats = {"seconds_since_heartbeat": 10.4, "allowed_seconds": 10.0}
    saved = {"seconds": 0.4, "bytes": 91 * 2**30}
    silent = {
        **blamed,
        "cause": "node-lost",
        "rule": "no heartbeat",
        "evidence": beats,
        "problem": "node 5 is silent",
    }
    broken = {"node": 5, "verdict": "broken", "cause": "node-lost", "rule": "the node does not answer"}
    events: list[tuple[float, str, dict[str, Any]]] = [
        (2.0, "checkpoint", {"step": 4, **saved}),
        (4.0, "fault", silent),
        (4.1, "diagnosis", broken),
        (
            4.2,
            "eviction",
            {"node": 5, "machine": "gpu-0412", "rule": "a broken node leaves", "evidence": beats},
        ),
        (4.4, "restart", {"epoch": 2, "rule": "a spare takes its place"}),
        (6.0, "checkpoint", {"step": 12, **saved}),
    ]
    for after, event, fields in events:
        run.append_event(event, **{"time": began + STEP_SECONDS * after} | fields)


def hung_run(folder: Path) -> Run:
    """Of which `play_hang` tells."""
    return make_run(folder, 256)


def play_hang(watch: Watch) -> None:
    """One rank stops in the middle of a step, two minutes ago; nodes have sent what had ended."""
    wrong = Wrong(hang_rank=SILENT_RANK, hang_at=HANG_AT)
    player = player_of(watch.run, wrong, HANG_AT, ago_seconds=120.0)
    tell_start(watch.run, player)
    for step in range(1, HANG_AT + 1):
        began = player.begin_seconds
        for _, batch in batches(player, step, 10.0, 32):
            watch.post(batch)
        if not player.hangs:
            tell_step(watch.run, player, step, began)
