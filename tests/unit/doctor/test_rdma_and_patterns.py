"""RDMA tools and collective patterns on machines that have none: what real tools have printed is read with
its units, and real measurements get the right verdict. If these fail, a good NIC is called bad or a bad one
good.

Recorded outputs, as their owners published them: issues of perftest (github.com/linux-rdma/perftest)
#31, #65, #132, #241; a run both ways and one of ib_send_lat in public notes; Debian perftest 4.5; nccl-tests
(github.com/NVIDIA/nccl-tests) #78.
"""

import os
import stat
from pathlib import Path

import pytest

from myriad.doctor.diagnosis import Reading, evaluate
from myriad.doctor.pair_tests.pair_findings import Findings, PairRates, classify_fault, evaluate_groups
from myriad.doctor.pair_tests.pair_rounds import PairTestOutcome, Suspect
from myriad.doctor.probes.collective_patterns import PatternRates, combine_rates, diagnose_patterns
from myriad.doctor.probes.collective_probe import CollectiveRank, environment_of
from myriad.doctor.probes.rdma_probe import check_rdma, find_ports, parse_bandwidth, parse_latency

DASHES = "-" * 87
ISSUE_132 = f"""{DASHES}
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Number of qps   : 1\t\tTransport type : IB
 Link type       : IB
 local address: LID 0x02 QPN 0x0032 PSN 0x5f2841 RKey 0x002440 VAddr 0x007f2e5f64b000
{DASHES}
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 2          5000           0.042350            0.042185            2.636533
 4          5000           0.084507            0.084457            2.639276
 8          5000             0.17               0.17   \t\t   2.641399
{DASHES}
"""
ISSUE_65 = """#bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
1024       1000             0.00               5544.28\t\t   5.677340
"""
BIDIRECTIONAL = f"""WARNING: BW peak won't be measured in this run.
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 1500.000000 != 3300.016000. CPU Frequency is not max.
 65536      560845           0.00               98.02                0.186950
{DASHES}
"""
LATENCY = f"""                    Send Latency Test
 Max inline data : 236[B]
{DASHES}
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 2       1000          0.96           3.45         1.00     \t       1.01        \t0.09   \t\t1.06    \t\t3.45
{DASHES}
"""  # noqa: E501
ISSUE_31 = """initializing CUDA
There are 2 devices supporting CUDA, picking first...
[pid = 4869, dev = 0] device name = [Tesla K80]
cuMemAlloc() of a 16777216 bytes GPU buffer
Couldn't allocate MR
failed to create mr
Failed to create MR
 Couldn't create IB resources
"""
WITHOUT_CUDA = """ib_write_bw: unrecognized option '--use_cuda=0'
 Invalid Command or flag.
 Please check command line and run again.
"""


@pytest.mark.parametrize(
    ("output", "bytes_per_second"),
    [(ISSUE_132, 0.17e9 / 8), (ISSUE_65, 5544.28 * 2**20), (BIDIRECTIONAL, 98.02e9 / 8)],
)
def test_the_average_of_the_last_row_is_read_in_its_unit(output, bytes_per_second):
    assert parse_bandwidth(output) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize("output", ["", ISSUE_31, WITHOUT_CUDA, "#bytes BW average[Tb/sec]\n 1 2 3 4\n"])
def test_what_is_no_result_is_not_taken_for_one(output):
    for parse in (parse_bandwidth, parse_latency):
        with pytest.raises(ValueError, match="no row"):
            parse(output)


def test_latency_is_the_typical_one_with_its_tail():
    found = parse_latency(LATENCY)
    assert (found.typical, found.p99) == pytest.approx((1.00e-6, 1.06e-6))


def port_files(sys: Path, device: str, state: str = "4: ACTIVE", rate: str = "200 Gb/sec (4X HDR)") -> None:
    folder = sys / "class/infiniband" / device / "ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(state + "\n")
    (folder / "rate").write_text(rate + "\n")


