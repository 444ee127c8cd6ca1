"""Executors find the driver that drives. If these fail, they follow one that has lost its lease, or none."""

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from myriad.supervise import driver_address as herald_module
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.driver_address import AddressFile, DriverConnection, read_address
from myriad.system.whole_file import write_whole
from myriad.wire.run_secret import run_secret

SECONDS = 60.0
"""Of patience with this machine."""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


class Place:
    """Where drivers of several terms listen: this process."""

    def __init__(self, run: Path) -> None:
        self.run = run
        run_secret(run / "secret")

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        self.address: dict[str, object] = {"host": host, "port": port, "silent_seconds": 3}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await AuthenticatedLink(reader, writer).accept(run_secret(self.run / "secret"))

    def tell(self, **told: float) -> None:
        write_whole(self.run / "driver.json", json.dumps({**self.address, **told}))


def test_a_node_agent_leaves_a_driver_for_one_of_a_higher_term_and_never_goes_back(tmp_path: Path) -> None:
    """The first may be stopped, and its machine answer for it for ever."""

    async def follow() -> None:
        place, reach = Place(tmp_path), DriverConnection(tmp_path)
        await place.open()
        place.tell(term=2, alone_seconds=9)
        with pytest.raises(ConnectionError):
            async with reach.link() as link:
                place.tell(term=3)
                await asyncio.wait_for(link.receive(()), SECONDS)
        async with reach.link():
            pass
        place.tell(term=2)
        with pytest.raises(TimeoutError, match="lost its lease"):
            async with reach.link():
                pass
        place.tell()  # a person has begun the run anew, without a lease
        async with reach.link():
            pass

    asyncio.run(follow())


@pytest.mark.parametrize(("told", "kept_seconds"), [({}, 3), ({"term": 1, "alone_seconds": 9}, 9)])
def test_ranks_outlive_a_driver_s_machine_for_as_long_as_another_may_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, float], kept_seconds: float
) -> None:
    async def lose() -> None:
        place, reach = Place(tmp_path), DriverConnection(tmp_path)
        await place.open()
        place.tell(**told)
        async with reach.link():
            pass
        reach.failed(TimeoutError())  # nothing was answered for three seconds
        assert reach.is_cut_off() == (kept_seconds == 3)
        later = time.monotonic() + kept_seconds - 3
        monkeypatch.setattr(herald_module, "time", SimpleNamespace(monotonic=lambda: later, sleep=time.sleep))
        reach.failed(TimeoutError())
        assert reach.is_cut_off()

    asyncio.run(lose())


def test_ranks_of_a_node_that_is_cut_off_from_a_driver_that_lives_end_as_soon_as_without_a_lease(
    tmp_path: Path,
) -> None:
    async def cut_off() -> None:
        place, reach = Place(tmp_path), DriverConnection(tmp_path)
        await place.open()
        place.tell(term=1, beat=3, alone_seconds=9)
        async with reach.link():
            pass
        reach.failed(TimeoutError())
        place.server.close()
        for term, beat, is_cut_off in ((1, 4, False), (1, 4, False), (2, 0, False), (2, 1, True)):
            place.address["port"] = 1  # nothing is there, though that would be an answer
            place.tell(term=term, beat=beat, alone_seconds=9)
            with pytest.raises(OSError):
                async with reach.link():
                    pass
            assert reach.is_cut_off() == is_cut_off

    asyncio.run(cut_off())


@pytest.mark.slow
def test_what_an_older_driver_wrote_late_does_not_hide_the_newer_one(tmp_path: Path) -> None:
    is_over, lost = False, list[int]()
    address_file = AddressFile(tmp_path, {"term": 4, "port": 7})
    address_file.repeat(lambda: not is_over, lambda: lost.append(4))
    write_whole(tmp_path / "driver.json", json.dumps({"term": 3, "port": 8}))
    wait_until(lambda: read_address(tmp_path)["term"] == 4)
    beat = read_address(tmp_path)["beat"]
    wait_until(lambda: read_address(tmp_path)["beat"] > beat)
    write_whole(tmp_path / "driver.json", json.dumps({"term": 5, "port": 8}))
    wait_until(lambda: lost)
    assert read_address(tmp_path)["term"] == 5, "a newer one stays"
    is_over = True


def test_another_driver_has_come_before_it_has_imported_what_it_does_not_need() -> None:
    """No process reports ranks until the agent has started, and pydantic takes as long as all the rest."""
    heavy = "{'pydantic', 'numpy', 'torch'}"
    code = f"import sys, myriad.supervise.driver.driver; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_a_driver_that_starts_on_a_full_disk_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end at once, be started again, and end, while executors look for the one before."""
    AddressFile(tmp_path, {"host": "127.0.0.1", "port": 54321, "term": 1, "silent_seconds": 30.0})

    def refuse(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(herald_module, "write_whole", refuse)
    AddressFile(tmp_path, {"host": "127.0.0.1", "port": 1234, "term": 2, "silent_seconds": 3})
    found = read_address(tmp_path)
    assert (found["port"], found["term"]) == (1234, 2)
    with pytest.raises(FileNotFoundError):
        AddressFile(tmp_path / "no_file_of_an_earlier_one", {"port": 1})
