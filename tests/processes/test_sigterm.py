"""If these fail, a process stays after SIGTERM because a peer never answers, and blocks a node or a pod."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from same_run import slow_steps
from watching import descendants, is_alive, process_of, wait_until

from myriad.cli.main import STOP_SECONDS
from myriad.job import load_job
from myriad.run import Run

MYRIAD = (sys.executable, "-m", "myriad.cli.main")
SLACK_SECONDS = 5.0
TINY = ("tiny", "--train.threads", "1", "--train.steps", "100000", "--oversubscribe")
SAVE = ("--checkpoint.timeout_seconds", "1")


class SilentServer:
    """Accepts connections, reads, and never says anything."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.asked = threading.Event()
        self._held: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(link)
            self.asked.set()

    def close(self) -> None:
        self._listener.close()
        for link in self._held:
            link.close()


@pytest.fixture
def server() -> Iterator[SilentServer]:
    found = SilentServer()
    yield found
    found.close()


@pytest.fixture
def run(tmp_path: Path, server: SilentServer) -> Run:
    """A run whose driver is the silent server."""
    run = Run(tmp_path / "run")
    job = load_job("tiny", ["resilience.engine=join", "resilience.nodes=2", "layout.dp=2"])
    run.create_or_resume(job)
    (run.path / "secret").write_text("0" * 64)
    address = {"host": "127.0.0.1", "port": server.port, "term": 1, "pid": os.getpid(), "beat": 0}
    (run.path / "driver.json").write_text(json.dumps(address))
    return run


