"""Hosts that do not find each other, or that outlive their owner, make every figure over links worthless and
leave the user's machine dirty."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from owner import start_a_grandchild

from host_ranks import RankError
from hosts import Hosts, bits_per_second


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    etc = (path.name for path in Path("/etc/netns").glob("*"))
    return [name for name in (*listed.split(), *etc) if name.startswith(f"myriad-{pid}-")]


def is_alive(pid: int) -> bool:
    """A zombie process is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, seconds=60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def meet() -> tuple[int, str, int, list[float]]:
    dist.init_process_group("gloo")
    total = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    local = int(os.environ["LOCAL_RANK"])
    assert len(os.sched_getaffinity(0)) == 1 and torch.get_num_threads() == 1
    return dist.GroupMember.WORLD is None, socket.gethostname(), local, total.tolist()


@pytest.mark.parametrize("rate", [None, "200mbit"])
def test_ranks_in_two_hosts_meet_and_sum(hosts, rate):
    found = hosts(2, rate=rate).run_ranks(meet, ranks_per_host=2)
    assert [(host, local) for _, host, local, _ in found] == [
        ("host0", 0), ("host0", 1), ("host1", 0), ("host1", 1)
    ]  # fmt: skip
    assert all(total == [10.0] * 3 for *_, total in found)


def addresses() -> dict[str, str]:
    names = ("localhost", "host0", "host1", socket.gethostname())
    return {name: socket.gethostbyname(name) for name in names}


def test_host_names_resolve_without_a_name_server(hosts):
    assert (
        hosts(2).run_ranks(addresses)
        == [{"localhost": "127.0.0.1", "host0": "10.77.0.1", "host1": "10.77.0.2"}] * 2
    )


def test_what_travels_between_hosts_is_shaped(hosts):
    """Both ends of each link, at the rate that is set last; not at all without one."""
    made = hosts(2, rate="200mbit")

    def shapers() -> list[str]:
        ends = [(made.namespace(0), "eth0"), (made.namespace(-1), "port0")]
        show = [["tc", "-n", name, "qdisc", "show", "dev", device] for name, device in ends]
        return [subprocess.run(words, capture_output=True, text=True).stdout for words in show]

    assert all("tbf" in line and "200Mbit" in line for line in shapers())
    made.set_rate("50mbit")
    assert all("50Mbit" in line for line in shapers())
    made.set_rate(None)
    assert not any("tbf" in line for line in shapers())


def try_to_connect(seconds: float) -> str:
    """Rank 1, to rank 0, for so long."""
    if os.environ["RANK"] == "0":
        with socket.create_server(("", 4000)) as server:
            server.settimeout(seconds)
            try:
                server.accept()
            except TimeoutError:
                return "nobody came"
        return "somebody came"

    def is_connected() -> bool:
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], 4000), timeout=seconds).close()
        except OSError:
            return False
        return True

    return "connected" if eventually(is_connected, seconds) else "no way"


def test_a_link_can_be_cut_and_restored(hosts):
    made = hosts(2)
    made.set_link(1, up=False)
    assert made.run_ranks(try_to_connect, 1.0) == ["nobody came", "no way"]
    made.set_link(1, up=True)
    assert made.run_ranks(try_to_connect, 60.0) == ["somebody came", "connected"]


def test_a_command_sees_its_own_host_only(hosts):
    made = hosts(2)
    process = made.start(1, ["ip", "-brief", "address"], stdout=subprocess.PIPE, text=True)
    shown = process.communicate(timeout=60)[0]
    assert "10.77.0.2/24" in shown and len(shown.splitlines()) == 2


def fail_or_wait() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has had enough")
    time.sleep(600)


def die_or_wait() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def processes_noted(note: Path) -> list[int]:
    return [int(pid) for path in note.glob("[0-9]") for pid in path.read_text().split()]


def test_a_failing_rank_is_named_and_ends_the_others(hosts):
    made = hosts(2)
    with pytest.raises(RankError, match=r"(?s)rank 1 on host1 failed:.*had enough"):
        made.run_ranks(fail_or_wait)
    with pytest.raises(RankError, match="rank 1 on host1 died with exit code -9"):
        made.run_ranks(die_or_wait)
    with pytest.raises(RankError, match="no answer from rank 0, 1 in"):
        made.run_ranks(time.sleep, 600, timeout_seconds=0.2)
    assert made.run_ranks(int, "7") == [7, 7]


def test_an_exception_leaves_nothing_behind(hosts, tmp_path):
    hosts(1)
    before = namespaces(os.getpid())
    with pytest.raises(ZeroDivisionError), Hosts(2, rate="100mbit") as made:
        made.start_ranks(start_a_grandchild, tmp_path)
        assert eventually(lambda: len(processes_noted(tmp_path)) == 4)
        assert len(namespaces(os.getpid())) > len(before)
        _ = 1 / 0
    assert not any(is_alive(pid) for pid in processes_noted(tmp_path))
    assert namespaces(os.getpid()) == before


def start_owner(note: Path) -> "subprocess.Popen[bytes]":
    script = str(Path(__file__).parent / "owner.py")
    owner = subprocess.Popen([sys.executable, script, str(note)], stderr=subprocess.DEVNULL)
    assert eventually(lambda: len(processes_noted(note)) == 4, 60)
    return owner


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_owner_leaves_nothing_behind(hosts, tmp_path, number):
    hosts(1)
    owner = start_owner(tmp_path)
    owner.send_signal(number)
    assert owner.wait(60) != 0
    assert not any(is_alive(pid) for pid in processes_noted(tmp_path))
    assert namespaces(owner.pid) == []


def test_what_a_killed_owner_left_is_swept_by_the_next(hosts, tmp_path):
    hosts(1)
    owner = start_owner(tmp_path)
    assert namespaces(owner.pid) != []
    owner.kill()
    owner.wait(60)
    with Hosts(1):
        assert namespaces(owner.pid) == []
    assert eventually(lambda: not any(is_alive(pid) for pid in processes_noted(tmp_path)))


@pytest.mark.parametrize("rate", ["fast", "0mbit", "-5mbit", "200", "200mb"])
def test_a_rate_that_cannot_be_is_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        bits_per_second(rate)
    with pytest.raises(ValueError, match="rate"):
        Hosts(2, rate=rate)


def test_more_ranks_than_places_are_refused(hosts):
    with pytest.raises(ValueError, match="world = 5: 1 to 2 hosts x 2 ranks"):
        hosts(2).run_ranks(meet, world=5, ranks_per_host=2)
