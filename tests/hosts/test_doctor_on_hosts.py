"""The one bad node among many, on links that really are slow, cut or slow between two only; and disks that
really are full or cannot be written. If these fail, the wrong node is evicted, or none."""

import os
import subprocess
import sys

import pytest

from hosts import Hosts
from myriad.doctor.pair_tests.pair_findings import Findings
from myriad.doctor.pair_tests.pair_hosts import PairHost
from myriad.doctor.pair_tests.participant import pairwise
from myriad.errors import RunFailedError

SECRET = b"a secret of many letters"
SIZE = 6
GOOD = "20mbit"
"""So slow that a busy machine has no trouble to keep the links full."""


def take_part(links: bool, wait_seconds: float, collectives: bool) -> Findings | None:
    nodes = [PairHost(f"10.77.0.{host + 1}") for host in range(int(os.environ["WORLD_SIZE"]))]
    try:
        rank = int(os.environ["RANK"])
        options = {"wait_seconds": wait_seconds, "links": links, "collectives": collectives}
        return pairwise(nodes, rank, SECRET, seconds=0.3, **options)
    except RunFailedError:
        return None


def findings(
    made: Hosts,
    size: int = SIZE,
    *,
    links: bool = False,
    wait_seconds: float = 30.0,
    collectives: bool = False,
) -> list[Findings | None]:
    return made.run_ranks(take_part, links, wait_seconds, collectives, world=size, timeout_seconds=240)


def named(found: Findings) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.kind, one.nodes) for one in found.culprits]


def slow_between(made: Hosts, a: int, b: int) -> None:
    """What ``a`` sends to ``b`` goes through a class of its own; all other traffic keeps its rate."""
    tc = ["tc", "-n", made.namespace(a)]
    u32 = ["protocol", "ip", "parent", "1:", "u32", "match", "ip", "dst", made.address(b), "flowid", "1:2"]
    for words in (
        ["qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1"],
        ["class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", "htb", "rate", GOOD],
        ["class", "add", "dev", "eth0", "parent", "1:", "classid", "1:2", "htb", "rate", "4mbit"],
        ["filter", "add", "dev", "eth0", *u32],
    ):
        subprocess.run([*tc, *words], check=True, capture_output=True)


def test_the_slow_the_lost_and_the_badly_connected_are_distinguished(hosts):
    made = hosts(SIZE, rate=GOOD)
    healthy = findings(made)
    assert [found and named(found) for found in healthy] == [[]] * SIZE

    made.set_rate("4mbit", [3])
    slow = findings(made)
    assert [named(found) for found in slow] == [[("node", ("10.77.0.4",))]] * SIZE
    assert slow[0].rounds == 3 and slow[0].is_suspect("10.77.0.4") and not slow[0].is_suspect("10.77.0.3")
    made.set_rate(GOOD)

    made.set_link(5, up=False)
    *others, lost = findings(made, wait_seconds=3.0)
    assert lost is None
    assert [named(found) for found in others] == [[("node", ("10.77.0.6",))]] * (SIZE - 1)
    assert others[0].missing == ("10.77.0.6",)
    made.set_link(5, up=True)

    slow_between(made, 1, 3)
    between = findings(made, 4, links=True, collectives=True)
    assert [named(found) for found in between] == [[("link", ("10.77.0.2", "10.77.0.4"))]] * 4
    (group,) = between[0].groups  # no neighbours in the ring: the all-reduce does not use the path
    assert (group.trouble, group.suspects) == ("all-to-all", ("10.77.0.2", "10.77.0.4")), group.words
    assert any("no GPU" in text for text in between[0].skipped)


def test_a_slow_a_lossy_and_a_half_duplex_link_are_each_named_as_what_they_are(hosts):
    made = hosts(SIZE + 1, rate=GOOD)
    made.drop(1, 0.05)
    made.set_half_duplex(4, GOOD)
    made.set_rate("4mbit", [6])
    found = findings(made, SIZE + 1)[0]
    kinds = {one.nodes: one.how for one in found.culprits}
    assert kinds == {("10.77.0.2",): "lossy", ("10.77.0.5",): "half-duplex", ("10.77.0.7",): "slow"}


WRITE = """
from pathlib import Path
from myriad.doctor.probes.host_probe import check_disk
print([reading.problem for reading in check_disk(Path("{folder}")) if reading.name == "disk write"])
"""


@pytest.mark.parametrize(
    ("options", "says"), [("size=1m", "the disk is full"), ("ro", "the disk can only be read")]
)
def test_a_disk_that_cannot_be_written_is_reported_with_its_reason(tmp_path, options, says):
    script = f"mount -t tmpfs -o {options} tmpfs {tmp_path} && exec '{sys.executable}' -c '{{}}'"
    code = WRITE.replace("{folder}", str(tmp_path)).replace('"', '\\"')
    words = ["unshare", "--mount", "sh", "-c", script.replace("'{}'", f'"{code}"')]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("mounting needs root")
    assert says in done.stdout, done.stderr
