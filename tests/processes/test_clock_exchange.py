"""If these fail, spans of nodes whose clocks differ are not brought to one time. Two processes, one of whose
clocks is shifted, over the real connections."""

import asyncio
import os
import time
from pathlib import Path

import torch
from ranks import run_ranks

from myriad.comm.clock_comparison import compare_clocks
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.clock_exchange import ClockComparison, answer_clock
from myriad.supervise.messages import ClockAnswer, ClockAsked

SHIFT_NS = 2_500_000_000
SECRET = b"s" * 64


def shifted() -> int:
    return time.time_ns() + SHIFT_NS


def offset_of_a_rank(shares_machine: bool) -> tuple[int, float]:
    groups = open_world(Layout(dp=3), torch.device("cpu"))
    rank = groups.grid.rank
    together = groups.on_host("clocks")
    assert together is not None
    own = rank > 0 and not shares_machine
    boot = "another machine" if own else "the first"
    known = compare_clocks(together, shifted if own else time.time_ns, boot).at(time.time_ns())
    close_world()
    assert known is not None
    return known


def test_ranks_without_a_node_agent_find_how_far_their_clocks_are_from_the_first_ranks() -> None:
    first, second, third = run_ranks(3, offset_of_a_rank, False)
    assert first == (0, 0.0)
    for offset_ns, error_seconds in (second, third):
        assert abs(offset_ns + SHIFT_NS) <= error_seconds * 1e9 < SHIFT_NS
    assert second[0] == third[0], "ranks of one machine keep their order"


def test_ranks_of_one_machine_have_one_clock() -> None:
    assert run_ranks(3, offset_of_a_rank, True) == [(0, 0.0)] * 3


def run_end(folder: str) -> tuple[int, float] | None:
    """Rank 0 is the driver's end of the wire, rank 1 an executor of another machine."""
    rank = int(os.environ["RANK"])
    return asyncio.run(drive(Path(folder)) if rank == 0 else execute(Path(folder)))


async def drive(folder: Path) -> None:
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = AuthenticatedLink(reader, writer)
        await link.accept(SECRET)
        try:
            while True:
                link.send(answer_clock(await link.receive((ClockAsked,)), time.time_ns()))
        except OSError:
            over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    (folder / "draft").write_text(str(server.sockets[0].getsockname()[1]))
    (folder / "draft").rename(folder / "port")
    async with asyncio.timeout(60):
        await over.wait()


async def execute(folder: Path) -> tuple[int, float] | None:
    async with asyncio.timeout(60):
        while not (folder / "port").exists():
            await asyncio.sleep(0.01)
        link = AuthenticatedLink(
            *await asyncio.open_connection("127.0.0.1", int((folder / "port").read_text()))
        )
        await link.connect(SECRET)
        clocks = ClockComparison(0, shifted, boot="another machine")
        for _ in range(8):
            link.send(clocks.ask())
            clocks.receive(await link.receive((ClockAnswer,)))
        link.close()
    return clocks.offset.at(shifted())


def test_a_node_agent_finds_how_far_its_clock_is_from_the_drivers(tmp_path: Path) -> None:
    _, known = run_ranks(2, run_end, str(tmp_path))
    assert known is not None
    offset_ns, error_seconds = known
    assert abs(offset_ns + SHIFT_NS) <= error_seconds * 1e9 < SHIFT_NS / 100
