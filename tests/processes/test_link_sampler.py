"""If these fail, no counters are there when a link was the reason, or the process that reads them outlives
its node."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from myriad.run import Run
from myriad.supervise.agent.link_monitor import LinkMonitor, watch_often
from myriad.supervise.background import AsyncWriter
from myriad.supervise.observations import LinkStatus
from myriad.telemetry.links import link_evidence
from myriad.telemetry.links.link_evidence import (
    MOST_FILES,
    describe_evidence,
    list_evidence,
    read_evidence,
    write_evidence,
)
from myriad.telemetry.links.link_ring import LinkRing
from myriad.telemetry.links.link_sampler import sample
from myriad.telemetry.progress.progress_page import PROGRESS, ProgressPage, own_row

MB = 10**6
LOOPBACK = (LinkStatus("lo", True, 0, 0),)


def send_over_loopback(count: int) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        taken = server.accept()[0]
        thread = threading.Thread(target=lambda: [*iter(lambda: taken.recv(2**16), b"")])
        thread.start()
        sender.sendall(bytes(count))
        sender.shutdown(socket.SHUT_WR)
        thread.join()
        taken.close()


def wait_for(ring: LinkRing, num_rows: int) -> None:
    deadline = time.monotonic() + 60  # the machine code may have to be made first
    while ring.num_written < num_rows:
        assert time.monotonic() < deadline, "the sampler writes nothing"
        time.sleep(0.02)


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Monitor of a node with one rank, which trains."""
    page = ProgressPage(2)
    monkeypatch.setenv(PROGRESS, page.address(0))
    made = LinkMonitor(Run(tmp_path), 3, page, AsyncWriter())
    made.poll(LOOPBACK, 1)
    yield made
    made.close()


def test_bytes_and_the_step_that_they_went_in_are_in_the_ring_each_ten_milliseconds(
    monitor: LinkMonitor, tmp_path: Path
) -> None:
    ring, row = monitor.ring, own_row()
    assert ring is not None
    wait_for(ring, 5)
    for step in range(1, 4):
        row.step(step)
        wait_for(ring, ring.num_written + 3)
        send_over_loopback(4 * MB)
        wait_for(ring, ring.num_written + 3)
    row.phase("validating")
    wait_for(ring, ring.num_written + 20)
    row.step(4)
    wait_for(ring, ring.num_written + 5)
    rows = ring.newest()
    gaps = rows.time_ns[1:] - rows.time_ns[:-1]
    assert 5e6 < float(gaps.mean()) < 40e6 and (gaps > 0).all()
    for step in range(1, 4):
        own = rows.column("lo", "sent_bytes")[(rows.step == step) & rows.in_step]
        assert own[-1] - own[0] >= 3 * MB
    assert not rows.in_step[rows.step == 3].all() and rows.in_step[-1]
    (traffic,) = monitor.poll(LOOPBACK, 1)
    assert traffic.now_step == 4 and traffic.steps >= 2 and traffic.sent_bytes >= 3 * MB
    # around an anomaly, at the end of the node, without waiting
    monitor.keep("link flap")
    monitor.keep("slow step")
    monitor.close()
    (kept,) = list_evidence(tmp_path / "counters/around")
    assert (kept.node, kept.why) == (3, "link flap")
    head, stored = read_evidence(kept.path)
    assert (
        head["why"] == "link flap" and stored.links == ("lo",) and set(stored.step.tolist()) >= {1, 2, 3, 4}
    )
    assert abs(float(stored.time_ns[-1]) * 1e-9 - time.time()) < 30
    assert any(line.startswith("lo: at most") for line in describe_evidence(kept.path))