def tools(folder: Path, *, server: str, client: str, gpu: str) -> None:
    """Tools that listen and connect as the real ones do, and print what real ones have printed."""
    script = f"""#!{os.sys.executable}
import socket, sys
name, words = sys.argv[0].rpartition("/")[2], sys.argv[1:]
port = int(words[words.index("-p") + 1])
gpu = [word for word in words if word.startswith("--use_cuda=")]
if gpu and {gpu!r}:
    print({gpu!r}); sys.exit(1)
if words[-1] == "127.0.0.1":
    socket.create_connection(("127.0.0.1", port)).recv(1)
    print({LATENCY!r} if name == "ib_write_lat" else {client!r})
else:
    with socket.create_server(("127.0.0.1", port)) as listening:
        listening.accept()[0].send(b".")
    print({server!r})
"""
    for name in ("ib_write_bw", "ib_read_bw", "ib_write_lat"):
        (folder / name).write_text(script)
        (folder / name).chmod(stat.S_IRWXU)


def test_each_port_is_tested_to_memory_gpu_and_the_next_port(tmp_path, monkeypatch):
    for device in ("mlx5_0", "mlx5_1"):
        port_files(tmp_path, device, rate="100 Gb/sec (4X EDR)")
    port_files(tmp_path, "mlx5_2", state="1: DOWN")
    tools(tmp_path, server="", client=BIDIRECTIONAL, gpu=ISSUE_31)
    monkeypatch.setenv("PATH", str(tmp_path))
    readings = {one.name: one for one in check_rdma(tmp_path, num_gpus=1)}
    rate = readings["mlx5_0 port 1 to memory node 0"]
    assert rate.value == pytest.approx(98.02e9 / 8) and evaluate(rate, {}).verdict == "ok"
    assert evaluate(rate, {rate.hardware: {rate.name: 200e9 / 8}}).verdict == "bad"
    assert readings["mlx5_1 port 1 to mlx5_0 port 1"].value == rate.value
    assert readings["mlx5_0 port 1 latency"].value == pytest.approx(1e-6)
    assert "assumed unused" in readings["mlx5_2 port 1 state"].skipped
    gpu = readings["mlx5_0 port 1 from GPU 0"]
    assert "load nvidia-peermem" in gpu.skipped and evaluate(gpu, {}).verdict == "skipped"
    assert evaluate(gpu, {gpu.hardware: {gpu.name: 9e9}}).verdict == "bad", "it worked on the healthy node"


def test_what_cannot_be_tested_is_reported_with_its_reason(tmp_path, monkeypatch):
    assert [one.skipped for one in check_rdma(tmp_path)] == [
        "no RDMA device (/sys/class/infiniband is empty)"
    ]
    port_files(tmp_path, "mlx5_0")
    assert find_ports(tmp_path)[0].bytes_per_second == 25e9
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "install perftest" in list(check_rdma(tmp_path))[-1].skipped
    tools(tmp_path, server="", client=BIDIRECTIONAL, gpu=WITHOUT_CUDA)
    monkeypatch.setenv("PATH", str(tmp_path))
    skipped = {one.name: one.skipped for one in check_rdma(tmp_path, num_gpus=1)}
    assert skipped["mlx5_0 port 1 to GPU 0"] == "this perftest was built without CUDA"
    assert skipped["RDMA port to port"] == "fewer than two active ports"


def test_half_of_the_rate_into_a_gpu_is_slow(tmp_path):
    """perftest #241: 200 Gb/s, 23,000 MB/s to memory, 11,000 MB/s to a GPU behind another processor."""
    memory = Reading(name="m", value=23_000 * 2**20, floor=0.8 * 25e9, unit="bytes/s")
    gpu = Reading(name="g", value=11_000 * 2**20, floor=0.5 * 25e9, unit="bytes/s")
    assert [evaluate(one, {}).verdict for one in (memory, gpu)] == ["ok", "slow"]


# Patterns

NAMES = ["n1", "n2", "n3", "n4"]


