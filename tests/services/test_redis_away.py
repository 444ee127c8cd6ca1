"""Redis is lost while a standby waits, and comes back without a memory. If this fails, two drivers act, or
nobody ever drives again, or what happened to ranks meanwhile is forgotten."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from own_loop import in_a_thread

from myriad.comm.rendezvous.redis_address import redis_address
from myriad.supervise.driver.journal import Journal
from myriad.supervise.driver_address import DriverConnection
from myriad.supervise.messages import ORDERS, Beat, NodeJoined, Start
from myriad.supervise.observations import RankExited
from myriad.supervise.policy.run_state import RunPlan

redis_lease = pytest.importorskip("myriad.supervise.driver.redis_lease", reason="needs the package redis")

SECONDS, LEASE_SECONDS = 60.0, 1.0


def wait_until(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


class Drivers:
    """Of a run, each a process; those of one owner are of one `myriad train`."""

    def __init__(self, run: Path, url: str) -> None:
        self.run, self._url = run, url
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, owner: str) -> "subprocess.Popen[bytes]":
        lease = ["--journal", self._url, "--owner", owner, "--lease-seconds", str(LEASE_SECONDS)]
        command = [sys.executable, "-m", "myriad.supervise.driver.driver", str(self.run), *lease]
        environment = os.environ | {"MYRIAD_ENGINE_PID": str(os.getpid())}
        with (self.run / f"driver-{owner}.log").open("ab") as log:
            started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)
        self.started[owner] = started
        return started

    def said(self, owner: str) -> str:
        return (self.run / f"driver-{owner}.log").read_text()

    def who_drives(self) -> str:
        """As executors are told; nobody, when empty."""
        pid = json.loads((self.run / "driver.json").read_text())["pid"]
        return next((owner for owner, one in self.started.items() if one.pid == pid), "")

    def end(self) -> None:
        for one in self.started.values():
            one.kill()
            one.wait()


async def starts_asked(
    reach: DriverConnection, epoch: int, *, ended: bool, until: int, then: Callable[[], object]
) -> list[int]:
    """As the executor of one rank, which trains in ``epoch`` or has died in it, tells the driver that there
    is now; the attempts that it is asked to start until that one, or for half a second when it has it.
    ``then``: what happens while it is still there."""
    found: list[int] = []
    async with reach.link() as link:
        exits = (RankExited(0, epoch, 0, -9, "killed", 5, "", "a.log"),) if ended else ()
        running = (0,) if epoch and not ended else ()
        link.send(NodeJoined(0, epoch, "127.0.0.1", 1, 1, 1, running, exits, False))
        link.send(Beat(0, epoch, 1, ()))
        while until not in (*found, epoch):
            order = await asyncio.wait_for(link.receive(ORDERS), SECONDS)
            found += [order.epoch] if isinstance(order, Start) else []
        try:
            while True:
                order = await asyncio.wait_for(link.receive(ORDERS), 0.5)
                found += [order.epoch] if isinstance(order, Start) else []
        except TimeoutError:
            then()
    return found


@pytest.fixture
def drivers(server, tmp_path: Path) -> Iterator[Drivers]:
    """One that drives, for ``a``, and one that stands by and that the first knows of."""
    lease = redis_lease.RedisLease(redis_address(server.url), tmp_path, "a", LEASE_SECONDS)
    term = lease.take(by_force=True).term
    lease.append(Journal(tmp_path / "journal.jsonl").begin(RunPlan(1, 1, first_epoch=1), term))
    found = Drivers(tmp_path, server.url)
    try:
        found.start("a")
        wait_until("a driver", (tmp_path / "driver.json").exists)
        found.start("b")
        wait_until("one that stands by", lambda: lease.inspect()[1] and "standing by" in found.said("b"))
        yield found
    finally:
        found.end()


def test_what_happens_while_redis_is_away_is_repaired_by_the_one_driver_that_there_is_then(
    server, drivers: Drivers, tmp_path: Path
) -> None:
    reach, first = DriverConnection(tmp_path), drivers.started["a"]

    def lose_redis() -> None:
        server.kill()
        wait_until("the end of a driver that may not be alone", lambda: first.poll() is not None)

    def lose_driver() -> None:
        drivers.started[driving].kill()

    assert in_a_thread(starts_asked(reach, 0, ended=False, until=1, then=lose_redis)) == [1]
    assert first.returncode == 0 and "Traceback" not in drivers.said("a"), drivers.said("a")
    drivers.start("a")  # as its engine does
    wait_until("a word of each", lambda: all("is away" in drivers.said(one) for one in "ab"))
    assert "drives, with term 3" not in drivers.said("a") + drivers.said("b")

    server.start()
    wait_until("another driver", drivers.who_drives)
    driving = drivers.who_drives()
    other = "b" if driving == "a" else "a"
    told = in_a_thread(starts_asked(reach, 1, ended=True, until=2, then=lose_driver))
    assert told == [2], "a rank had died meanwhile"
    wait_until("a third driver", lambda: drivers.who_drives() == other)
    told = in_a_thread(starts_asked(reach, 2, ended=False, until=2, then=lambda: None))
    assert told == [], "nothing has happened to ranks"
    lines = Journal(tmp_path / "journal.jsonl").records()
    written = [(line["term"], line.get("number", 0)) for line in lines]
    assert written == sorted(written) and len({term for term, _ in written}) >= 3
