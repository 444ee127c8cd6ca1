"""The disk of the run folder hangs: the driver's journal, events and log are on it. It must still see faults
and have ranks started again."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mounted import disk_that_hangs
from own_loop import in_a_thread

from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.driver.journal import Journal
from myriad.supervise.messages import ORDERS, Beat, End, KeepCounters, NodeJoined, Start
from myriad.supervise.observations import RankExited
from myriad.supervise.policy.run_state import RunPlan
from myriad.wire.run_secret import run_secret

SECONDS = 60.0


async def _repair_twice(address: tuple[str, int], secret: bytes, freeze: Callable[[], None]) -> None:
    """As an executor of one rank, which dies again and again; a node that is silent would be evicted."""
    link = AuthenticatedLink(*await asyncio.open_connection(*address))
    await link.connect(secret)
    link.send(NodeJoined(0, 0, "127.0.0.1", 1, 1, 1, (), (), False))
    for epoch in (1, 2, 3):
        while not isinstance(order := await link.receive(ORDERS), Start):
            pass
        assert order.epoch == epoch
        if epoch == 1:
            freeze()
        link.send(Beat(0, epoch, 1, ()))
        link.send(RankExited(0, epoch, 0, -9, "killed", epoch, "", "a.log"))
        while isinstance(order := await link.receive(ORDERS), KeepCounters):
            pass
        assert isinstance(order, End)
    assert isinstance(await link.receive(ORDERS), Start)
    link.close()


def _wait_until_written(journal: Journal, epoch: int) -> None:
    deadline = time.monotonic() + SECONDS
    while (state := journal.replay()[1]) is None or state.epoch < epoch:
        assert time.monotonic() < deadline, "what waited for the disk was not written"
        time.sleep(0.02)


def test_a_driver_whose_disk_hangs_detects_faults_and_repairs_them(tmp_path: Path) -> None:
    with disk_that_hangs(tmp_path) as disk:
        journal = Journal(disk.path / "journal.jsonl")
        journal.begin(RunPlan(1, 1, first_epoch=1))
        secret = run_secret(disk.path / "secret")
        command = [sys.executable, "-m", "myriad.supervise.driver.driver", str(disk.path)]
        environment = os.environ | {"MYRIAD_ENGINE_PID": str(os.getpid())}
        with (disk.path / "driver.log").open("ab") as log:
            driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)
        try:
            assert driver.stdout is not None and driver.stdout.readline()  # it listens
            found = json.loads((disk.path / "driver.json").read_text())
            address = found["host"], found["port"]
            in_a_thread(asyncio.wait_for(_repair_twice(address, secret, disk.freeze), SECONDS))
            assert driver.poll() is None
            disk.thaw()
            _wait_until_written(journal, 4)
        finally:
            disk.thaw()
            driver.kill()
            driver.wait()