def pairs(slow: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {(a, b): slow.get((a, b), 10e9) for a in range(4) for b in range(4) if a != b}


def test_published_runs_get_the_verdict_of_their_pattern():
    """nccl-tests #78: 64 V100 on 100 Gb/s, all-reduce 4.32 GB/s, all-to-all 0.508 GB/s of bus bandwidth."""
    verdict = diagnose_patterns(PatternRates(4.32178e9, 0.507636e9), NAMES)
    assert verdict.kind == "all-to-all" and "flows that run at the same time" in verdict.words


def test_each_kind_of_link_fault_is_distinguished():
    assert diagnose_patterns(PatternRates(9e9, 9e9, pairs({})), NAMES).kind == ""
    kernel = diagnose_patterns(PatternRates(2e9, 9e9, pairs({})), NAMES)
    assert kernel.kind == "all-reduce" and "NCCL_PROTO=Simple" in kernel.words and not kernel.ranks
    path = diagnose_patterns(PatternRates(9e9, 2e9, pairs({(0, 2): 1e9})), NAMES)
    assert (path.kind, path.ranks) == ("all-to-all", (0, 2)) and "between n1 and n3" in path.words
    shared = diagnose_patterns(PatternRates(9e9, 2e9, pairs({})), NAMES)
    assert shared.kind == "all-to-all" and "ECMP" in shared.words
    bad = pairs({pair: 1e9 for pair in pairs({}) if 3 in pair})
    node = diagnose_patterns(PatternRates(1e9, 1e9, bad), NAMES)
    assert (node.kind, node.ranks) == ("both", (3,))
    wrong = diagnose_patterns(PatternRates(9e9, 9e9, wrong=("all-reduce",)), NAMES)
    assert wrong.kind == "wrong" and "wrong bits" in wrong.words


def test_a_group_is_analysed_by_its_peers_and_a_failed_one_is_reported():
    good, slow = PatternRates(9e9, 9e9), PatternRates(4e9, 4e9)
    groups = [NAMES, ["n5", "n6"], ["n7", "n8"]]
    found = evaluate_groups("one switch", "mlx5_1:1", "nccl", groups, [good, slow, "n8: no answer"])
    assert [one.trouble for one in found] == ["", "both", "failed"]
    findings = Findings.of(PairTestOutcome([], 9e9, 2, 4), NAMES, {}, [], {}, found, ["NCCL: no GPU on n9"])
    assert not findings.healthy and findings.skipped == ("NCCL: no GPU on n9",)
    assert "collectives in one switch (n7, n8, rail mlx5_1:1, nccl): failed: n8: no answer" in findings.words


def test_answers_of_ranks_are_the_slowest_and_nonsense_is_refused():
    answers = {
        rank: {"all_reduce": 9e9 - rank, "all_to_all": 8e9, "pairs": {str(1 - rank): 7e9}} for rank in (0, 1)
    }
    assert combine_rates(answers) == PatternRates(9e9 - 1, 8e9, {(1, 0): 7e9, (0, 1): 7e9})
    for wrong in ({}, {"all_reduce": "x", "all_to_all": 1}, {"all_reduce": 1, "all_to_all": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            combine_rates({0: wrong})


@pytest.mark.parametrize(
    ("backend", "rail", "expected"),
    [
        ("nccl", "mlx5_1:1", {"NCCL_IB_HCA": "=mlx5_1:1", "NCCL_SOCKET_IFNAME": "=eth0"}),
        ("nccl", "eth1", {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_IB_DISABLE": "1"}),
        ("nccl", "", {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ("gloo", "eth1", {"GLOO_SOCKET_IFNAME": "eth1"}),
        ("gloo", "", {"GLOO_SOCKET_IFNAME": "eth0"}),
    ],
)
def test_a_rail_binds_the_traffic_of_its_run(backend, rail, expected):
    seat = CollectiveRank(
        rank=0, world=2, host="h", port=1, secret="s", backend=backend, rail=rail, interface="eth0"
    )
    assert environment_of(seat) == expected


@pytest.mark.parametrize(
    ("look", "how"),
    [
        (PairRates(10, 10, 10, 0.03), "lossy"),
        (PairRates(10, 9, 4, 0.0), "half-duplex"),
        (PairRates(3, 10, 3, 0.0), "slow out"),
        (PairRates(10, 3, 3, 0.0), "slow in"),
        (PairRates(3, 3, 3, 0.0), "slow"),
        (PairRates(), "silent"),
        (PairRates(10, 10, 10, 0.001), ""),
    ],
)
def test_a_second_measurement_classifies_the_fault(look, how):
    assert classify_fault(look, 10.0) == how
    outcome = PairTestOutcome([Suspect("node", (2,), 5.0, 3)], 10.0, 3, 5)
    (named,) = Findings.of(outcome, NAMES, {}, [], {(2,): look}, [], []).culprits
    assert named.how == how and "node n3" in named.words(10.0)