def test_a_trace_of_the_network_reads_the_ring_and_the_sampler_ends_with_its_node(
    monitor: LinkMonitor, tmp_path: Path
) -> None:
    assert monitor.ring is not None
    wait_for(monitor.ring, 5)
    written = monitor.ring.num_written
    name, words = watch_often(Run(tmp_path), 3, 0.3, monitor.ring)
    assert monitor.ring.num_written > written and (tmp_path / name).stat().st_size > 500 and words
    code = (
        "import os, subprocess, sys\n"
        "from myriad.telemetry.links.link_ring import LinkRing\n"
        "ring = LinkRing(['lo'])\n"
        "words = ['-m', 'myriad.telemetry.links.link_sampler', str(ring.descriptor), '-1', '0']\n"
        "words += [str(os.getpid()), 'lo']\n"
        "child = subprocess.Popen([sys.executable, *words], pass_fds=[ring.descriptor])\n"
        "while ring.num_written < 3: pass\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    sampler, deadline = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 20
    while sampler.exists() and "Z" not in (sampler / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "it goes on without its node"
        time.sleep(0.05)


def test_files_of_anomalies_are_bounded_and_others_are_refused(monitor: LinkMonitor, tmp_path: Path) -> None:
    assert monitor.ring is not None
    wait_for(monitor.ring, 5)
    folder, rows = tmp_path / "around", monitor.ring.newest()
    for second in range(MOST_FILES + 4):
        write_evidence(folder, second % 2 * 4 + 3, "slow step", 1.7e9 + second, rows, 0)
        write_evidence(folder, 3, "../Hang!", 1.8e9 + second, rows, 0)
    of_node = [one for one in list_evidence(folder) if one.node == 3]
    assert len(of_node) == MOST_FILES and {one.why for one in of_node} == {"hang"}
    os.symlink("/etc/passwd", folder / "node-9-20260101-000000-hang.jsonl.gz")
    assert all(one.node != 9 for one in list_evidence(folder))
    bad = folder / "node-8-20260101-000000-hang.jsonl.gz"
    for text in (b"", b"\x1f\x8b\x08no", of_node[0].path.read_bytes()[:-9]):
        bad.write_bytes(text)
        with pytest.raises(ValueError):
            read_evidence(bad)


def test_files_of_a_node_are_bounded_also_where_thousands_of_nodes_write(
    monitor: LinkMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all nodes are more than a listing has."""
    monkeypatch.setattr(link_evidence, "_MOST_LISTED", 8)
    assert monitor.ring is not None
    wait_for(monitor.ring, 5)
    folder, rows = tmp_path / "around", monitor.ring.newest()
    for second in range(MOST_FILES + 4):
        for node in (3, 4, 5):
            write_evidence(folder, node, "hang", 1.7e9 + second, rows, 0)
    assert len(list(folder.glob("node-3-*"))) == MOST_FILES and len(list_evidence(folder)) == 8


def test_a_counter_that_cannot_be_read_for_a_moment_is_no_jump(tmp_path: Path) -> None:
    """While firmware restarts, reads of an RDMA port's counters fail: petabytes would seem to have gone."""
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    counts = {"counters/port_rcv_data": 1000, "counters/port_xmit_data": 2000}
    counts |= {"hw_counters/packet_seq_err": 7, "hw_counters/local_ack_timeout_err": 5}
    for name, count in counts.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{count}\n")
    ring = LinkRing(["mlx5_0:1"], every_seconds=0.005)
    words = (ring.descriptor, -1, 0, ["mlx5_0:1"])
    thread = threading.Thread(target=sample, args=words, kwargs={"rows": 200, "sys_path": tmp_path})
    thread.start()
    wait_for(ring, 5)
    for name in ("counters/port_rcv_data", "counters/port_xmit_data", "hw_counters/packet_seq_err"):
        os.truncate(port / name, 0)
    thread.join()
    rows = ring.newest()
    ring.close()
    columns = [rows.column("mlx5_0:1", one) for one in ("received_bytes", "sent_bytes", "sent_again")]
    assert [(int(one.min()), int(one.max())) for one in columns] == [(4000, 4000), (8000, 8000), (12, 12)]


def test_a_sampler_whose_node_has_ended_before_it_began_ends(tmp_path: Path) -> None:
    """It takes a second to start: the node agent may be gone by then."""
    ring, gone = LinkRing(["lo"]), subprocess.Popen(["true"])
    gone.wait()
    words = [
        "-m",
        "myriad.telemetry.links.link_sampler",
        str(ring.descriptor),
        "-1",
        "0",
        str(gone.pid),
        "lo",
    ]
    sampler = subprocess.Popen([sys.executable, *words], pass_fds=[ring.descriptor])
    try:
        assert sampler.wait(60) == 0
    finally:
        sampler.kill()
        ring.close()


def test_links_that_come_up_one_after_the_other_do_not_end_the_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ports of InfiniBand become active within seconds of a boot."""

    class Sampler:
        def __init__(self, words: list[str], **options: object) -> None:
            self.code: int | None = None

        def poll(self) -> int | None:
            return self.code

        def kill(self) -> None:
            self.code = -9

        def wait(self, seconds: float) -> int:
            return -9

    monkeypatch.setattr(subprocess, "Popen", Sampler)
    monitor = LinkMonitor(Run(tmp_path), 3, ProgressPage(1), AsyncWriter())
    links = tuple(LinkStatus(f"mlx5_{port}:1", True, 0, 0) for port in range(8))
    for count in range(1, 9):
        monitor.poll(links[:count], 1)
        assert monitor.ring is not None and len(monitor.ring.links) == count
    for _ in range(5):
        assert monitor._sampler is None or monitor._sampler.kill() is None
        monitor.poll(links, 1)
    assert monitor.ring is None, "one that ends again and again is not started for ever"
    monitor.close()
