"""A `myriad watch` process over a small run, for tests."""

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from myriad.job import load_job
from myriad.run import Run
from myriad.telemetry.span_io.span_batch import SpanBatch, encode
from myriad.telemetry.span_io.span_records import RECORD

NAMES = ("forward", "mine")
WORLD, NODE_SIZE = 8, 4


def make_run(folder: Path) -> Run:
    """Of eight ranks on two nodes: dp 2, pp 2, tp 2."""
    run = Run(folder)
    run.create_or_resume(load_job("tiny-3d", [f"comm.node_size={NODE_SIZE}"]))
    run.append_event("start", world=WORLD, device="cpu", precision="float32", peak_flops=8e9)
    return run


def spans_of(step: int, ranks: range = range(WORLD), slow: int = -1, attempt: int = 1) -> SpanBatch:
    """One forward of each rank, some seconds ago."""
    records = np.zeros(len(ranks), RECORD)
    records["rank"], records["step"] = list(ranks), step
    records["start_ns"] = time.time_ns() + (step - 30) * 10**9
    records["duration_ns"] = np.where(records["rank"] == slow, 200 * 10**6, 100 * 10**6)
    return SpanBatch(0, attempt, NAMES, records)


@dataclass
class Watching:
    """Ended with its block, whatever happens there."""

    run: Run
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    told: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        command = [
            sys.executable,
            "-m",
            "myriad.cli.main",
            "watch",
            str(self.run.path),
            "--no-open",
            "--json",
        ]
        port = () if "--port" in self.options else ("--port", "0")
        self.state = self.run.path.parent / "state"
        self.errors = self.run.path.parent / "watch.errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *port, *self.options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"XDG_STATE_HOME": str(self.state)} | self.environment,
            )
        assert self.process.stdout is not None
        self.told = json.loads(self.process.stdout.readline())
        self.port = int(self.told["url"].rpartition(":")[2])
        self.token = self.told["token"]
        bearer = {"Authorization": f"Bearer {self.token}"}
        self.base = f"{self.told['url'].partition(':')[0]}://127.0.0.1:{self.port}"
        self.client = self.new_client(bearer)

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *problem: object) -> None:
        """With SIGTERM, as a service manager does."""
        self.client.close()
        self.process.terminate()
        assert self.process.wait(60) is not None

    def new_client(self, headers: dict[str, str] | None = None) -> httpx.Client:
        """Without a cookie; with TLS it accepts the page's certificate only."""
        verify: ssl.SSLContext | bool = True
        if self.base.startswith("https"):
            (certificate,) = self.state.rglob("*.crt")
            verify = ssl.create_default_context(cafile=certificate)
            verify.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's default from 3.13 on
        return httpx.Client(base_url=self.base, headers=headers, timeout=60.0, verify=verify)

    def ask(self, question: str) -> Any:
        """JSON of an answer that must be one."""
        answer = self.client.get(f"/api/{question}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, body: bytes | SpanBatch) -> httpx.Response:
        """To the collector."""
        data = body if isinstance(body, bytes) else encode(body)
        return self.client.post("/api/spans", content=data)

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What is told of the run, once that is so."""
        end = time.monotonic() + 60.0
        while not holds(told := self.ask("run")):
            assert time.monotonic() < end, told
            time.sleep(0.05)
        return told
