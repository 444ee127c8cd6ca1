"""docs/security.md says what listens where. Here commands run, and each socket of theirs is in the table.
Files of a run have the modes that run.mode asks for.

If these fail, a port is open of which the table says nothing: add a row with what a peer must prove, or close
the port.
"""

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port
from seen_sockets import (
    COPIES,
    DRIVER,
    GLOO,
    LOCAL,
    MACHINE,
    ROWS_OF,
    STORE,
    Listener,
    Watch,
    assert_in_table,
    row_of,
    table_rows,
)
from tiny_corpora import make_corpus
from watching import wait_until

from myriad.doctor.pair_tests.pair_hosts import PairHost
from myriad.doctor.pair_tests.participant import pairwise
from myriad.job import load_job
from myriad.run import Run

SOURCE = Path(__file__).parents[2] / "src" / "myriad"
SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=12"]
TWO = ["layout.dp=2", "layout.zero=3", "layout.micro_batch=2", "checkpoint.copies_every=5"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


def make_run(path: Path, corpus: Path, *overrides: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *TWO, *overrides]))
    return run


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "myriad.cli.main", *map(str, words)]


def test_training(tmp_path: Path, corpus: Path) -> None:
    """Of two nodes. Others can read no file of the run, and its group what it should, under a umask that asks
    for the opposite; a resume changes who can."""
    run = make_run(tmp_path / "run", corpus, "resilience.nodes=2")
    words = command("train", run.path, "--run.mode", "0750", "--oversubscribe", "--json")
    with Watch() as watch:
        done = subprocess.run(
            words, env=watch.environment, capture_output=True, text=True, timeout=240, umask=0o070
        )
    assert done.returncode == 0, done.stderr
    seen = assert_in_table(watch)
    assert seen == {DRIVER, STORE, GLOO, LOCAL, COPIES}
    assert {"launcher", "driver", "agent", "rank", "other rank", "snapshot server"} <= watch.roles
    for kind in ("spans/*", "logs/rank-0*", "checkpoints/step-*", "*.toml", "metrics.jsonl", "journal*"):
        assert [*run.path.glob(kind)], kind
    private = {"secret", "id", "lock"}
    found = modes(run.path)
    assert names_that_a_group_cannot_read(run.path) == private
    assert all(found[name] == 0o600 for name in private)
    resume(run, "run.mode=0700")
    assert {name for name, mode in modes(run.path).items() if mode & 0o077} == set()
    resume(run, "run.mode=750")
    assert names_that_a_group_cannot_read(run.path) == private


def modes(folder: Path) -> dict[str, int]:
    """The mode of each file and folder, by its path."""
    paths = (path for path in (folder, *folder.rglob("*")) if not path.is_symlink())
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in paths}


def names_that_a_group_cannot_read(folder: Path) -> set[str]:
    """Or that others can, or that the group can write."""
    right = {True: 0o050, False: 0o040}
    return {name for name, mode in modes(folder).items() if mode & 0o077 != right[(folder / name).is_dir()]}


def resume(run: Run, *overrides: str) -> None:
    """Begin a start of the run, without ranks."""
    with run.lock():
        run.create_or_resume(load_job(str(run.job_path), [*overrides]))