def start(folder: Path, *words: str, **environment: str) -> "subprocess.Popen[str]":
    words = words if words[0].endswith("python") or words[0] == sys.executable else (*MYRIAD, *words)
    return subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[str]", seconds: float) -> None:
    """Send SIGTERM. The process has to end within ``seconds``, and what it has started with it."""
    below = [pid for pid in descendants(process.pid) if "snapshot_server" not in words_of(pid)]
    process.terminate()
    try:
        process.wait(seconds + SLACK_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode != 0
    wait_until(lambda: not any(is_alive(pid) for pid in below), 20.0)


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


WITHOUT_PROBES = """
import functools
from myriad.cli.main import main
from myriad.doctor import examine
examine.diagnose = functools.partial(examine.diagnose, probes=())
main()
"""
"""A command line whose doctor goes to the other nodes at once."""
URL, REDIS = "http://127.0.0.1:{port}", "redis://127.0.0.1:{port}"
ASK_A_PEER = {
    "join": ("join", "{run}", "--wait", "600"),
    "evict": ("evict", "{run}", "0"),
    "trace": ("trace", "{run}"),
    "watch --remote": ("watch", "--no-open", "--remote", URL),
    "doctor --cluster": (
        sys.executable, "-c", WITHOUT_PROBES,
        "doctor", "--cluster", "127.0.0.1:{port},127.0.0.2", "--node", "127.0.0.2",
    ),
    "alerts test": ("alerts", "test", "tiny", "--alerts.webhook.url", URL),
    "train: corpus": ("train", *TINY, "--run", "./new", "--data.corpus", URL),
    "train: s3": ("train", *TINY, "--run", "./new", "--checkpoint.url", "s3://bucket/run"),
    "train: store": ("train", *TINY, *SAVE, "--layout.dp", "2", "--run", "./new", "--comm.store", REDIS),
    "train: journal": ("train", *TINY, "--run", "./new", "--resilience.journal", REDIS),
    "checkpoint list": ("checkpoint", "list", "s3://bucket/run"),
    "checkpoint verify": ("checkpoint", "verify", "s3://bucket/run"),
    "train: initial weights": ("train", *TINY, "--run", "./new", "--train.init_from", URL),
    "standby": ("train", "{run}", "--standby"),
}  # fmt: skip


@pytest.mark.parametrize("name", ASK_A_PEER)
def test_a_command_whose_peer_never_answers_ends(
    name: str, tmp_path: Path, run: Run, server: SilentServer
) -> None:
    if name == "standby":
        text = run.job_path.read_text()
        run.job_path.write_text(
            text.replace('journal = "file"', f'journal = "redis://127.0.0.1:{server.port}"')
        )
    words = [word.format(port=server.port, run=run.path) for word in ASK_A_PEER[name]]
    address = f"http://127.0.0.1:{server.port}"
    process = start(
        tmp_path,
        *words,
        AWS_ENDPOINT_URL=address,
        MYRIAD_DOCTOR_SECRET="0" * 64,
    )
    for _ in range(2000):
        if server.asked.wait(0.1) or process.poll() is not None:
            break
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    assert server.asked.is_set(), "the peer was not asked"
    time.sleep(0.5)
    end(process, STOP_SECONDS)


KUBERNETES = """
import sys
from pathlib import Path
from myriad.launchers.kubernetes.kubernetes_launcher import Api, KubernetesLauncher
from myriad.launchers.supervised_run import supervise_run
from myriad.run import Run
run, url, account = Run(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
launcher = KubernetesLauncher(run, Api(url, account), "default", "run", 1)
launcher.replace(1)
sys.exit(supervise_run(run, 2, launcher) != "interrupted")
"""


def test_a_launcher_whose_api_server_never_answers_ends(
    tmp_path: Path, run: Run, server: SilentServer
) -> None:
    """It looks for the pod of a node that was given up, while the run waits for its nodes."""
    (tmp_path / "token").write_text("a token")
    address = f"http://127.0.0.1:{server.port}"
    process = start(tmp_path, sys.executable, "-c", KUBERNETES, str(run.path), address, str(tmp_path))
    has_driver = lambda: (run.path / "journal.jsonl").exists() and (run.path / "driver.json").exists()  # noqa: E731
    try:
        assert server.asked.wait(120.0) and process.poll() is None
        wait_until(has_driver, 120.0)
        below = descendants(process.pid)
        process.terminate()
        assert process.wait(1.0 + 60.0 + 30.0 + SLACK_SECONDS) == 0, "it was interrupted"
    finally:
        process.kill()
    wait_until(lambda: not any(map(is_alive, below)), 20.0)


EXIT = """
import atexit, sys, time
from myriad.cli import command_line, main
def interrupted(words):
    raise KeyboardInterrupt
command_line.run_command, main.STOP_SECONDS, sys.argv = interrupted, 0.2, ["myriad", "runs"]
atexit.register(time.sleep, 600)
main.main()
"""


def test_a_library_that_hangs_at_exit_keeps_no_interrupted_command() -> None:
    """As Ray's clean-up does while its control service is silent."""
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130 and "did not end within" in ended.stderr


def training(folder: Path, *options: str) -> "subprocess.Popen[str]":
    """A run of two ranks that computes."""
    words = ("train", *TINY, *SAVE, "--run", "./run", "--layout.dp", "2", "--checkpoint.memory_seconds", "1")
    environment = slow_steps(folder / "faults", 5.0)
    process = start(folder, *words, "--comm.timeout_seconds", "20", *options, **environment)
    run = Run(folder / "run")
    wait_until(lambda: process.poll() is not None or (run.exists and len(run.read_metrics()) > 5), 90.0)
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    return process


def snapshot_server(launcher: int, folder: Path) -> int:
    found = [
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if "snapshot_server" in words_of(pid)
    ]
    return next(pid for pid in found if str(os.readlink(f"/proc/{pid}/cwd")) == str(folder))


PEERS = (("driver", "snapshot server"), ("agent_process",), ("rank-1",))
"""Processes that are stopped, run by run. Neither of the first two ends the other, or waits for it."""


@pytest.mark.parametrize("peers", PEERS, ids="+".join)
def test_a_run_ends_though_some_of_its_processes_are_stopped(peers: tuple[str, ...], tmp_path: Path) -> None:
    process = training(tmp_path)
    server = snapshot_server(process.pid, tmp_path)
    pids = [server if peer == "snapshot server" else process_of(peer, process.pid) for peer in peers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        end(process, 1.0 + 60.0 + 30.0)
    finally:
        for each in (*pids, *descendants(process.pid)):
            if is_alive(each):
                os.kill(each, signal.SIGKILL)


MEMBERS = (("rank-0", "snapshot server", "fork_server", "driver"), ("agent_process",))
"""Processes of one run, in the order in which they are to end. The agent's end ends its fork server and its
ranks, so it has a run of its own."""


@pytest.mark.parametrize("members", MEMBERS, ids="+".join)
def test_each_process_of_a_run_ends_though_the_others_are_stopped(
    members: tuple[str, ...], tmp_path: Path
) -> None:
    process = training(tmp_path)
    server = snapshot_server(process.pid, tmp_path)
    pids = {name: server if name == "snapshot server" else process_of(name, process.pid) for name in members}
    others = {process.pid, *descendants(process.pid), server}
    for each in others:
        os.kill(each, signal.SIGSTOP)
    try:
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not is_alive(pid), 45.0)
    finally:
        for each in others:
            if is_alive(each):
                os.kill(each, signal.SIGKILL)
        process.wait(60)
