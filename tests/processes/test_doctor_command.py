"""``myriad doctor`` as a person and a scheduler see it: what it says, its exit code, and what it refuses; and
what happens when strangers reach the port of a pairwise test."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from ranks import free_port
from seen_sockets import GLOO, MACHINE, STORE, Watch, assert_in_table

from myriad.doctor.hardware import cpu_key
from myriad.doctor.pair_tests import coordinator
from myriad.doctor.pair_tests.pair_hosts import PairHost, find_self, read_nodes, read_secret
from myriad.doctor.pair_tests.pair_protocol import PROTOCOL
from myriad.doctor.pair_tests.participant import _KEEP_ALIVE, _SILENCE_SECONDS, pairwise
from myriad.errors import BadInputError, RunFailedError
from myriad.wire.framing import FrameKind, pack_header
from myriad.wire.socket_channel import SocketChannel

SECRET = b"a secret of many letters"


def doctor(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "myriad.cli.main", "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, **environment}
    )


def test_a_node_that_differs_from_the_baseline_is_unfit_with_the_reason(tmp_path):
    """And no port is open on the way of which docs/security.md says nothing."""
    baseline = tmp_path / "baseline.json"
    known = {"version of torch": "0.1", "memory bandwidth, memory node 0": 1e3}
    baseline.write_text(json.dumps({"format": 1, "hardware": {cpu_key(): known}}))
    with Watch() as watch:
        done = doctor(
            "--json", "--baseline", str(baseline), "--folder", str(tmp_path / "runs"), **watch.environment
        )
    assert done.returncode == 1, done.stderr
    own = sorted({each.host for each in watch.found if each.kind == "tcp"} - {"127.0.0.1"})
    assert len(own) <= 1 and "0.0.0.0" not in own
    assert watch.roles and assert_in_table(watch, *own) <= {MACHINE, STORE, GLOO}
    found = json.loads(done.stdout)
    items = {item["name"]: item for item in found["items"]}
    assert items["version of torch"]["verdict"] == "bad" and items["version of torch"]["expected"] == "0.1"
    assert items["memory bandwidth, memory node 0"]["expected"] == 1e3
    assert "version of torch (bad)" in found["words"] and not found["healthy"]
    assert {
        "disk write",
        "matrix product of a core",
        "mini-model, bit for bit",
        "all-to-all among ranks",
    } <= set(items)
    assert items["mini-model, bit for bit"]["verdict"] == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["baseline.json"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--baseline", "/nowhere/baseline.json"], '--baseline = "/nowhere/baseline.json": cannot be read'),
        (["--folder", sys.executable], "must be a folder, or a path where one can be created"),
        (["--wait", "nan"], "--wait = nan: 0 to 86,400 seconds"),
        (["--node", "a"], '--node = "a": only with --cluster'),
        (["--cluster", "127.0.0.1"], "2 to 16384 comma-separated hosts"),
        (
            ["--cluster", "127.0.0.1,203.0.113.1"],
            'MYRIAD_DOCTOR_SECRET = "": a secret of 16 characters or more',
        ),
    ],
)
def test_bad_input_is_one_line_and_measures_nothing(arguments, says):
    start = time.monotonic()
    done = doctor(*arguments, MYRIAD_DOCTOR_SECRET="")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("text", ["/bin/sh", "a,a", "a,b c", "a,b:0", "a,b:70000", "a,::1", "", "a"])
def test_hosts_that_cannot_be_are_refused(text):
    with pytest.raises(BadInputError, match="--cluster"):
        read_nodes(text)


def test_hosts_are_read_with_commas_or_from_a_file_and_this_one_is_found(tmp_path):
    (tmp_path / "hosts").write_text("203.0.113.1:77  # the first\n127.0.0.1\n\n")
    nodes = read_nodes(str(tmp_path / "hosts"))
    assert (
        nodes
        == read_nodes("203.0.113.1:77,127.0.0.1")
        == [PairHost("203.0.113.1", 77), PairHost("127.0.0.1")]
    )
    assert find_self(nodes) == 1 and find_self(nodes, "203.0.113.1:77") == 0
    for two in ("127.0.0.1,127.0.0.1:2", "203.0.113.1,203.0.113.2"):
        with pytest.raises(BadInputError, match="select one with --node"):
            find_self(read_nodes(two))
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(BadInputError, match="16 characters"):
        read_secret(tmp_path / "secret")


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nodes = [PairHost("127.0.0.1", taken.getsockname()[1]), PairHost("127.0.0.1", free_port())]
        with pytest.raises(BadInputError, match="cannot be used to listen"):
            pairwise(nodes, 0, SECRET)


def strangers() -> list[bytes]:
    """Garbage, another version, an endless answer, one that proves nothing, and nothing."""
    endless = pack_header(FrameKind.ANSWER, 2**32 - 1) + bytes(100)
    forged = pack_header(FrameKind.ANSWER, 64) + bytes(64) + pack_header(FrameKind.MESSAGE, 2) + b"{}"
    return [b"GET / HTTP/1.1\r\n\r\n" * 3, b"MY\x09\x02" + bytes(68), endless, forged, b""]


def inject(node: PairHost) -> None:
    """Who is on the way of a node that has proved the secret adds a message of its own."""
    with socket.create_connection((node.host, node.port), 10) as connection:
        SocketChannel(connection).connect(PROTOCOL, SECRET)
        text = b'{"op": "hello", "node": 1}'
        connection.sendall(pack_header(FrameKind.MESSAGE, len(text)) + text + bytes(32))
        with suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_strangers_and_other_secrets_are_sent_away_and_the_test_continues():
    nodes = [PairHost("127.0.0.1", free_port()), PairHost("127.0.0.1", free_port())]
    found = {}

    def run(index: int) -> None:
        found[index] = pairwise(
            nodes, index, SECRET, seconds=0.1, wait_seconds=30, complaints=["disk sync"] * index
        )

    first = threading.Thread(target=run, args=(0,))
    first.start()
    with pytest.raises(RunFailedError, match="another secret"):
        pairwise(nodes, 1, b"this is not the secret", wait_seconds=10)
    for data in strangers():
        with socket.create_connection((nodes[0].host, nodes[0].port), 10) as connection:
            connection.sendall(data)
    inject(nodes[0])
    second = threading.Thread(target=run, args=(1,))
    second.start()
    for thread in (first, second):
        thread.join(60)
    assert found[0] == found[1] and not found[0].culprits and not found[0].missing
    assert found[0].complaints == {str(nodes[1]): ("disk sync",)} and found[0].expected > 0


def test_a_node_that_is_named_receives_the_outcome_after_collectives_that_hang_on_every_rail() -> None:
    """It has no part in the rounds: groups under a switch and across, on each of eight rails."""
    assert 2 * 8 * (coordinator._COLLECT_SECONDS + coordinator._ANSWER_SECONDS) < _SILENCE_SECONDS
    assert _KEEP_ALIVE[socket.TCP_KEEPIDLE] < 300, "a first node that died is noticed long before"