def test_watching(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus)
    assert {name for name, mode in modes(run.path).items() if mode & 0o077} == set(), (
        "unless a job asks for it"
    )
    with Watch() as watch:
        environment = watch.environment | {"XDG_STATE_HOME": str(tmp_path / "state")}
        watching = subprocess.Popen(
            command("watch", run.path, "--no-open", "--json", "--port", 0),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert watching.stdout is not None
            port = int(json.loads(watching.stdout.readline())["url"].rpartition(":")[2])
            wait_until(lambda: any(each.port == port for each in watch.found))
        finally:
            watching.terminate()
            watching.wait(60)
            watching.stdout.close()
    assert assert_in_table(watch) == {"`myriad watch`"}
    for path in (tmp_path / "state").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


WITHOUT_PROBES = """
import functools
from myriad.doctor import examine
examine.diagnose = functools.partial(examine.diagnose, probes=())
"""


def test_examining_two_nodes(tmp_path: Path) -> None:
    """The command is the first node, where the others meet; the other node is this process. What a node opens
    to test itself is seen in `test_doctor_command`."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PROBES)
    secret = tmp_path / "secret"
    secret.write_text("a secret of many letters")
    nodes = [PairHost("127.0.0.1", free_port()) for _ in range(2)]
    cluster = ",".join(map(str, nodes))
    words = ("doctor", "--json", "--cluster", cluster, "--secret-file", secret, "--folder", tmp_path)
    with Watch() as watch:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        around = watch.environment | {"PYTHONPATH": path}
        first = subprocess.Popen(command(*words, "--node", nodes[0]), env=around, stdout=subprocess.DEVNULL)
        found = pairwise(nodes, 1, secret.read_bytes(), seconds=0.2, wait_seconds=200)
        first.wait(60)
    assert not found.missing
    seen = assert_in_table(watch, node="127.0.0.1")
    assert {"`myriad doctor --cluster`: first node", STORE} <= seen  # a pair's socket is there for moments


LISTENING_CALLS = {
    "checkpoint/snapshots/snapshot_server_process.py": ROWS_OF["snapshot server"],
    "comm/free_port.py": (),  # probes: bound, never listened on
    "comm/rendezvous/rendezvous_store.py": (STORE,),
    "dashboard/app.py": ("`myriad watch`",),
    "doctor/pair_tests/coordinator.py": ("`myriad doctor --cluster`: first node",),
    "doctor/pair_tests/pair_hosts.py": (),  # probes, closed at once
    "doctor/pair_tests/participant.py": ("`myriad doctor --cluster`: each pair",),
    "doctor/probes/network_probe.py": (MACHINE,),
    "faults/services.py": ("`myriad faults` with Redis",),
    "supervise/driver/driver.py": (DRIVER,),
    "supervise/driver_address.py": (),  # probes, closed at once
    "wire/listener.py": (),  # `Listener.bound` listens for its callers, which are above
}
"""Modules that call what binds or listens, and the rows of their sockets."""


def test_what_could_listen_in_the_sources_is_in_the_table() -> None:
    """Also what no test starts."""
    names = {"bind", "bound", "create_server", "listen", "serve_forever", "start_server", "start_unix_server"}
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in names and "coordinator" not in ast.unparse(node.func):
                found.add(str(path.relative_to(SOURCE)))
    assert found == set(LISTENING_CALLS)
    starters = {row.started_by for row in table_rows()}
    known = {row for rows in [*LISTENING_CALLS.values(), *ROWS_OF.values()] for row in rows}
    assert known <= starters


@pytest.mark.parametrize(
    "found",
    [
        Listener("agent", "tcp", "127.0.0.1", 40000),
        Listener("driver", "tcp", "0.0.0.0", 40000),
        Listener("driver", "udp", "127.0.0.1", 40000),
        Listener("rank", "tcp", "0.0.0.0", 25000),
        Listener("other rank", "tcp", "127.0.0.1", 25000),
        Listener("watch", "tcp", "10.0.0.1", 8765),
        Listener("launcher", "unix", "", 0, "@myriad-run-1234"),
        Listener("snapshot server", "unix", "", 0, "/tmp/socket"),
        Listener("what is new", "tcp", "127.0.0.1", 40000),
    ],
)
def test_a_socket_without_a_row_is_found(found: Listener) -> None:
    assert row_of(found) is None


def test_the_watch_sees_a_new_socket(tmp_path: Path) -> None:
    """As one that a change would open in a rank or a launcher."""
    port = free_port()
    script = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    with Watch() as watch:
        process = subprocess.Popen([sys.executable, "-c", script], env=watch.environment)
        try:
            wait_until(lambda: watch.found)
        finally:
            process.kill()
            process.wait()
    [found] = watch.found
    assert found.port == port and row_of(found) is None
    with pytest.raises(AssertionError):
        assert_in_table(watch)
