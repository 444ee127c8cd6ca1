"""If these fail, one cannot see whether a transfer reaches its link's limit, or the counters fill a disk."""

import socket
import threading
from pathlib import Path

import pytest

from myriad.system.jsonl import JsonlTail
from myriad.telemetry.links.network_counters import (
    LINK_FIELDS,
    RDMA_FIELDS,
    CounterFile,
    Counters,
    CounterSample,
    describe_peaks,
    peaks,
    sample_often,
)

MB = 10**6


def send_over_loopback(count: int) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: [*iter(lambda: taken[0].recv(2**16), b"")])
    with socket.create_connection(server.getsockname()) as sender:
        taken = server.accept()
        thread.start()
        sender.sendall(bytes(count))
    thread.join()
    taken[0].close()
    server.close()


def test_what_goes_over_a_link_is_counted() -> None:
    counters = Counters(["lo", "lo", "no such link"])
    before = counters.sample()
    send_over_loopback(4 * MB)
    after = counters.sample()
    counters.close()
    (at,) = [LINK_FIELDS.index("sent_bytes")]
    assert after.links["lo"][at] - before.links["lo"][at] >= 4 * MB and list(after.links) == ["lo"]
    assert after.time > before.time and len(after.tcp) == 2


def sample(time: float, sent: int, *, drops: int = 0, again: int = 0) -> CounterSample:
    values = dict.fromkeys(LINK_FIELDS, 0) | {"sent_bytes": sent, "drops": drops}
    return CounterSample(time, {"eth0": tuple(values.values()), "lo": (0,) * len(LINK_FIELDS)}, (again, 0))


def test_a_burst_that_fills_a_link_is_found_in_a_second_that_does_not() -> None:
    """12.5 MB in 10 ms are all that 10 Gbit/s can carry; over the second it is an eighth of it."""
    looks = [sample(k / 100, 0) for k in range(50)]
    looks += [sample(0.5 + k / 100, 12_500_000 * min(k + 1, 10), drops=3, again=40) for k in range(51)]
    first, idle = peaks(looks, {"eth0": 1.25e9})
    assert first.name == "eth0" and first.used_ratio == pytest.approx(1.0) and first.lost == {"drops": 3}
    assert first.mean_sent_bytes_per_second == pytest.approx(1.25e8) and idle.used_ratio == 0
    told, again = describe_peaks(looks, {"eth0": 1.25e9})
    assert "100% of its 1.25 GB/s" in told and "3 drops" in told and again.startswith("40 segments")
    assert "its limit is unknown" in describe_peaks(looks, {})[0]
    assert describe_peaks(looks[:50], {}) == ["nothing went over any link"]


def test_looks_that_come_together_are_no_burst() -> None:
    """Two looks a microsecond apart, between which the kernel counted what it had for 10 ms."""
    looks = [sample(0.0, 0), sample(0.01, 1000), sample(0.010001, 2000), sample(0.02, 3000)]
    assert peaks(looks, {})[0].sent_bytes_per_second < 300_000


def test_ports_of_rdma_are_read_where_there_are_any(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    for name, text in {
        "counters/port_rcv_data": "100\n",
        "counters/port_xmit_data": "25\n",
        "counters/port_xmit_discards": "6\n",
        "hw_counters/local_ack_timeout_err": "7\n",
        "rate": "400 Gb/sec (4X NDR)\n",
    }.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text)
    counters = Counters([], sys=tmp_path)
    found = dict(zip(RDMA_FIELDS, counters.sample().rdma["mlx5_0:1"], strict=True))
    assert found == {
        "received_bytes": 400,
        "sent_bytes": 100,
        "errors": 0,
        "drops": 6,
        "retransmissions": 7,
    }
    assert counters.speeds() == {"mlx5_0:1": 50e9}
    (port / "counters/port_xmit_data").write_text("50\n")
    assert counters.sample().rdma["mlx5_0:1"][1] == 200
    counters.close()


def test_a_file_states_what_its_numbers_are_and_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "counters" / "node-0.jsonl"
    file = CounterFile(path, {"eth0": 1.25e9}, most_bytes=2000)
    for second in range(100):
        file.append([sample(float(second), second)])
    assert sorted(one.name for one in path.parent.iterdir()) == ["node-0.before.jsonl", "node-0.jsonl"]
    assert sum(one.stat().st_size for one in path.parent.iterdir()) < 6000
    head, *looks = JsonlTail(path).poll()
    assert head["fields"]["links"] == list(LINK_FIELDS) and head["speed_bytes_per_second"] == {"eth0": 1.25e9}
    assert looks[-1]["links"]["eth0"][1] == 99


def test_looks_come_often_for_as_long_as_was_asked() -> None:
    counters = Counters(["lo"])
    looks = sample_often(counters, 0.1, 0.01)
    counters.close()
    assert 2 <= len(looks) <= 12 and looks[-1].time - looks[0].time >= 0.09
